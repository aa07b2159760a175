// A consumer warpgroup whose products follow each other: P V of the previous block in slices, in the registers of S,
// then Q K^T. FP8 at head_dim 128 and 256, where the registers do not hold both results.
//
// per step: wait v.full, wait its turn, P V (previous block) slice by slice, each added to O, release v, wait k.full,
//           issue S = Q K^T (this block), pass the turn, wait S, release k, mask, maximum, P
//
// The tensor cores add FP8 products with about 14 bits and drop what lies below, so that a sum over many thousand keys
// would drift towards zero. P V of every block starts anew, and O += v_scale * (P V) is done in fp32 (two-level
// accumulation, as in DeepSeek-V3, arXiv 2412.19437, section 3.3.2). The scales of Q and K go into the exponent's
// scale.
//
// With two warpgroups the first S of the next tile is computed while O is written. (With three that was slower from 1k
// keys on.)
//
// At head_dim 256 no register is left. The same steps as methods of Consumer (consumer.cuh) spill 60 to 108 bytes, or
// ptxas gives up the pipeline (C7511, 0.7 times the speed): hence the closures, and a file of its own.
#pragma once

#include <cute/algorithm/tuple_algorithms.hpp>

#include "common/mask.cuh"
#include "common/scores.cuh"
#include "common/wgmma.cuh"
#include "fwd/config.h"
#include "fwd/epilogue.cuh"
#include "fwd/fp8_softmax.cuh"

// `softmax` is set by reset() before its first use, which the compiler does not see through the closures.
#pragma nv_diag_suppress 549

namespace fa3::fwd {

template <class Config>
CUTLASS_DEVICE void consume_serial(Fp8KernelParams const& params, typename Config::SharedStorage& smem,
                                   int warpgroup_idx) {
  using namespace cute;
  using Element = typename Config::Element;
  using Turns = typename Config::Turns;
  static_assert(!Config::kAnyMask, "a warpgroup visits the first block of its CTA");
  constexpr bool kOverlapsTiles = Config::kConsumerWarpgroups == 2;

  typename Config::MmaQK mma_qk;
  typename Config::template MmaPV<Config::kPvSliceColumns> mma_pv;
  typename Config::template MmaPV<Config::kPvSliceColumns + Config::kSumColumns> mma_last_pv;
  Tensor sQ = make_tensor(make_smem_ptr(smem.q[warpgroup_idx][0]), typename Config::LayoutQ{});
  Tensor sK = make_tensor(make_smem_ptr(smem.k[0]), typename Config::LayoutK{});    // (kTileN, kHeadDim, stages)
  Tensor sVt = make_tensor(make_smem_ptr(smem.v[0]), typename Config::LayoutVt{});  // (kVtRows, kTileN, stages)
  Tensor tSrQ = mma_qk.get_slice(0).partition_fragment_A(sQ);
  Tensor tSrK = mma_qk.get_slice(0).partition_fragment_B(sK);
  Tensor tSrS = partition_fragment_C(mma_qk, Shape<_64, typename Config::TileN>{});
  using FragmentPV = decltype(partition_fragment_C(mma_pv, Shape<_64, Int<Config::kPvSliceColumns>>{}));
  using FragmentLastPV =
      decltype(partition_fragment_C(mma_last_pv, Shape<_64, Int<Config::kPvSliceColumns + Config::kSumColumns>>{}));
  FragmentLastPV tOrPV[Config::kPvBuffers];
  Tensor tOrO = make_tensor<float>(Layout<Shape<Shape<_2, _2, Int<Config::kHeadDim / 8>>, _1, _1>>{});
  Tensor tOrP = make_tensor<Element>(Shape<Shape<_4, _2, _2>, _1, Int<Config::kTileN / 32>>{});

  auto& pipeline_q = smem.pipeline_q[warpgroup_idx];
  auto& pipeline_k = smem.pipeline_k;
  auto& pipeline_v = smem.pipeline_v;
  PipelineState<Config::kStagesQ> q_state;
  PipelineState<Config::kStagesKV> state;  // of K and of V: the rings have as many stages, and a block the same in both

  BlockScaledSoftmax softmax;
  float correction[kRowsPerThread];
  float v_scale;  // of V of n_block

  StaticScheduler scheduler(params.scheduler, blockIdx.x);
  Tile tile{};
  int unmasked_end = 0;  // key blocks before it are seen by all of this warpgroup's rows
  auto const first_row = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    return tile.block * Config::kTileM + warpgroup_idx * kRowsPerWarpgroup;
  };

