// The tiles of the backward kernels. docs/design/backward.md says what else was measured.
#pragma once

namespace fa3 {

struct BwdTile {
  int tile_m;       // query rows per step
  int tile_n;       // keys per CTA
  int stages_q;     // of the Q ring
  int stages_dout;  // of the dO ring
  int stages_ds;    // of the dS ring
  int dq_columns;   // of dQ that a consumer warpgroup computes, and hands over, at a time
  // Less shared memory is read where registers allow it:
  bool v_from_registers;   // in dP = V dO^T
  bool ds_from_registers;  // in dK += dS^T Q
};

constexpr BwdTile kBwdHdim64{64, 128, 3, 2, 3, 32, true, true};
constexpr BwdTile kBwdHdim96{64, 128, 3, 2, 3, 48, false, false};
constexpr BwdTile kBwdHdim128{64, 128, 3, 2, 3, 64, false, false};
constexpr BwdTile kBwdHdim192{64, 64, 2, 2, 3, 32, false, true};
constexpr BwdTile kBwdHdim256{64, 64, 2, 1, 2, 64, false, true};

}  // namespace fa3
