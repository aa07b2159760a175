// A consumer warpgroup of the 16-bit kernels, whose products overlap (FlashAttention-3, algorithm 2): P V of a block is
// issued with Q K^T of the next.
//
// per step: wait k.full, wait its turn, issue S = Q K^T (this block), wait v.full, issue O += P V (previous block),
//           pass the turn, wait S, release k, mask, softmax, wait O, release v, P, rescale O
//
// The pipeline does not drain between tiles: the last P V of a tile is issued together with the first Q K^T of the
// next, and O is written while the other warpgroups compute. Where O takes the place of Q in shared memory it has to
// drain.
#pragma once

#include "fwd/consumer.cuh"

namespace fa3::fwd {

template <class Config>
class OverlappedSchedule {
 public:
  CUTLASS_DEVICE OverlappedSchedule(typename Config::Params const& params, typename Config::SharedStorage& smem,
                                    int warpgroup_idx)
      : c(params, smem, warpgroup_idx), smem(smem) {}

  CUTLASS_DEVICE void run() {
    Tile next;
    c.scheduler.next(next);  // there is one: the grid has no more CTAs than tiles
    Config::Turns::start(c.warpgroup_idx);
    c.begin_tile(next);
    if constexpr (Config::kOutAliasesQ) {
      bool has_next = true;
      while (has_next) {
        skip_k(c.skipped_after);
        prologue();
        middle_blocks();
        last_block();
        skip_k(c.skipped_before);
        skip_v(c.skipped_before);
        c.store_tile(c.tile);
        cute::tma_store_wait<0>();  // O has left the place of Q
        c.release_q();
        has_next = c.scheduler.next(next);
        c.begin_tile(next);
      }
    } else {
      skip_k(c.skipped_after);
      prologue();
      bool has_next = c.scheduler.next(next);
      while (true) {
        middle_blocks();
        if (!has_next) {
          break;
        }
        // The last block of one tile and the first of the next.
        Tile const done = c.tile;
        bool const accumulate = c.range.end - c.range.begin > 1;
        int const skipped_before = c.skipped_before;
        c.begin_tile(next);
        skip_k(skipped_before + c.skipped_after);
        c.wait_q();
        smem.pipeline_k.wait(k_state);
        c.wait_turn();
        c.issue_qk(k_state.stage);
        smem.pipeline_v.wait(v_state);
        c.issue_pv(v_state.stage, accumulate);
        c.pass_turn();
        has_next = c.scheduler.next(next);  // while the tensor cores work
        cute::warpgroup_wait<0>();
        release_k(c.range.end - 1);
        release_v();
        c.store_tile(done);
        skip_v(skipped_before + c.skipped_after);
        first_softmax();
      }
      last_block();
      skip_k(c.skipped_before);
      skip_v(c.skipped_before);
      c.store_tile(c.tile);
    }
    cute::tma_store_wait<0>();  // shared memory outlives the reads of the last store
  }

 private:
  // Key blocks of the CTA that this warpgroup does not visit: it passes its turns and releases K unread; and V, which
  // arrives later, after the next product.
  CUTLASS_DEVICE void skip_k(int count) {
    CUTLASS_PRAGMA_NO_UNROLL
    for (; count > 0; --count) {
      c.wait_turn();
      c.pass_turn();
      smem.pipeline_k.wait(k_state);
      __syncwarp();  // no lane still polls the barrier when the stage is released
      smem.pipeline_k.release(k_state);
      k_state.advance();
    }
  }
  CUTLASS_DEVICE void skip_v(int count) {
    CUTLASS_PRAGMA_NO_UNROLL
    for (; count > 0; --count) {
      smem.pipeline_v.wait(v_state);
      __syncwarp();
      release_v();
    }
  }

  // K once S is complete; Q together with the tile's last K, so that the next Q loads during the last softmax.
  CUTLASS_DEVICE void release_k(int n_block) {
    smem.pipeline_k.release(k_state);
    k_state.advance();
    if (n_block == c.range.begin && !Config::kOutAliasesQ) {
      c.release_q();
    }
  }
  CUTLASS_DEVICE void release_v() {
    smem.pipeline_v.release(v_state);
    v_state.advance();
  }

  // S and P of the first block visited, the last of the tile's range; there is no P V yet.
  CUTLASS_DEVICE void prologue() {
    c.wait_q();
    smem.pipeline_k.wait(k_state);
    c.wait_turn();
    c.issue_qk(k_state.stage);
    c.pass_turn();
    cute::warpgroup_wait<0>();
    release_k(c.range.end - 1);
    skip_v(c.skipped_after);
    first_softmax();
  }

  CUTLASS_DEVICE void first_softmax() {
    c.begin_softmax();
    c.update_max(c.range.end - 1);
    c.exponentiate();
    c.write_p();
  }

  // The blocks after it, down to the first of the range: S of n_block in flight together with P V of n_block + 1.
  CUTLASS_DEVICE void middle_blocks() {
    for (int n_block = c.range.end - 2; n_block >= c.range.begin; --n_block) {
      smem.pipeline_k.wait(k_state);
      c.wait_turn();
      c.issue_qk(k_state.stage);
      smem.pipeline_v.wait(v_state);
      c.issue_pv(v_state.stage, n_block < c.range.end - 2);
      c.pass_turn();
      cute::warpgroup_wait<1>();
      release_k(n_block);
      c.update_max(n_block);
      c.exponentiate();
      __syncwarp();  // keeps ptxas from waiting for P V before, and releasing V after, most of the exponentials
      cute::warpgroup_wait<0>();
      release_v();
      c.write_p();
      c.rescale_o();
    }
  }

  CUTLASS_DEVICE void last_block() {
    c.wait_turn();
    smem.pipeline_v.wait(v_state);
    c.issue_pv(v_state.stage, c.range.end - c.range.begin > 1);
    c.pass_turn();
    cute::warpgroup_wait<0>();
    release_v();
  }

  Consumer<Config> c;
  typename Config::SharedStorage& smem;
  PipelineState<Config::kStagesKV> k_state;
  PipelineState<Config::kStagesKV> v_state;
};

}  // namespace fa3::fwd
