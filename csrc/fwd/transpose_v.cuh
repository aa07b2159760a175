// The transposer warps: V of a tile, as TMA brought it, to the operand that P V needs.
//
// pipeline   filled by          full arrivals        freed by             empty arrivals
// v          producer warp      1 + bytes (TMA)      transposer warps     one per transposer warp
// vt         transposer warps   one per such warp    consumers            one per consumer warp
//
// How bytes move is drawn in fwd/fp8_layout.h.
#pragma once

#include <cute/algorithm/tuple_algorithms.hpp>

#include "common/block_range.h"
#include "fwd/fp8_config.h"
#include "fwd/fp8_layout.h"

namespace fa3 {

// ldmatrix.trans and stmatrix of four matrices. The offset is part of the instruction: where the loop below is
// unrolled, a lane's addresses differ by constants, and moving 512 bytes takes 6 instructions.
template <int kOffset>
CUTLASS_DEVICE void load_transposed(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4 + %5];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address), "n"(kOffset));
}
template <int kOffset>
CUTLASS_DEVICE void store(uint32_t address, uint32_t const (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0 + %1], {%2, %3, %4, %5};" ::"r"(address), "n"(kOffset),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]));
}

// Transposes what the producer brings, in its order. This warp's share of a tile: every kTransposerWarps-th 16
// channels.
template <class Config, int kTransposer>
CUTLASS_DEVICE void transpose_v(typename Config::Params const& params, typename Config::SharedStorage& smem) {
  static_assert(Config::kTileN == 128, "a line of the transposed tile is a swizzle's 128 bytes");
  constexpr int kSlab = Config::kSlabColumns;
  constexpr int kKeySteps = Config::kTileN / kTransposedKeys;
  constexpr int kChannelSteps =
      cute::ceil_div(Config::kHeadDim / kTransposedChannels - kTransposer, Config::kTransposerWarps);
  constexpr int kSteps = kChannelSteps * kKeySteps;
  constexpr int kUnderWay = cute::min(Config::kTransposesUnderWay, kSteps);
  auto const channel_of = [](int step) {
    return (kTransposer + step / kKeySteps * Config::kTransposerWarps) * kTransposedChannels;
  };
  auto const key_of = [](int step) { return step % kKeySteps * kTransposedKeys; };

  int const lane_idx = cutlass::canonical_lane_idx();
  int const first = channel_bytes(lane_idx, 0), second = channel_bytes(lane_idx, 1);
  uint32_t const lane_v = cute::cast_smem_ptr_to_uint(smem.v) + v_load_offset<kSlab>(lane_idx, 0, 0, Config::kTileN);
  uint32_t const lane_vt = cute::cast_smem_ptr_to_uint(smem.vt) + vt_store_offset(lane_idx, 0, 0);

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
      uint32_t const v = lane_v + v_state.stage * sizeof(smem.v[0]);
      uint32_t vt[kKeySteps];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kKeySteps; ++i) {
        vt[i] = lane_vt + vt_state.stage * sizeof(smem.vt[0]) ^ i * kTransposedKeys;
        asm volatile("" : "+r"(vt[i]));  // else the channel is added before the exclusive or, each time
      }
      uint32_t r[kUnderWay][4];
      auto const load = [&](auto step) CUTLASS_LAMBDA_FUNC_INLINE {
        constexpr int kChannel = channel_of(step);
        load_transposed<v_tile_offset<kSlab>(key_of(step), kChannel, Config::kTileN)>(v ^ kChannel % kSlab,
                                                                                      r[step % kUnderWay]);
      };
      // kUnderWay loads are under way together: one alone leaves the warp waiting for it.
      cute::for_each(cute::make_int_sequence<kUnderWay>{}, load);
      cute::for_each(cute::make_int_sequence<kSteps>{}, [&](auto step) CUTLASS_LAMBDA_FUNC_INLINE {
        auto const& loaded = r[step % kUnderWay];
        uint32_t const transposed[4] = {
            __byte_perm(loaded[0], loaded[1], first), __byte_perm(loaded[0], loaded[1], second),
            __byte_perm(loaded[2], loaded[3], first), __byte_perm(loaded[2], loaded[3], second)};
        if constexpr (step + kUnderWay < kSteps) {
          load(cute::Int<step + kUnderWay>{});
        }
        store<channel_of(step) * Config::kTileN>(vt[step % kKeySteps], transposed);
      });
      cutlass::arch::fence_view_async_shared();  // V is written, then read by WGMMA
      __syncwarp();
      smem.pipeline_v.release(v_state);
      if (lane_idx == 0) {
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
