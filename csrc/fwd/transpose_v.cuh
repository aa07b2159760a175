// The transposer warps: V of a tile, as TMA brought it, to the operand that P V needs.
//
// pipeline   filled by          full arrivals        freed by             empty arrivals
// v          producer warp      1 + bytes (TMA)      transposer warps     one per transposer warp
// vt         transposer warps   one per such warp    consumers            one per consumer warp
//
// How bytes move is drawn in fwd/fp8_layout.h.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>

#include "common/block_range.h"
#include "fwd/fp8_config.h"
#include "fwd/fp8_layout.h"

namespace fa3 {

// 16 channels of all keys. kTransposesAtOnce loads are under way together: one alone leaves the warp waiting for it.
template <class Config>
CUTLASS_DEVICE void transpose_channels(uint8_t const* v, uint8_t* vt, int channel) {
  constexpr int kAtOnce = Config::kTransposesAtOnce;
  int const lane_idx = cutlass::canonical_lane_idx();
  int const first = channel_bytes(lane_idx, 0), second = channel_bytes(lane_idx, 1);
  CUTLASS_PRAGMA_UNROLL
  for (int key = 0; key < Config::kTileN; key += kAtOnce * kTransposedKeys) {
    uint32_t r[kAtOnce][4];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      int const source =
          v_load_offset<Config::kSlabColumns>(lane_idx, key + i * kTransposedKeys, channel, Config::kTileN);
      cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<cute::uint128_t const*>(v + source), r[i][0], r[i][1], r[i][2],
                                    r[i][3]);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      int const destination = vt_store_offset(lane_idx, key + i * kTransposedKeys, channel);
      cute::SM90_U32x4_STSM_N::copy(__byte_perm(r[i][0], r[i][1], first), __byte_perm(r[i][0], r[i][1], second),
                                    __byte_perm(r[i][2], r[i][3], first), __byte_perm(r[i][2], r[i][3], second),
                                    *reinterpret_cast<cute::uint128_t*>(vt + destination));
    }
  }
}

// Transposes what the producer brings, in its order.
template <class Config>
CUTLASS_DEVICE void transpose_v(typename Config::Params const& params, typename Config::SharedStorage& smem,
                                int transposer_idx) {
  static_assert(Config::kTileN == 128, "a line of the transposed tile is a swizzle's 128 bytes");
  PipelineState<Config::kStagesV> v_state;
  PipelineState<Config::kStagesVt> own_vt_state;
  // Rings that turn at the same pace share a state: a transposer has few registers.
  constexpr bool kInStep = Config::kStagesV == Config::kStagesVt;
  auto& vt_state = either<kInStep>(v_state, own_vt_state);

  TileScheduler scheduler(params.scheduler, blockIdx.x);
  Tile tile;
  while (scheduler.next(tile)) {
    int n_blocks_left = block_range(tile.block * Config::kTileM, Config::kTileM, Config::kTileN, params.seqlen_q,
                                    params.seqlen_k, params.causal)
                            .end;
    CUTLASS_PRAGMA_NO_UNROLL
    while (n_blocks_left-- > 0) {
      smem.pipeline_v.wait(v_state);
      smem.pipeline_vt.empty[vt_state.stage].wait(vt_state.phase ^ 1);
      compiler_fence();
      auto const* v = reinterpret_cast<uint8_t const*>(smem.v[v_state.stage]);
      auto* vt = reinterpret_cast<uint8_t*>(smem.vt[vt_state.stage]);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int channel = kTransposedChannels * transposer_idx; channel < Config::kHeadDim;
           channel += kTransposedChannels * Config::kTransposerWarps) {
        transpose_channels<Config>(v, vt, channel);
      }
      cutlass::arch::fence_view_async_shared();  // V is written, then read by WGMMA
      __syncwarp();
      smem.pipeline_v.release(v_state);
      if (cutlass::canonical_lane_idx() == 0) {
        smem.pipeline_vt.full[vt_state.stage].arrive();
      }
      if constexpr (!kInStep) {
        v_state.advance();
      }
      vt_state.advance();
    }
  }
}

}  // namespace fa3
