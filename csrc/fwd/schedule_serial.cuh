// A consumer warpgroup whose products follow each other: P V of the previous block in slices, in the registers of S,
// then Q K^T. FP8 at head_dim 128 and 256, where the registers do not hold both results.
//
// per step: wait v.full, wait its turn, P V (previous block) slice by slice, each added to O, release v, wait k.full,
//           issue S = Q K^T (this block), pass the turn, wait S, release k, mask, softmax, P
//
// P V of every block starts anew and is added to O in fp32, as schedule_overlapped.cuh says. With two warpgroups the
// first S of the next tile is computed while O is written. (With three that was slower from 1k keys on.)
#pragma once

#include <cute/algorithm/tuple_algorithms.hpp>

#include "fwd/consumer.cuh"

namespace fa3::fwd {

template <class Config>
class SerialSchedule {
 public:
  CUTLASS_DEVICE SerialSchedule(typename Config::Params const& params, typename Config::SharedStorage& smem,
                                int warpgroup_idx)
      : c(params, smem, warpgroup_idx), smem(smem) {}

  CUTLASS_DEVICE void run() {
    Config::Turns::start(c.warpgroup_idx);
    Tile next;
    if (!c.scheduler.next(next)) {
      return;
    }
    if constexpr (kOverlapsTiles) {
      c.wait_turn();
      begin_tile(next);
      cute::warpgroup_wait<0>();
    }
    while (true) {
      if constexpr (kOverlapsTiles) {
        prologue();
        blocks();
        Tile const done = c.tile;
        if (!c.scheduler.next(next)) {
          c.pass_turn();
          c.store_tile(done);
          break;
        }
        begin_tile(next);  // in the turn of the last P V
        c.store_tile(done);
        cute::warpgroup_wait<0>();
      } else {
        begin_tile(next);
        cute::warpgroup_wait<0>();
        prologue();
        blocks();
        c.pass_turn();
        c.store_tile(c.tile);
        if (!c.scheduler.next(next)) {
          break;
        }
      }
    }
    cute::tma_store_wait<0>();  // shared memory outlives the reads of the last store
  }

 private:
  static constexpr bool kOverlapsTiles = Config::kConsumerWarpgroups == 2;
  static_assert(!Config::kLeftLimits, "a warpgroup visits the first block of its CTA");

  // Issues the first S of a tile. If the CTA has a key block after it that this warpgroup does not visit, it passes
  // that turn and releases K unread; V, which arrives later, is released after the first S.
  CUTLASS_DEVICE void begin_tile(Tile const& tile) {
    c.begin_tile(tile);
    n_block = c.range.end - 1;
    if (c.skipped_after > 0) {
      if constexpr (!kOverlapsTiles) {
        c.wait_turn();
      }
      c.pass_turn();
      smem.pipeline_k.wait(state);
      __syncwarp();  // no lane still polls the barrier when the stage is released
      smem.pipeline_k.release(state);
      state.advance();
      if constexpr (kOverlapsTiles) {
        c.wait_turn();
      }
    }
    c.wait_q();
    smem.pipeline_k.wait(state);
    if constexpr (!kOverlapsTiles) {
      c.wait_turn();
    }
    c.issue_qk(state.stage);
    c.pass_turn();
  }

  // P of the first block visited, the last of the tile's range. Its S has arrived.
  CUTLASS_DEVICE void prologue() {
    c.begin_softmax();
    c.scale_log2 = c.scores.scale_log2(n_block);
    v_scale = c.scores.v_scale(n_block);
    release_k();
    if (c.skipped_after > 0) {
      smem.pipeline_v.wait(state.previous());
      __syncwarp();
      smem.pipeline_v.release(state.previous());
    }
    c.template update_max</*kAsIntegers=*/true>(n_block);
    c.correction[0] = c.correction[1] = 1.f;  // O is empty
    c.exponentiate();
  }

  // From P of the first block to P V of the last one. Ends within a turn. K and V are tested early, where other work
  // hides the latency of the test.
  CUTLASS_DEVICE void blocks() {
    bool v_has_landed = false;
    // One loop, left in the middle: with the last P V after it, ptxas spills.
    while (true) {
      c.wait_turn();
      smem.pipeline_v.wait(state, v_has_landed);
      bool const k_has_landed = compute_pv();
      if (n_block == 0) {
        break;
      }
      --n_block;
      smem.pipeline_k.wait(state, k_has_landed);
      c.issue_qk(state.stage);
      c.pass_turn();
      c.scale_log2 = c.scores.scale_log2(n_block);
      v_scale = c.scores.v_scale(n_block);
      cute::warpgroup_wait<0>();
      release_k();
      v_has_landed = smem.pipeline_v.test_wait(state);
      c.template update_max</*kAsIntegers=*/true>(n_block);
      c.exponentiate();
    }
  }

  // O += P V, slice by slice; a slice is added when kPvBuffers - 1 more are in flight. Returns whether the next K is
  // known to have landed.
  CUTLASS_DEVICE bool compute_pv() {
    bool k_has_landed = false;
    constexpr int kSlices = Config::kPvSlices, kAhead = Config::kPvBuffers - 1;
    cute::for_each(cute::make_int_sequence<kSlices + kAhead>{}, [&](auto step) CUTLASS_LAMBDA_FUNC_INLINE {
      if constexpr (step < kSlices) {
        c.template issue_pv_slice<step>(state.stage);
      }
      if constexpr (step == kSlices - 1) {
        k_has_landed = smem.pipeline_k.test_wait(state.next());
      }
      if constexpr (step == 0) {
        c.rescale_o();
      }
      constexpr int slice = step - kAhead;
      if constexpr (slice >= 0) {
        cute::warpgroup_wait<cute::min(kAhead, kSlices - 1 - slice)>();
        if constexpr (slice == kSlices - 1) {
          smem.pipeline_v.release(state);
          state.advance();
        }
        c.template add_pv_slice<slice>(v_scale);
      }
    });
    return k_has_landed;
  }

  // K once S is complete; Q together with the tile's last K, so that the next Q loads during the last softmax.
  CUTLASS_DEVICE void release_k() {
    smem.pipeline_k.release(state);
    if (n_block == 0) {
      c.release_q();
    }
  }

  using State = PipelineState<Config::kStagesKV>;

  Consumer<Config> c;
  typename Config::SharedStorage& smem;
  State state;  // of K and of V: the rings have as many stages, and a block has the same in both
  int n_block;
  float v_scale;  // of V of n_block
};

}  // namespace fa3::fwd
