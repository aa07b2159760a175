// A dq_writer warp: adds one consumer warpgroup's dQ tiles from shared memory to the fp32 accumulator in global memory
// with TMA reduce-add, so that the consumers never wait for global memory.
//
// dq_staged[w]   filled by consumer warpgroup w (one arrival per warp), emptied by dq_writer warp w
//
// Deterministic: the tiles of one m_block are added in the order of their n_blocks. The scheduler gives a head's
// n_blocks out in ascending order, so a CTA waits only for tiles that other CTAs have begun before.
#pragma once

#include <cuda/atomic>

#include "bwd/steps.cuh"

namespace fa3 {

template <class Config>
CUTLASS_DEVICE void write_dq(BwdKernelParams const& params, typename Config::SharedStorage& smem, int warpgroup_idx) {
  auto& staged = smem.dq_staged[warpgroup_idx];
  uint32_t phase = 0;
  TileScheduler scheduler(params.scheduler, blockIdx.x);
  Tile tile;
  while (scheduler.next(tile)) {
    int const n_block = tile_n_block(params, tile);
    Steps steps(params, n_block, tile.head_idx, Config::kTileM, Config::kTileN);
    CUTLASS_PRAGMA_NO_UNROLL
    while (!steps.done()) {
      int64_t const part = int64_t(steps.q_tile(tile.batch_idx)) * Config::kConsumerWarpgroups + warpgroup_idx;
      staged.full.wait(phase);
      if (params.dq_turn == nullptr) {
        reduce_add(params.dq_accum + part * Config::kDqPart, smem.dq[warpgroup_idx], Config::kDqPart * sizeof(float));
        cute::tma_store_arrive();
        cute::tma_store_wait<0>();  // has been read
        staged.empty.arrive();
      } else {
        cuda::atomic_ref<int, cuda::thread_scope_device> turn(params.dq_turn[part]);
        while (turn.load(cuda::memory_order_acquire) != n_block) {
        }
        fence_async_global();  // what was added before is seen by this thread: also by its bulk reduction
        reduce_add(params.dq_accum + part * Config::kDqPart, smem.dq[warpgroup_idx], Config::kDqPart * sizeof(float));
        cute::tma_store_arrive();
        cute::tma_store_wait<0>();
        staged.empty.arrive();
        wait_bulk_writes();  // has been added, not only read
        fence_async_global();
        turn.store(n_block + 1, cuda::memory_order_release);
      }
      phase ^= 1;
      steps.advance();
    }
  }
}

}  // namespace fa3
