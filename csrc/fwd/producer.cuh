// The producer warp: streams Q, K and V tiles into shared memory.
//
// pipeline     filled by        full arrivals     freed by                  empty arrivals
// q[w]         producer warp    1 + bytes (TMA)   consumer warpgroup w      one per warp of w
// k, v         producer warp    1 + bytes (TMA)   all consumer warpgroups   one per consumer warp
// v_rows       producer warp    1 + bytes (TMA)   converter warps           one per converter warp
//                                                 (FP8, where they fill v: fwd/converter.cuh)
//
// Loads are issued in the order in which their stages become free. Overlapped schedule: P V of a block runs with Q K^T
// of the next, across tiles too, so V is loaded one block behind K:
//
//   tile 0:  K2  Q  K1 V2  K0 V1     tile 1:  K2 V0 Q  K1 V2 ...
//
// Serial schedule, where P V comes before the next Q K^T:  K2 Q V2  K1 V1  K0 V0.
#pragma once

#include "common/mask.h"
#include "fwd/config.h"

namespace fa3::fwd {

template <class Config>
CUTLASS_DEVICE void produce(typename Config::Params const& params, typename Config::SharedStorage& smem) {
  using CacheHint = cute::TMA::CacheHintSm90;
  cute::prefetch_tma_descriptor(&params.q);
  cute::prefetch_tma_descriptor(&params.k);
  cute::prefetch_tma_descriptor(&params.v);

  PipelineState<Config::kStagesQ> q_state;
  PipelineState<Config::kStagesKV> k_state;
  PipelineState<Config::kConvertsV ? Config::kStagesVRows : Config::kStagesKV> v_state;

  struct KeyBlock {
    int first_key;
    int kv_head_idx;
    TmaRows rows;
  };
  auto const load_k = [&](KeyBlock const& block) {
    uint64_t* barrier = smem.pipeline_k.acquire(k_state, Config::kBytesK);
    load_tile<Config::kTileN, Config::kHeadDim, Config::kSlabColumns>(params.k, barrier, CacheHint::EVICT_LAST,
                                                                      smem.k[k_state.stage], block.rows,
                                                                      block.first_key, block.kv_head_idx);
    k_state.advance();
  };
  auto const load_v_into = [&](auto& pipeline, auto& stages, KeyBlock const& block) {
    uint64_t* barrier = pipeline.acquire(v_state, Config::kBytesV);
    if constexpr (Config::kVLayout == VLayout::kTransposed) {
      // Keys are the columns of its map, channels the rows: one box holds all channels of a block of keys.
      load_box(params.v, barrier, CacheHint::EVICT_LAST, stages[v_state.stage], block.first_key, block.rows, 0,
               block.kv_head_idx);
    } else {
      load_tile<Config::kTileN, Config::kHeadDimV, Config::kSlabColumnsV>(params.v, barrier, CacheHint::EVICT_LAST,
                                                                          stages[v_state.stage], block.rows,
                                                                          block.first_key, block.kv_head_idx);
    }
    v_state.advance();
  };
  auto const load_v = [&](KeyBlock const& block) {
    if constexpr (Config::kConvertsV) {
      load_v_into(smem.pipeline_v_rows, smem.v_rows, block);
    } else {
      load_v_into(smem.pipeline_v, smem.v, block);
    }
  };
  auto const load_q = [&](Tile const& tile, TmaRows const& rows) {
    CUTLASS_PRAGMA_UNROLL
    for (int w = 0; w < Config::kConsumerWarpgroups; ++w) {
      uint64_t* barrier = smem.pipeline_q[w].acquire(q_state, Config::kBytesQ);
      load_tile<kRowsPerWarpgroup, Config::kHeadDim, Config::kSlabColumns>(
          params.q, barrier, CacheHint::EVICT_FIRST, smem.q[w][q_state.stage], rows,
          tile.block * Config::kTileM + w * kRowsPerWarpgroup, tile.head_idx);
    }
    q_state.advance();
  };

  constexpr bool kVLagsK = Config::kSchedule == Schedule::kOverlapped;
  StaticScheduler scheduler(params.scheduler, blockIdx.x);
  Tile tile;
  bool has_previous = false;
  KeyBlock previous;
  while (scheduler.next(tile)) {
    SeqlenInfo const seqlen(params.seqlen, tile.batch_idx);
    auto const mask = Config::mask(params, seqlen);
    BlockRange const range = mask.key_blocks(tile.block * Config::kTileM, Config::kTileM, Config::kTileN);
    CUTLASS_PRAGMA_NO_UNROLL  // unrolled, it would not fit the producer's registers
        for (int n_block = range.end - 1; n_block >= range.begin; --n_block) {
      KeyBlock const block{n_block * Config::kTileN, tile.head_idx / params.group_size, seqlen.rows_k()};
      load_k(block);
      if (kVLagsK && has_previous) {
        load_v(previous);
      }
      if (n_block == range.end - 1) {
        load_q(tile, seqlen.rows_q());
      }
      if (!kVLagsK) {
        load_v(block);
      }
      previous = block;
      has_previous = true;
    }
  }
  if (kVLagsK) {
    load_v(previous);
  }
}

}  // namespace fa3::fwd
