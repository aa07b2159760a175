// The dq_writer warps: add the consumers' dQ tiles from shared memory to the fp32 accumulator in global memory with TMA
// reduce-add, so that the consumers never wait for global memory.
//
// pipeline_dq[w]   filled by consumer warpgroup w (one arrival per warp, at the step's barrier), drained by a writer
//
// A writer waits for its reduction and, in deterministic mode, for the semaphore and for its release, which takes
// longer than a step: three writers take the steps in rotation. Each adds a warpgroup's part of a step's tile; in
// deterministic mode, if both parts arrive together (consumer.cuh), the whole tile, so that the semaphore is acquired
// once.
//
// Deterministic: the tiles of one m_block are added in the order in which the scheduler starts their n_blocks, so that
// a CTA waits only for what other CTAs have begun before; all CTAs of the launch are resident at once. The semaphore of
// an m_block counts the n_blocks that have added. An n_block waits for its rank among those that the m_block sees:
// ascending with the full mask; descending with a causal one or a window, because the last n_block gets to the m_block
// first:
//
//   m_block       0 1 2 3 4 5
//   n_block 2             0 1     step at which the n_block adds its tile; of a column, the lowest first
//   n_block 1         0 1 2 3
//   n_block 0     0 1 2 3 4 5
#pragma once

#include <cuda/atomic>

#include "bwd/steps.cuh"

namespace fa3::bwd {

// How many n_blocks have added to a part of dQ. In global memory.
class Semaphore {
 public:
  CUTLASS_DEVICE explicit Semaphore(int* count) : count_(count) {}

  CUTLASS_DEVICE void wait_eq(int rank) const {
    while (cuda::atomic_ref<int, cuda::thread_scope_device>(*count_).load(cuda::memory_order_acquire) != rank) {
    }
  }
  CUTLASS_DEVICE void release(int rank) const {
    cuda::atomic_ref<int, cuda::thread_scope_device>(*count_).store(rank + 1, cuda::memory_order_release);
  }

 private:
  int* count_;
};

// The place of a tile's n_block in the order of those that add to an m_block.
template <class Config>
CUTLASS_DEVICE int rank_of_key_block(KernelParams const& params, Tile const& tile, int m_block) {
  SeqlenInfo const seqlen = queries_with_keys(params.seqlen, params.mask, tile.batch_idx);
  BlockRange const range =
      Mask(params.mask, seqlen).key_blocks(m_block * Config::kTileM, Config::kTileM, Config::kTileN);
  return params.scheduler.order == TileOrder::kDescending ? range.end - 1 - tile.block : tile.block - range.begin;
}

template <class Config>
CUTLASS_DEVICE void write_dq(KernelParams const& params, typename Config::SharedStorage& smem, int writer_idx) {
  bool const deterministic = params.dq_semaphore != nullptr;
  bool const whole_tiles = deterministic && !Config::kSplitRoles;
  uint32_t phases = 0;  // of this writer's barrier of each warpgroup, a bit each
  int step_writer = 0;  // (steps before this one) % kDqWriters

  StaticScheduler scheduler(params.scheduler, blockIdx.x);
  Tile tile;
  while (scheduler.next(tile)) {
    QueryTileIterator<Config> steps(params, tile);
    CUTLASS_PRAGMA_NO_UNROLL
    while (!steps.done()) {
      // The warpgroups whose parts are this writer's. Part w of a step has number 2 * step + w.
      int first = 0, end = whole_tiles && step_writer == writer_idx ? Config::kConsumerWarpgroups : 0;
      if (!whole_tiles) {
        first = (writer_idx - 2 * step_writer + 2 * Config::kDqWriters) % Config::kDqWriters;
        end = first < Config::kConsumerWarpgroups ? first + 1 : first;
      }
      if (first < end) {
        int const part = steps.q_tile(tile.batch_idx) * Config::kConsumerWarpgroups;  // of warpgroup 0; below 2^31
        Semaphore const semaphore(params.dq_semaphore + part + first);
        int const rank = deterministic ? rank_of_key_block<Config>(params, tile, steps.m_block) : 0;
        if (deterministic) {
          semaphore.wait_eq(rank);
          fence_async_global();  // what was added before precedes the reductions of this thread
        }
        CUTLASS_PRAGMA_NO_UNROLL
        for (int w = first; w < end; ++w) {
          CUTLASS_PRAGMA_NO_UNROLL
          for (int slice = 0; slice < Config::kDqSlices; ++slice) {
            smem.pipeline_dq[w].full[step_writer].wait(phases >> w & 1);
            reduce_add(params.dq_accum + (int64_t(part + w) * Config::kDqSlices + slice) * Config::kDqPart, smem.dq[w],
                       Config::kDqPart * sizeof(float));
            cute::tma_store_arrive();
            cute::tma_store_wait<0>();  // it has been read, not necessarily added
            smem.pipeline_dq[w].empty.arrive();
            phases ^= 1u << w;
          }
        }
        if (deterministic) {
          wait_bulk_writes();  // it has been added, not only read
          fence_async_global();
          semaphore.release(rank);
        }
      }
      step_writer = step_writer + 1 == Config::kDqWriters ? 0 : step_writer + 1;
      steps.advance();
    }
  }
}

}  // namespace fa3::bwd
