// A dq_writer warp: adds one consumer warpgroup's dQ tiles from shared memory to the fp32 accumulator in global memory
// with TMA reduce-add, so that the consumers never wait for global memory.
//
// dq_staged[w]   filled by consumer warpgroup w (one arrival per warp), emptied by dq_writer warp w
//
// Deterministic: the tiles of one m_block are added in turn, in the order in which the scheduler gives their n_blocks
// out, so that a CTA waits only for what other CTAs have begun before; all CTAs of the launch are on the GPU at once.
// Full mask: ascending. Causal: descending, because the last n_block that sees an m_block gets to it first:
//
//   m_block       0 1 2 3 4 5
//   n_block 2             0 1     step at which the n_block adds its tile; of a column, the lowest first
//   n_block 1         0 1 2 3
//   n_block 0     0 1 2 3 4 5
#pragma once

#include <cuda/atomic>

#include "bwd/steps.cuh"

namespace fa3 {

CUTLASS_DEVICE void wait_turn(int* current, int turn) {
  cuda::atomic_ref<int, cuda::thread_scope_device> const current_turn(*current);
  while (current_turn.load(cuda::memory_order_acquire) != turn) {
  }
  fence_async_global();  // what was added before precedes the reductions of this thread
}

CUTLASS_DEVICE void pass_turn(int* current, int next_turn) {
  wait_bulk_writes();
  fence_async_global();
  cuda::atomic_ref<int, cuda::thread_scope_device>(*current).store(next_turn, cuda::memory_order_release);
}

template <class Config>
CUTLASS_DEVICE void write_dq(BwdKernelParams const& params, typename Config::SharedStorage& smem, int warpgroup_idx) {
  auto& staged = smem.dq_staged[warpgroup_idx];
  uint32_t phase = 0;
  auto const add_slice = [&](int64_t part) CUTLASS_LAMBDA_FUNC_INLINE {
    staged.full.wait(phase);
    reduce_add(params.dq_accum + part * Config::kDqPart, smem.dq[warpgroup_idx], Config::kDqPart * sizeof(float));
    cute::tma_store_arrive();
    cute::tma_store_wait<0>();  // it has been read, not necessarily added
    staged.empty.arrive();
    phase ^= 1;
  };

  TileScheduler scheduler(params.scheduler, blockIdx.x);
  Tile tile;
  while (scheduler.next(tile)) {
    Steps steps(params, tile.block, tile.head_idx, Config::kTileM, Config::kTileN);
    CUTLASS_PRAGMA_NO_UNROLL
    while (!steps.done()) {
      int64_t const column = int64_t(steps.q_tile(tile.batch_idx)) * Config::kConsumerWarpgroups + warpgroup_idx;
      int const turn = params.causal ? last_key_block(steps.m_block * Config::kTileM, Config::kTileM, Config::kTileN,
                                                      params.seqlen_q, params.seqlen_k) -
                                           tile.block
                                     : tile.block;
      if (params.dq_turn != nullptr) {
        wait_turn(params.dq_turn + column, turn);
      }
      CUTLASS_PRAGMA_NO_UNROLL
      for (int slice = 0; slice < Config::kDqSlices; ++slice) {
        add_slice(column * Config::kDqSlices + slice);
      }
      if (params.dq_turn != nullptr) {
        pass_turn(params.dq_turn + column, turn + 1);
      }
      steps.advance();
    }
  }
}

}  // namespace fa3
