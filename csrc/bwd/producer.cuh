// The producer warp: brings K and V of a tile once, and streams Q and dO with their lse and D.
//
// pipeline     filled by        full arrivals     freed by                  empty arrivals
// k, v         producer warp    1 + bytes (TMA)   all consumer warpgroups   one per consumer warp
// q, dout      producer warp    1 + bytes (TMA)   all consumer warpgroups   one per consumer warp
//
// K and V have one stage, which is free when dK and dV of the previous tile have left it. Q and dO of a tile's first
// step are loaded before it: their rings run on across tiles.
#pragma once

#include "bwd/steps.cuh"

namespace fa3::bwd {

template <class Config>
CUTLASS_DEVICE void produce(KernelParams const& params, typename Config::SharedStorage& smem) {
  using CacheHint = cute::TMA::CacheHintSm90;
  cute::prefetch_tma_descriptor(&params.q);
  cute::prefetch_tma_descriptor(&params.k);
  cute::prefetch_tma_descriptor(&params.v);
  cute::prefetch_tma_descriptor(&params.dout);

  PipelineState<1> kv_state;
  PipelineState<Config::kStagesQ> q_state;
  PipelineState<Config::kStagesDout> dout_state;

  StaticScheduler scheduler(params.scheduler, blockIdx.x);
  Tile tile;
  while (scheduler.next(tile)) {
    QueryTileIterator<Config> steps(params, tile);
    SeqlenInfo const seqlen = queries_with_keys(params.seqlen, params.mask, tile.batch_idx);
    auto const load_step = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
      int const row = steps.m_block * Config::kTileM;
      int64_t const q_tile = steps.q_tile(tile.batch_idx);

      uint64_t* barrier = smem.pipeline_q.acquire(q_state, Config::kBytesQ + Config::kBytesVector);
      load_tile<Config::kTileM, Config::kHeadDim, Config::kSlabColumns>(
          params.q, barrier, CacheHint::EVICT_LAST, smem.q[q_state.stage], seqlen.rows_q(), row, steps.head_idx);
      cute::SM90_BULK_COPY_G2S::copy(params.lse_log2 + q_tile * Config::kTileM, barrier, smem.lse_log2[q_state.stage],
                                     Config::kBytesVector);
      q_state.advance();

      barrier = smem.pipeline_dout.acquire(dout_state, Config::kBytesDout + Config::kBytesVector);
      load_tile<Config::kTileM, Config::kHeadDimV, Config::kSlabColumnsV>(params.dout, barrier, CacheHint::EVICT_LAST,
                                                                          smem.dout[dout_state.stage], seqlen.rows_q(),
                                                                          row, steps.head_idx);
      cute::SM90_BULK_COPY_G2S::copy(params.dsum + q_tile * Config::kTileM, barrier, smem.dsum[dout_state.stage],
                                     Config::kBytesVector);
      dout_state.advance();
      steps.advance();
    };

    if (steps.done()) {
      // No query sees a key of the tile. The consumers get the buffers of K and V all the same, for dK and dV.
      smem.pipeline_k.acquire(kv_state, 0);
      smem.pipeline_v.acquire(kv_state, 0);
      kv_state.advance();
      continue;
    }
    load_step();
    int const key = tile.block * Config::kTileN;
    uint64_t* barrier = smem.pipeline_k.acquire(kv_state, Config::kBytesK);
    load_tile<Config::kTileN, Config::kHeadDim, Config::kSlabColumnsK>(params.k, barrier, CacheHint::EVICT_FIRST,
                                                                       smem.k, seqlen.rows_k(), key, tile.head_idx);
    barrier = smem.pipeline_v.acquire(kv_state, Config::kBytesV);
    load_tile<Config::kTileN, Config::kHeadDimV, Config::kSlabColumnsV>(params.v, barrier, CacheHint::EVICT_FIRST,
                                                                        smem.v, seqlen.rows_k(), key, tile.head_idx);
    kv_state.advance();
    CUTLASS_PRAGMA_NO_UNROLL
    while (!steps.done()) {  // unrolled, it would not fit the producer's registers
      load_step();
    }
  }
}

}  // namespace fa3::bwd
