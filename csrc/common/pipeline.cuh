// A circular shared-memory buffer between a TMA producer and its consumers: one full and one empty mbarrier per stage.
//
//   full[stage]    arrivals: 1 (the producer, with the byte count of the TMA loads it issues)
//   empty[stage]   arrivals: one per consumer warp
//
// Producer and consumers walk the stages in the same order, each with a PipelineState of its own. The parity of a phase
// tells a barrier's current use from the one before; neither side can be a whole round ahead of the other.
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

  // Consumer: whether they have. The answer takes some 80 cycles, which other work hides where it is asked for early.
  CUTLASS_DEVICE bool landed(State const& state) const { return full[state.stage].test_wait(state.phase); }
  CUTLASS_DEVICE void wait(State const& state, bool landed) {
    if (!landed) {
      wait(state);
    }
  }

  // Consumer: hands the stage back, once per warp, after the WGMMAs that read it have been waited for. The warp must be
  // converged, so that no lane still polls the stage's barrier.
  CUTLASS_DEVICE void release(State const& state) {
    if (cutlass::canonical_lane_idx() == 0) {
      empty[state.stage].arrive();
    }
  }
};

// Keeps the compiler from moving accesses of shared memory over a barrier: CUTLASS's are volatile, but do not say that
// they touch memory. No instruction.
CUTLASS_DEVICE void compiler_fence() { asm volatile("" ::: "memory"); }

// One buffer that consumer warps fill and kNumReaders threads empty in turn. Each reader has a full barrier of its own:
// one that waits for every third phase of a barrier could not tell phases apart.
template <int kNumReaders>
struct HandOver {
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