  using State = decltype(state);
  auto const issue_qk = [&](State const& k_state) CUTLASS_LAMBDA_FUNC_INLINE {
    gemm(mma_qk, tSrQ(_, _, _, q_state.stage), tSrK(_, _, _, k_state.stage), tSrS, /*accumulate=*/false);
  };
  // P V of some columns, anew; the last slice with the sums of P's rows.
  auto const issue_pv = [&](auto slice, FragmentLastPV& tOrPV) CUTLASS_LAMBDA_FUNC_INLINE {
    auto const issue = [&](auto& mma, auto columns, auto&& tOrPV) CUTLASS_LAMBDA_FUNC_INLINE {
      Tensor sV = domain_offset(make_coord(slice * Int<Config::kPvSliceColumns>{}, _0{}, _0{}), sVt);
      Tensor tOrV = mma.get_slice(0).partition_fragment_B(local_tile(
          sV, make_shape(columns, typename Config::TileN{}, Int<Config::kStagesKV>{}), make_coord(_0{}, _0{}, _0{})));
      gemm(mma, tOrP, tOrV(_, _, _, state.stage), tOrPV, /*accumulate=*/false);
    };
    if constexpr (slice == Config::kPvSlices - 1) {
      issue(mma_last_pv, Int<Config::kPvSliceColumns + Config::kSumColumns>{}, tOrPV);
    } else {
      issue(mma_pv, Int<Config::kPvSliceColumns>{}, make_tensor(tOrPV.data(), FragmentPV{}.layout()));
    }
  };
  auto const add_pv = [&](auto slice, FragmentLastPV const& pv) CUTLASS_LAMBDA_FUNC_INLINE {
    constexpr int kCount = decltype(size(FragmentPV{}))::value;
    add_scaled<kCount>(tOrO, slice * kCount, pv, v_scale);
    if constexpr (slice == Config::kPvSlices - 1) {
      softmax.row_sum[0] += pv(kCount);  // four registers: two columns, both the sum, of each row
      softmax.row_sum[1] += pv(kCount + 2);
    }
  };
  auto const mask_and_update_max = [&](int n_block, float scale_log2) CUTLASS_LAMBDA_FUNC_INLINE {
    warpgroup_fence_operand(tSrS);  // otherwise NVVM compares before the wait
    if (n_block >= unmasked_end) {
      auto const mask = Config::mask(params, SeqlenInfo(params.seqlen, tile.batch_idx));
      int end[kRowsPerThread];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRowsPerThread; ++i) {
        end[i] = mask.end_of_keys(first_row() + accumulator_row(i)) - n_block * Config::kTileN;
      }
      mask_from(tSrS, end);
    }
    softmax.template update_max</*kAsIntegers=*/true>(tSrS, scale_log2, correction);
  };
  // Brings O and the row sums to the maximum that the P in flight was made with.
  auto const rescale_o = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    // Most blocks of a long sequence raise no row's maximum.
    if (__any_sync(0xffffffff, correction[0] != 1.f || correction[1] != 1.f)) {
      rescale(tOrO, correction);
    }
    softmax.rescale_sums(correction);
  };

  auto const pass_turn = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    int idx = warpgroup_idx;
    if constexpr (!Config::kNextTurnInRegister) {
      asm volatile("" : "+r"(idx));  // what follows from it is computed here
    }
    Turns::pass_turn(idx);
  };

  int n_block = 0;
  bool skips_block = false;  // the CTA's last key block, hidden from all of this warpgroup's rows
  // What the tile's rows see.
  auto const find_blocks = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    auto const mask = Config::mask(params, SeqlenInfo(params.seqlen, tile.batch_idx));
    BlockRange const cta = mask.key_blocks(tile.block * Config::kTileM, Config::kTileM, Config::kTileN);
    BlockRange const range = visited_blocks(cta, mask.key_blocks(first_row(), kRowsPerWarpgroup, Config::kTileN));
    unmasked_end = range.unmasked_end;
    n_block = range.end - 1;
    skips_block = range.end < cta.end;
  };
  // Skips the CTA's last key block: passes the turn and releases K unread. V, which arrives later, is released after
  // the first S.
  auto const skip_block = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    pass_turn();
    pipeline_k.wait(state);
    __syncwarp();  // no lane still polls the barrier when the stage is released
    pipeline_k.release(state);
    state.advance();
  };
  // kOverlapsTiles: issues the first S of a tile, in a turn that this warpgroup has already.
  auto const begin_tile = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    find_blocks();
    if (skips_block) {
      skip_block();
      Turns::wait_turn(warpgroup_idx);
    }
    pipeline_q.wait(q_state);
    pipeline_k.wait(state);
    issue_qk(state);
    pass_turn();
  };
  auto const release_q = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    pipeline_q.release(q_state);
    q_state.advance();
  };

  auto const store = [&](Tile const& tile) CUTLASS_LAMBDA_FUNC_INLINE {
    float inverse[kRowsPerThread], lse[kRowsPerThread];
    softmax.finish(inverse, lse);
    store_out<Config>(params, smem, warpgroup_idx, tile, inverse, lse, tOrO);
  };

  Turns::start(warpgroup_idx);
  if (!scheduler.next(tile)) {
    return;
  }
  if constexpr (kOverlapsTiles) {
    Turns::wait_turn(warpgroup_idx);
    begin_tile();
    warpgroup_wait<0>();
  }
  while (true) {
    if constexpr (!kOverlapsTiles) {
      find_blocks();
    }
    BlockScaledScores const scores(params.scores, params.fp8, tile.batch_idx, tile.head_idx,
                                   tile.head_idx / params.group_size, first_row(), params.seqlen.seqlen_q);
    softmax.reset();
    clear(tOrO);
    if constexpr (!kOverlapsTiles) {
      if (skips_block) {
        Turns::wait_turn(warpgroup_idx);
        skip_block();
      }
      pipeline_q.wait(q_state);
    }
    float scale_log2 = scores.scale_log2(n_block);
    v_scale = scores.v_scale(n_block);
    if constexpr (!kOverlapsTiles) {
      pipeline_k.wait(state);
      Turns::wait_turn(warpgroup_idx);
      issue_qk(state);
      pass_turn();
      warpgroup_wait<0>();
    }
    pipeline_k.release(state);
    if (kOverlapsTiles && n_block == 0) {
      release_q();
    }
    if (skips_block) {
      pipeline_v.wait(state.previous());
      __syncwarp();
      pipeline_v.release(state.previous());
    }
    mask_and_update_max(n_block, scale_log2);
    correction[0] = correction[1] = 1.f;  // O is empty
    softmax.exponentiate(tSrS, scale_log2, tOrP);

    bool v_has_landed = false;
    // One loop, left in the middle: with the last P V after it, ptxas spills.
    while (true) {
      Turns::wait_turn(warpgroup_idx);
      pipeline_v.wait(state, v_has_landed);
      bool k_has_landed = false;
      // A slice is added to O when kPvBuffers - 1 more are in flight.
      constexpr int kSlices = Config::kPvSlices, kAhead = Config::kPvBuffers - 1;
      for_each(make_int_sequence<kSlices + kAhead>{}, [&](auto step) CUTLASS_LAMBDA_FUNC_INLINE {
        if constexpr (step < kSlices) {
          issue_pv(step, tOrPV[step % Config::kPvBuffers]);
        }
        if constexpr (step == kSlices - 1) {
          k_has_landed = pipeline_k.test_wait(state.next());
        }
        if constexpr (step == 0) {
          rescale_o();
        }
        constexpr int slice = step - kAhead;
        if constexpr (slice >= 0) {
          warpgroup_wait<cute::min(kAhead, kSlices - 1 - slice)>();
          if constexpr (slice == kSlices - 1) {
            pipeline_v.release(state);
            state.advance();
          }
          add_pv(Int<slice>{}, tOrPV[slice % Config::kPvBuffers]);
        }
      });
      if (n_block == 0) {
        break;
      }
      --n_block;
      pipeline_k.wait(state, k_has_landed);
      issue_qk(state);
      pass_turn();
      scale_log2 = scores.scale_log2(n_block);
      v_scale = scores.v_scale(n_block);
      warpgroup_wait<0>();
      pipeline_k.release(state);
      if (kOverlapsTiles && n_block == 0) {
        release_q();
      }
      v_has_landed = pipeline_v.test_wait(state);
      mask_and_update_max(n_block, scale_log2);
      softmax.exponentiate(tSrS, scale_log2, tOrP);
    }
    if constexpr (!kOverlapsTiles) {
      pass_turn();
    }
    if constexpr (kOverlapsTiles) {
      Tile const done = tile;
      if (!scheduler.next(tile)) {
        pass_turn();
        store(done);
        break;
      }
      begin_tile();
      store(done);
      warpgroup_wait<0>();
    } else {
      release_q();
      store(tile);
      if (!scheduler.next(tile)) {
        break;
      }
    }
  }
  cute::tma_store_wait<0>();  // shared memory outlives the reads of the last store
}

}  // namespace fa3::fwd

#pragma nv_diag_default 549
