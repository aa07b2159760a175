// The tiles of the backward kernels. docs/design/backward.md says what else was measured. Plain host code.
#pragma once

namespace fa3::bwd {

// Where WGMMA reads an operand from.
enum class OperandSource { kSharedMemory, kRegisters };

struct BwdTile {
  int rank;         // kernels of lower rank are preferred where they serve
  int tile_m;       // query rows per step
  int tile_n;       // keys per CTA
  int stages_q;     // of the Q ring
  int stages_dout;  // of the dO ring
  int stages_ds;    // of the dS ring
  int dq_columns;   // of dQ that a consumer warpgroup computes, and publishes, at a time
  // Less shared memory is read where registers allow it.
  OperandSource v_in_dp = OperandSource::kSharedMemory;   // V in dP = V dO^T
  OperandSource ds_in_dk = OperandSource::kSharedMemory;  // dS in dK += dS^T Q
};

constexpr BwdTile kHdim64{.rank = 0,
                          .tile_m = 64,
                          .tile_n = 128,
                          .stages_q = 3,
                          .stages_dout = 2,
                          .stages_ds = 3,
                          .dq_columns = 32,
                          .v_in_dp = OperandSource::kRegisters,
                          .ds_in_dk = OperandSource::kRegisters};
constexpr BwdTile kHdim96{
    .rank = 1, .tile_m = 64, .tile_n = 128, .stages_q = 3, .stages_dout = 2, .stages_ds = 3, .dq_columns = 48};
constexpr BwdTile kHdim128{
    .rank = 2, .tile_m = 64, .tile_n = 128, .stages_q = 3, .stages_dout = 2, .stages_ds = 3, .dq_columns = 64};
constexpr BwdTile kHdim192{.rank = 3,
                           .tile_m = 64,
                           .tile_n = 64,
                           .stages_q = 2,
                           .stages_dout = 2,
                           .stages_ds = 3,
                           .dq_columns = 32,
                           .ds_in_dk = OperandSource::kRegisters};
constexpr BwdTile kHdim256{.rank = 4,
                           .tile_m = 64,
                           .tile_n = 64,
                           .stages_q = 2,
                           .stages_dout = 1,
                           .stages_ds = 2,
                           .dq_columns = 64,
                           .ds_in_dk = OperandSource::kRegisters};

}  // namespace fa3::bwd
