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

template <class Config>
CUTLASS_DEVICE void transpose_channels(uint8_t const* v, uint8_t* vt, int channel) {
  int const lane_idx = cutlass::canonical_lane_idx();
  int const first = channel_bytes(lane_idx, 0), second = channel_bytes(lane_idx, 1);
  CUTLASS_PRAGMA_UNROLL
  for (int key = 0; key < Config::kTileN; key += kTransposedKeys) {
    int const source = v_load_offset<Config::kSlabColumns>(lane_idx, key, channel, Config::kTileN);
    int const destination = vt_store_offset(lane_idx, key, channel);
    uint32_t r[4];
    cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<cute::uint128_t const*>(v + source), r[0], r[1], r[2], r[3]);
    cute::SM90_U32x4_STSM_N::copy(__byte_perm(r[0], r[1], first), __byte_perm(r[0], r[1], second),
                                  __byte_perm(r[2], r[3], first), __byte_perm(r[2], r[3], second),
                                  *reinterpret_cast<cute::uint128_t*>(vt + destination));
  }
}

// Transposes what the producer brings, in its order.
template <class Config>
CUTLASS_DEVICE void transpose_v(typename Config::Params const& params, typename Config::SharedStorage& smem,
                                int transposer_idx) {
  static_assert(Config::kTileN == 128, "a line of the transposed tile is a swizzle's 128 bytes");
  PipelineState<Config::kStagesV> v_state;
  PipelineState<Config::kStagesVt> vt_state;

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
           channel += kTransposedChannels * Config::kVReaderWarps) {
        transpose_channels<Config>(v, vt, channel);
      }
      cutlass::arch::fence_view_async_shared();  // V is written, then read by WGMMA
      __syncwarp();
      smem.pipeline_v.release(v_state);
      if (cutlass::canonical_lane_idx() == 0) {
        smem.pipeline_vt.full[vt_state.stage].arrive();
      }
      v_state.advance();
      vt_state.advance();
    }
  }
}

}  // namespace fa3
