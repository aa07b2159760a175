// The tiles of the forward kernels. docs/design/forward.md says what else was measured.
#pragma once

#include <limits>

namespace fa3 {

struct FwdTile {
  int consumer_warpgroups;  // 64 query rows each
  int tile_n;               // keys per block
  int stages_q;
  int stages_kv;  // of the K ring and of the V ring
  // Slabs of O (64 columns, see common/tma.cuh) that a warp stages in shared memory at a time. With 0 there is no room
  // for O: it takes the place of Q, and the pipeline drains between tiles.
  int out_slabs;
  // The longest seqlen_k that this tile is meant for; above it the head_dim's next, larger one takes over.
  int max_seqlen_k_full = std::numeric_limits<int>::max();
  int max_seqlen_k_causal = std::numeric_limits<int>::max();
};

// FP8: rows that share a scale, of Q, K or V; also the keys per tile.
constexpr int kFp8BlockRows = 128;

struct FwdFp8Tile {
  int consumer_warpgroups;
  int stages_kv;      // of K, and of V as P V needs it
  int stages_v_rows;  // of V before the kernel has transposed it; 0: it is in global memory as P V needs it
  int out_slabs;
  int pv_columns;  // of O whose P V is computed at a time
  // P V of a block runs together with Q K^T of the next. Else each has the registers of the other.
  bool overlaps;
};

// Small tiles waste less of short sequences and of the diagonal; large ones read less shared memory per FLOP.
constexpr FwdTile kFwdHdim64Short{2, 128, 1, 3, 1, 0, 1024};
constexpr FwdTile kFwdHdim64Long{3, 128, 1, 3, 1};
constexpr FwdTile kFwdHdim96{2, 128, 1, 3, 3};
constexpr FwdTile kFwdHdim128Short{2, 128, 1, 2, 2, 4096, 4096};
constexpr FwdTile kFwdHdim128Long{2, 176, 1, 2, 1};
constexpr FwdTile kFwdHdim192{2, 96, 1, 2, 1};
constexpr FwdTile kFwdHdim256Short{2, 64, 1, 2, 2, 512, 1024};
constexpr FwdTile kFwdHdim256Long{2, 80, 1, 2, 0};

constexpr FwdFp8Tile kFwdFp8Hdim64{3, 3, 3, 1, 64, true};
constexpr FwdFp8Tile kFwdFp8Hdim128{3, 3, 3, 2, 64, false};
constexpr FwdFp8Tile kFwdFp8Hdim256{2, 2, 1, 2, 128, false};
constexpr FwdFp8Tile kFwdFp8Hdim64Vt{3, 2, 0, 1, 64, true};
constexpr FwdFp8Tile kFwdFp8Hdim128Vt{3, 2, 0, 2, 64, false};
constexpr FwdFp8Tile kFwdFp8Hdim256Vt{2, 2, 0, 4, 128, false};

}  // namespace fa3
