// The producer warp: streams Q, K and V tiles into shared memory.
//
// pipeline     filled by        full arrivals     freed by                  empty arrivals
// q[w]         producer warp    1 + bytes (TMA)   consumer warpgroup w      one per warp of w
// k, v         producer warp    1 + bytes (TMA)   all consumer warpgroups   one per consumer warp
//                                                 FP8: V by the transposers   one per transposer warp, if there are any
//                                                 (fwd/transpose_v.cuh)
//
// Loads go out in the order in which their stages come free. The consumers overlap a tile's last P V with the next
// tile's first Q K^T, so V runs one block behind K, across tiles too:
//
//   tile 0:  K2  Q  K1 V2  K0 V1     tile 1:  K2 V0 Q  K1 V2 ...
//
// FP8 kernels whose P V comes before the next Q K^T, and not with it (Config::kVBehindK), take K2 Q V2  K1 V1  K0 V0.
#pragma once

#include "common/block_range.h"
#include "fwd/config.h"

namespace fa3 {

template <class Config>
CUTLASS_DEVICE void produce(typename Config::Params const& params, typename Config::SharedStorage& smem) {
  using CacheHint = cute::TMA::CacheHintSm90;
  cute::prefetch_tma_descriptor(&params.q);
  cute::prefetch_tma_descriptor(&params.k);
  cute::prefetch_tma_descriptor(&params.v);

  PipelineState<Config::kStagesQ> q_state;
  PipelineState<Config::kStagesK> k_state;
  PipelineState<Config::kStagesV> v_state;

  struct Block {
    int row;
    int kv_head_idx;
    int batch_idx;
  };
  auto const load_k = [&](Block const& block) {
    uint64_t* barrier = smem.pipeline_k.acquire(k_state, Config::kBytesKV);
    load_tile<Config::kTileN, Config::kHeadDim, Config::kSlabColumns>(
        params.k, barrier, CacheHint::EVICT_LAST, smem.k[k_state.stage], block.row, block.kv_head_idx, block.batch_idx);
    k_state.advance();
  };
  auto const load_v = [&](Block const& block) {
    uint64_t* barrier = smem.pipeline_v.acquire(v_state, Config::kBytesKV);
    if constexpr (Config::kVTransposed) {
      load_keys<Config::kTileN>(params.v, barrier, CacheHint::EVICT_LAST, smem.v[v_state.stage], block.row,
                                block.kv_head_idx, block.batch_idx);
    } else {
      load_tile<Config::kTileN, Config::kHeadDim, Config::kSlabColumns>(params.v, barrier, CacheHint::EVICT_LAST,
                                                                        smem.v[v_state.stage], block.row,
                                                                        block.kv_head_idx, block.batch_idx);
    }
    v_state.advance();
  };
  auto const load_q = [&](Tile const& tile) {
    CUTLASS_PRAGMA_UNROLL
    for (int w = 0; w < Config::kConsumerWarpgroups; ++w) {
      uint64_t* barrier = smem.pipeline_q[w].acquire(q_state, Config::kBytesQ);
      load_tile<kRowsPerWarpgroup, Config::kHeadDim, Config::kSlabColumns>(
          params.q, barrier, CacheHint::EVICT_FIRST, smem.q[w][q_state.stage],
          tile.block * Config::kTileM + w * kRowsPerWarpgroup, tile.head_idx, tile.batch_idx);
    }
    q_state.advance();
  };

  TileScheduler scheduler(params.scheduler, blockIdx.x);
  Tile tile;
  bool has_previous = false;
  Block previous;
  while (scheduler.next(tile)) {
    int const end = block_range(tile.block * Config::kTileM, Config::kTileM, Config::kTileN, params.seqlen_q,
                                params.seqlen_k, params.causal)
                        .end;
    for (int n_block = end - 1; n_block >= 0; --n_block) {
      Block const block{n_block * Config::kTileN, tile.head_idx / params.group_size, tile.batch_idx};
      load_k(block);
      if (Config::kVBehindK && has_previous) {
        load_v(previous);
      }
      if (n_block == end - 1) {
        load_q(tile);
      }
      if (!Config::kVBehindK) {
        load_v(block);
      }
      previous = block;
      has_previous = true;
    }
  }
  if (Config::kVBehindK) {
    load_v(previous);
  }
}

}  // namespace fa3
