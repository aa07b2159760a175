// A consumer warpgroup of the FP8 kernels at head_dim 64, whose products overlap: P V of a block is issued with Q K^T
// of the next.
//
// per step: wait k.full, wait its turn, issue S = Q K^T (this block), wait v.full, issue P V (previous block), pass the
//           turn, wait S, release k, mask, maximum, wait P V, release v, add it to O, P
//
// P V of every block starts anew and is added to O in fp32, as schedule_serial.cuh says. Merged with the 16-bit loop of
// schedule_overlapped.cuh, which does not drain between tiles, this one spilled: it has no register for a ring state of
// V's own.
#pragma once

#include "fwd/consumer.cuh"

namespace fa3::fwd {

template <class Config>
class Fp8OverlappedSchedule {
 public:
  CUTLASS_DEVICE Fp8OverlappedSchedule(typename Config::Params const& params, typename Config::SharedStorage& smem,
                                       int warpgroup_idx)
      : c(params, smem, warpgroup_idx), smem(smem) {}

  CUTLASS_DEVICE void run() {
    Config::Turns::start(c.warpgroup_idx);
    Tile next;
    if (!c.scheduler.next(next)) {
      return;
    }
    do {
      begin_tile(next);
      cute::warpgroup_wait<0>();
      prologue();
      blocks();
      c.release_q();
      c.store_tile(c.tile);
    } while (c.scheduler.next(next));
    cute::tma_store_wait<0>();  // shared memory outlives the reads of the last store
  }

 private:
  static_assert(!Config::kAnyMask, "a warpgroup visits the first block of its CTA");

  // Issues the first S of a tile. If the CTA has a key block after it that this warpgroup does not visit, it passes
  // that turn and releases K unread; V, which arrives later, is released after the first S.
  CUTLASS_DEVICE void begin_tile(Tile const& tile) {
    c.begin_tile(tile);
    n_block = c.range.end - 1;
    c.begin_softmax();
    c.scale_log2 = c.scores.scale_log2(n_block);
    v_scale = c.scores.v_scale(n_block);
    if (c.skipped_after > 0) {
      c.wait_turn();
      c.pass_turn();
      smem.pipeline_k.wait(state);
      __syncwarp();  // no lane still polls the barrier when the stage is released
      smem.pipeline_k.release(state);
      state.advance();
    }
    c.wait_q();
    smem.pipeline_k.wait(state);
    c.wait_turn();
    c.issue_qk(state.stage);
    c.pass_turn();
  }

  // P of the first block visited, the last of the tile's range. Its S has arrived.
  CUTLASS_DEVICE void prologue() {
    smem.pipeline_k.release(state);
    if (c.skipped_after > 0) {
      smem.pipeline_v.wait(state.previous());
      __syncwarp();
      smem.pipeline_v.release(state.previous());
    }
    c.update_max(n_block);
    c.correction[0] = c.correction[1] = 1.f;  // O is empty
    c.exponentiate();
  }

  // From P of the first block to P V of the last one.
  CUTLASS_DEVICE void blocks() {
    for (--n_block; n_block >= 0; --n_block) {
      c.scale_log2 = c.scores.scale_log2(n_block);
      float const next_v_scale = c.scores.v_scale(n_block);
      State const next_state = state.next();
      smem.pipeline_k.wait(next_state);
      c.wait_turn();
      c.issue_qk(next_state.stage);
      smem.pipeline_v.wait(state);
      c.issue_pv(state.stage);
      c.pass_turn();
      c.rescale_o();  // to the maximum that the P in flight was made with
      cute::warpgroup_wait<1>();
      smem.pipeline_k.release(next_state);
      c.update_max(n_block);
      cute::warpgroup_wait<0>();
      smem.pipeline_v.release(state);
      c.add_pv(v_scale);
      c.exponentiate();
      v_scale = next_v_scale;
      state = next_state;
    }
    smem.pipeline_v.wait(state);
    c.wait_turn();
    c.issue_pv(state.stage);
    c.pass_turn();
    c.rescale_o();
    cute::warpgroup_wait<0>();
    smem.pipeline_v.release(state);
    state.advance();
    c.add_pv(v_scale);
  }

  using State = PipelineState<Config::kStagesKV>;

  Consumer<Config> c;
  typename Config::SharedStorage& smem;
  State state;  // of K and of V: the rings have as many stages, and a block has the same in both
  int n_block;
  float v_scale;  // of V of n_block
};

}  // namespace fa3::fwd
