// The dq_writer warps: add the consumers' dQ tiles from shared memory to the fp32 accumulator in global memory with TMA
// reduce-add, so that the consumers never wait for global memory.
//
// dq_staged[w]   filled by consumer warpgroup w (one arrival per warp, at the step's barrier), emptied by a writer
//
// A writer waits for its reduction, and in deterministic mode for its turn and for the release of the next, which takes
// longer than a step: three writers take turns. Each takes a warpgroup's part of a step's tile; in deterministic mode,
// where both parts come at the same time (narrow heads), the whole tile, so that a turn is waited for and passed once.
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

// Whose turn it is to add to a part of dQ: the number of n_blocks that have. In global memory.
class Turn {
 public:
  CUTLASS_DEVICE explicit Turn(int* current) : current_(current) {}

  CUTLASS_DEVICE bool has_come(int turn) const {
    return cuda::atomic_ref<int, cuda::thread_scope_device>(*current_).load(cuda::memory_order_acquire) == turn;
  }
  CUTLASS_DEVICE void pass(int turn) const {
    cuda::atomic_ref<int, cuda::thread_scope_device>(*current_).store(turn + 1, cuda::memory_order_release);
  }

 private:
  int* current_;
};

template <class Config>
CUTLASS_DEVICE void write_dq(BwdKernelParams const& params, typename Config::SharedStorage& smem, int writer_idx) {
  bool const deterministic = params.dq_turn != nullptr;
  bool const whole_tiles = deterministic && !Config::kWide;
  uint32_t phases = 0;  // of this writer's barrier of each warpgroup, a bit each
  int step_writer = 0;  // (steps before this one) % kDqWriters

  TileScheduler scheduler(params.scheduler, blockIdx.x);
  Tile tile;
  while (scheduler.next(tile)) {
    Steps steps(params, tile.block, tile.head_idx, Config::kTileM, Config::kTileN);
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
        int const turn = !params.causal ? tile.block
                                        : last_key_block(steps.m_block * Config::kTileM, Config::kTileM, Config::kTileN,
                                                         params.seqlen_q, params.seqlen_k) -
                                              tile.block;
        Turn const turn_of_part(params.dq_turn + part + first);
        if (deterministic) {
          while (!turn_of_part.has_come(turn)) {
          }
          fence_async_global();  // what was added before precedes the reductions of this thread
        }
        CUTLASS_PRAGMA_NO_UNROLL
        for (int w = first; w < end; ++w) {
          CUTLASS_PRAGMA_NO_UNROLL
          for (int slice = 0; slice < Config::kDqSlices; ++slice) {
            smem.dq_staged[w].full[step_writer].wait(phases >> w & 1);
            reduce_add(params.dq_accum + (int64_t(part + w) * Config::kDqSlices + slice) * Config::kDqPart, smem.dq[w],
                       Config::kDqPart * sizeof(float));
            cute::tma_store_arrive();
            cute::tma_store_wait<0>();  // it has been read, not necessarily added
            smem.dq_staged[w].empty.arrive();
            phases ^= 1u << w;
          }
        }
        if (deterministic) {
          wait_bulk_writes();  // it has been added, not only read
          fence_async_global();
          turn_of_part.pass(turn);
        }
      }
      step_writer = step_writer + 1 == Config::kDqWriters ? 0 : step_writer + 1;
      steps.advance();
    }
  }
}

}  // namespace fa3
