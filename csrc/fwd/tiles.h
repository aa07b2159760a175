// The tiles of the forward kernels. docs/design/forward.md and fp8.md say what else was measured. Plain host code.
#pragma once

#include "common/fp8_format.h"
#include "common/mask.h"

namespace fa3::fwd {

// In which order a consumer warpgroup issues its two products.
enum class Schedule {
  kOverlapped,  // P V of a block together with Q K^T of the next
  kSerial,      // one after the other: P V uses the accumulator registers of S (FP8)
};

// How V comes to the product P V.
enum class VLayout {
  kRows,        // as it lies in global memory, rows of channels: 16 bits
  kConverted,   // FP8: the converter warps transpose it in shared memory
  kTransposed,  // FP8: the quantizer has written it transposed
};

// Where a warp lays O before TMA stores it.
enum class OutBuffer {
  kOwn,
  kAliasesQ,  // there is no room for more; the pipeline drains between tiles
};

struct FwdTile {
  int rank;                 // kernels of lower rank are preferred where they serve
  int consumer_warpgroups;  // 64 query rows each
  int tile_n;               // keys per block
  int stages_q = 1;
  int stages_kv;  // of the K ring, and of the ring that P V reads V from
  OutBuffer out_buffer = OutBuffer::kOwn;
  int out_slabs = 1;  // of kOwn: slabs of O (64 columns, see common/tma.cuh) that a warp lays there at a time
  Schedule schedule = Schedule::kOverlapped;
  VLayout v_layout = VLayout::kRows;
  int stages_v_rows = 0;     // of kConverted: of the ring of V before it is transposed
  int pv_slice_columns = 0;  // FP8: columns of O whose P V is computed at a time; 0: all
  // The most keys of a query that the tile is meant for: without a mask, or with one that limits the keys after it (all
  // but windows to the left alone). Kernels of higher rank take over beyond.
  int max_seqlen_k_full = kUnlimited;
  int max_seqlen_k_causal = kUnlimited;
};

// Small tiles waste less of short sequences and of the diagonal; large ones read less shared memory per FLOP.
constexpr FwdTile kHdim64Short{.rank = 0,
                               .consumer_warpgroups = 2,
                               .tile_n = 128,
                               .stages_kv = 3,
                               .max_seqlen_k_full = 0,
                               .max_seqlen_k_causal = 1024};
constexpr FwdTile kHdim64Long{.rank = 1, .consumer_warpgroups = 3, .tile_n = 128, .stages_kv = 3};
constexpr FwdTile kHdim96{.rank = 2, .consumer_warpgroups = 2, .tile_n = 128, .stages_kv = 3, .out_slabs = 3};
constexpr FwdTile kHdim128Short{.rank = 3,
                                .consumer_warpgroups = 2,
                                .tile_n = 128,
                                .stages_kv = 2,
                                .out_slabs = 2,
                                .max_seqlen_k_full = 4096,
                                .max_seqlen_k_causal = 4096};
constexpr FwdTile kHdim128Long{.rank = 4, .consumer_warpgroups = 2, .tile_n = 176, .stages_kv = 2};
constexpr FwdTile kHdim192{.rank = 5, .consumer_warpgroups = 2, .tile_n = 96, .stages_kv = 2};
constexpr FwdTile kHdim256Short{.rank = 6,
                                .consumer_warpgroups = 2,
                                .tile_n = 64,
                                .stages_kv = 2,
                                .out_slabs = 2,
                                .max_seqlen_k_full = 512,
                                .max_seqlen_k_causal = 1024};
constexpr FwdTile kHdim256Long{
    .rank = 7, .consumer_warpgroups = 2, .tile_n = 80, .stages_kv = 2, .out_buffer = OutBuffer::kAliasesQ};

// FP8. A block of keys has one scale, and so kFp8ScaleRows keys.
constexpr FwdTile kE4m3Hdim64{.rank = 0,
                              .consumer_warpgroups = 3,
                              .tile_n = kFp8ScaleRows,
                              .stages_kv = 3,
                              .v_layout = VLayout::kConverted,
                              .stages_v_rows = 3};
constexpr FwdTile kE4m3Hdim128{.rank = 1,
                               .consumer_warpgroups = 3,
                               .tile_n = kFp8ScaleRows,
                               .stages_kv = 3,
                               .out_slabs = 2,
                               .schedule = Schedule::kSerial,
                               .v_layout = VLayout::kConverted,
                               .stages_v_rows = 3,
                               .pv_slice_columns = 64};
constexpr FwdTile kE4m3Hdim256{.rank = 2,
                               .consumer_warpgroups = 2,
                               .tile_n = kFp8ScaleRows,
                               .stages_kv = 2,
                               .out_slabs = 2,
                               .schedule = Schedule::kSerial,
                               .v_layout = VLayout::kConverted,
                               .stages_v_rows = 1,
                               .pv_slice_columns = 128};
constexpr FwdTile kE4m3Hdim64Vt{
    .rank = 3, .consumer_warpgroups = 3, .tile_n = kFp8ScaleRows, .stages_kv = 2, .v_layout = VLayout::kTransposed};
constexpr FwdTile kE4m3Hdim128Vt{.rank = 4,
                                 .consumer_warpgroups = 3,
                                 .tile_n = kFp8ScaleRows,
                                 .stages_kv = 2,
                                 .out_slabs = 2,
                                 .schedule = Schedule::kSerial,
                                 .v_layout = VLayout::kTransposed,
                                 .pv_slice_columns = 64};
constexpr FwdTile kE4m3Hdim256Vt{.rank = 5,
                                 .consumer_warpgroups = 2,
                                 .tile_n = kFp8ScaleRows,
                                 .stages_kv = 2,
                                 .out_slabs = 4,
                                 .schedule = Schedule::kSerial,
                                 .v_layout = VLayout::kTransposed,
                                 .pv_slice_columns = 128};

}  // namespace fa3::fwd
