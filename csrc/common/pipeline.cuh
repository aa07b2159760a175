// A ring of shared-memory stages between a TMA producer and its consumers: one full and one empty mbarrier per stage.
//
//   full[stage]    arrivals: 1 (the producer, with the byte count of the TMA loads it issues)
//   empty[stage]   arrivals: one per consumer warp
//
// Producer and consumers walk the stages in the same order, each with a PipelineState of its own. The parity of its
// phase tells a barrier's current use from the previous one; neither side can be a whole turn of the ring ahead.
#pragma once

#include <cutlass/arch/barrier.h>

namespace fa3 {

template <int kNumStages>
struct PipelineState {
  int stage = 0;
  uint32_t phase = 0;

  CUTLASS_DEVICE PipelineState previous() const {
    return stage == 0 ? PipelineState{kNumStages - 1, phase ^ 1} : PipelineState{stage - 1, phase};
  }

  CUTLASS_DEVICE void advance() {
    if (++stage == kNumStages) {
      stage = 0;
      phase ^= 1;
    }
  }

  CUTLASS_DEVICE PipelineState next() const {
    PipelineState state = *this;
    state.advance();
    return state;
  }
};

template <int kNumStages>
struct Pipeline {
  using State = PipelineState<kNumStages>;

  cutlass::arch::ClusterTransactionBarrier full[kNumStages];
  cutlass::arch::ClusterBarrier empty[kNumStages];

  // One thread, before any use; the caller fences and synchronises the CTA afterwards.
  CUTLASS_DEVICE void init(int num_consumer_warps, int full_arrivals = 1) {
    for (int stage = 0; stage < kNumStages; ++stage) {
      full[stage].init(full_arrivals);
      empty[stage].init(num_consumer_warps);
    }
  }

  // Producer: waits until the stage is free, then announces `bytes`; returns the barrier that the TMA loads complete
  // on.
  CUTLASS_DEVICE uint64_t* acquire(State const& state, uint32_t bytes) {
    empty[state.stage].wait(state.phase ^ 1);  // passes at once on the first round
    full[state.stage].arrive_and_expect_tx(bytes);
    return reinterpret_cast<uint64_t*>(&full[state.stage]);
  }

  // Consumer: waits until the data of the stage have landed.
  CUTLASS_DEVICE void wait(State const& state) { full[state.stage].wait(state.phase); }

  // Consumer: polls without blocking, which takes about 80 cycles. Call it early, where other work hides them, and pass
  // the result to wait().
  CUTLASS_DEVICE bool test_wait(State const& state) const { return full[state.stage].test_wait(state.phase); }
  CUTLASS_DEVICE void wait(State const& state, bool has_landed) {
    if (!has_landed) {
      wait(state);
    }
  }

  // Consumer: releases the stage, once per warp, after waiting for the WGMMAs that read it. The warp must be converged,
  // so that no lane still polls the stage's barrier.
  CUTLASS_DEVICE void release(State const& state) {
    if (cutlass::canonical_lane_idx() == 0) {
      empty[state.stage].arrive();
    }
  }
};

// Keeps the compiler from moving accesses of shared memory over a barrier: CUTLASS's barriers are volatile, but do not
// say that they touch memory. It emits no instruction.
CUTLASS_DEVICE void compiler_fence() { asm volatile("" ::: "memory"); }

// A single buffer that a warpgroup fills and kNumReaders threads drain in rotation. There is a full barrier per reader,
// because a reader that skips phases cannot tell them apart by parity.
template <int kNumReaders>
struct SingleBufferPipeline {
  cutlass::arch::ClusterBarrier full[kNumReaders];
  cutlass::arch::ClusterBarrier empty;

  CUTLASS_DEVICE void init(int num_filling_warps) {
    for (auto& barrier : full) {
      barrier.init(num_filling_warps);
    }
    empty.init(1);
  }
};

}  // namespace fa3
