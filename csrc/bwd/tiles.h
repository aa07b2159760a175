// The tiles of the backward kernels. docs/design/backward.md says what else was measured.
#pragma once

namespace fa3 {

struct BwdTile {
  int tile_m;       // query rows per step
  int tile_n;       // keys per CTA
  int stages_q;     // of the Q ring
  int stages_dout;  // of the dO ring
  bool ds_from_registers;  // dK += dS^T Q takes dS from registers; where those are short, from shared memory
};

constexpr BwdTile kBwdHdim64{64, 128, 3, 2, true};
constexpr BwdTile kBwdHdim128{64, 128, 3, 2, false};

}  // namespace fa3
