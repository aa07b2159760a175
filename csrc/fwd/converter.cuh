// The converter warps (FP8): they turn V of a tile, rows as TMA brings them, into the operand that P V reads.
//
// pipeline   filled by         full arrivals        freed by          empty arrivals
// v_rows     producer warp     1 + bytes (TMA)      converter warps   one per converter warp
// v          converter warps   one per such warp    consumers         one per consumer warp
//
// common/fp8_format.h draws how bytes move.
#pragma once

#include <cute/algorithm/tuple_algorithms.hpp>

#include "common/fp8_format.h"
#include "common/mask.h"
#include "fwd/config.h"

namespace fa3::fwd {

// ldmatrix.trans and stmatrix of four matrices. The offset is part of the instruction: where the loop below is
// unrolled, a lane's addresses differ by constants, and moving 512 bytes takes 6 instructions.
template <int kOffset>
CUTLASS_DEVICE void load_transposed(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4 + %5];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address), "n"(kOffset));
}
template <int kOffset>
CUTLASS_DEVICE void store_matrices(uint32_t address, uint32_t const (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0 + %1], {%2, %3, %4, %5};" ::"r"(address), "n"(kOffset),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]));
}

template <bool kFirst, class First, class Second>
CUTLASS_DEVICE auto& first_if(First& first, Second& second) {
  if constexpr (kFirst) {
    return first;
  } else {
    return second;
  }
}

// Transposes what the producer brings, in its order. The share of one warp: every kConverterWarps-th 16 channels.
template <class Config, int kWarp>
CUTLASS_DEVICE void convert_v(typename Config::Params const& params, typename Config::SharedStorage& smem) {
  static_assert(Config::kTileN == 128, "a line of the transposed tile is a swizzle's 128 bytes");
  constexpr int kSlab = Config::kSlabColumnsV;
  constexpr int kKeySteps = Config::kTileN / kTransposedKeys;
  constexpr int kChannelSteps =
      cute::ceil_div(Config::kHeadDimV / kTransposedChannels - kWarp, Config::kConverterWarps);
  constexpr int kSteps = kChannelSteps * kKeySteps;
  constexpr int kMostInFlight = Config::kConsumerWarpgroups == 2 ? 4 : 1;  // as the registers allow
  constexpr int kTransposesInFlight = cute::min(kMostInFlight, kSteps);
  auto const channel_of = [](int step) {
    return (kWarp + step / kKeySteps * Config::kConverterWarps) * kTransposedChannels;
  };
  auto const key_of = [](int step) { return step % kKeySteps * kTransposedKeys; };

  int const lane_idx = cutlass::canonical_lane_idx();
  int const first = channel_bytes(lane_idx, 0), second = channel_bytes(lane_idx, 1);
  uint32_t const lane_rows =
      cute::cast_smem_ptr_to_uint(smem.v_rows) + v_load_offset<kSlab>(lane_idx, 0, 0, Config::kTileN);
  uint32_t const lane_vt = cute::cast_smem_ptr_to_uint(smem.v) + vt_store_offset(lane_idx, 0, 0);

  PipelineState<Config::kStagesVRows> rows_state;
  // Rings of as many stages share a state: a converter has few registers.
  constexpr bool kInStep = Config::kStagesVRows == Config::kStagesKV;
  PipelineState<Config::kStagesKV> own_vt_state;
  auto& vt_state = first_if<kInStep>(rows_state, own_vt_state);

  StaticScheduler scheduler(params.scheduler, blockIdx.x);
  Tile tile;
  while (scheduler.next(tile)) {
    SeqlenInfo const seqlen(params.seqlen, tile.batch_idx);
    auto const mask = Config::mask(params, seqlen);
    BlockRange const range = mask.key_blocks(tile.block * Config::kTileM, Config::kTileM, Config::kTileN);
    int n_blocks_left = range.end - range.begin;
    CUTLASS_PRAGMA_NO_UNROLL
    while (n_blocks_left-- > 0) {
      smem.pipeline_v_rows.wait(rows_state);
      smem.pipeline_v.empty[vt_state.stage].wait(vt_state.phase ^ 1);
      compiler_fence();
      uint32_t const rows = lane_rows + rows_state.stage * sizeof(smem.v_rows[0]);
      uint32_t vt[kKeySteps];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kKeySteps; ++i) {
        vt[i] = lane_vt + vt_state.stage * sizeof(smem.v[0]) ^ i * kTransposedKeys;
        // Otherwise the compiler adds the channel before the exclusive or, each time.
        asm volatile("" : "+r"(vt[i]));
      }
      uint32_t r[kTransposesInFlight][4];
      auto const load = [&](auto step) CUTLASS_LAMBDA_FUNC_INLINE {
        constexpr int kChannel = channel_of(step);
        load_transposed<v_tile_offset<kSlab>(key_of(step), kChannel, Config::kTileN)>(rows ^ kChannel % kSlab,
                                                                                      r[step % kTransposesInFlight]);
      };
      // kTransposesInFlight loads are in flight together: with one alone the warp would wait for each.
      cute::for_each(cute::make_int_sequence<kTransposesInFlight>{}, load);
      cute::for_each(cute::make_int_sequence<kSteps>{}, [&](auto step) CUTLASS_LAMBDA_FUNC_INLINE {
        auto const& loaded = r[step % kTransposesInFlight];
        uint32_t const transposed[4] = {
            __byte_perm(loaded[0], loaded[1], first), __byte_perm(loaded[0], loaded[1], second),
            __byte_perm(loaded[2], loaded[3], first), __byte_perm(loaded[2], loaded[3], second)};
        if constexpr (step + kTransposesInFlight < kSteps) {
          load(cute::Int<step + kTransposesInFlight>{});
        }
        store_matrices<channel_of(step) * Config::kTileN>(vt[step % kKeySteps], transposed);
      });
      cutlass::arch::fence_view_async_shared();  // V is written, then read by WGMMA
      __syncwarp();
      smem.pipeline_v_rows.release(rows_state);
      if (lane_idx == 0) {
        smem.pipeline_v.full[vt_state.stage].arrive();
      }
      if constexpr (!kInStep) {
        rows_state.advance();
      }
      vt_state.advance();
    }
  }
}

}  // namespace fa3::fwd
