// A consumer warpgroup of the FP8 forward: 64 rows of O = softmax(Q K^T) V, tile after tile.
//
// The tensor cores add FP8 products with about 14 bits, and drop what lies below: a sum over many thousand keys would
// drift towards zero. So P V of every tile starts anew, and O += v_scale * (P V) is done in fp32 (two-level
// accumulation, as DeepSeek-V3, arXiv 2412.19437, section 3.3.2, has it for GEMMs); that is where V's scale goes.
// The scales of Q and K go into the exponent's scale, one FMA per score as before.
//
// Config::kOverlaps, per step: wait its turn, issue S (this block) and P V (block before), pass the turn, wait S, mask,
//                              maximum, wait P V, add it to O, exponentials
// else, per step:              wait its turn, P V (block before) in parts, in the registers where S was, each added to
//                              O, issue S, pass the turn, wait S, mask, maximum, exponentials
// Config::kOverlapsTiles:      after a tile's last P V the next tile's first S is issued, and runs while O is written
#pragma once

#include "common/block_range.h"
#include "common/mask.cuh"
#include "common/wgmma.cuh"
#include "fwd/epilogue.cuh"
#include "fwd/fp8_config.h"
#include "fwd/fp8_layout.h"
#include "fwd/fp8_softmax.cuh"

namespace fa3 {

// Where the scales of a head begin, and the scale of one of its blocks. (The host checks that 32 bits are enough.)
CUTLASS_DEVICE int scales_offset(BlockScales const& scales, int batch_idx, int head_idx) {
  return batch_idx * scales.batch_stride + head_idx * scales.head_stride;
}
CUTLASS_DEVICE float scale_of(BlockScales const& scales, int offset, int block) {
  return scales.data[offset + block * scales.block_stride];
}

// O += scale * (P V of a tile), for some of O's columns.
template <int kCount, class TensorO, class TensorPV>
CUTLASS_DEVICE void add_scaled(TensorO& o, int first, TensorPV const& pv, float scale) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kCount; ++i) {
    o(first + i) = fmaf(pv(i), scale, o(first + i));
  }
}

// The rows after V's channels that sum up P. To be called by the CTA, before its first barrier.
template <class Config>
CUTLASS_DEVICE void write_ones(typename Config::SharedStorage& smem) {
  constexpr uint32_t kOnes = 0x38383838;  // e4m3
  for (auto& stage : either<Config::kVTransposed>(smem.v, smem.vt)) {
    if (threadIdx.x < Config::kSumColumns * Config::kTileN / 16) {
      reinterpret_cast<uint4*>(stage + Config::kHeadDim * Config::kTileN)[threadIdx.x] = {kOnes, kOnes, kOnes, kOnes};
    }
  }
  cutlass::arch::fence_view_async_shared();  // WGMMA reads them
}

template <class Config>
CUTLASS_DEVICE void consume_fp8(FwdFp8KernelParams const& params, typename Config::SharedStorage& smem,
                                int warpgroup_idx) {
  using namespace cute;
  using Element = typename Config::Element;
  using Schedule = typename Config::Schedule;

  typename Config::MmaQK mma_qk;
  typename Config::MmaPV mma_pv;
  typename Config::MmaPVAndSums mma_pv_and_sums;
  Tensor sQ = make_tensor(make_smem_ptr(smem.q[warpgroup_idx][0]), typename Config::LayoutQ{});
  Tensor sK = make_tensor(make_smem_ptr(smem.k[0]), typename Config::LayoutK{});  // (kTileN, kHeadDim, stages)
  // What P V reads: V as it came, or what the transposers made of it.
  auto& vt = either<Config::kVTransposed>(smem.v, smem.vt);
  auto& pipeline_v = either<Config::kVTransposed>(smem.pipeline_v, smem.pipeline_vt);
  Tensor sVt = make_tensor(make_smem_ptr(vt[0]), typename Config::LayoutVt{});  // (kPvRows, kTileN, stages)
  Tensor tSrQ = mma_qk.get_slice(0).partition_fragment_A(sQ);
  Tensor tSrK = mma_qk.get_slice(0).partition_fragment_B(sK);
  Tensor tSrS = partition_fragment_C(mma_qk, Shape<_64, typename Config::TileN>{});
  using FragmentPV = decltype(partition_fragment_C(mma_pv, Shape<_64, typename Config::PvColumns>{}));
  using FragmentPVAndSums =
      decltype(partition_fragment_C(mma_pv_and_sums, Shape<_64, typename Config::PvColumnsAndSums>{}));
  FragmentPVAndSums tOrPV[Config::kPvBuffers];
  Tensor tOrO = make_tensor<float>(Layout<Shape<Shape<_2, _2, Int<Config::kHeadDim / 8>>, _1, _1>>{});
  Tensor tOrP = make_tensor<Element>(Shape<Shape<_4, _2, _2>, _1, Int<Config::kTileN / 32>>{});

  auto& pipeline_q = smem.pipeline_q[warpgroup_idx];
  auto& pipeline_k = smem.pipeline_k;
  PipelineState<Config::kStagesQ> q_state;
  PipelineState<Config::kStagesKV> state;  // of K and of V: rings of as many stages, and a block has the same in both

  ScaledSoftmax softmax;
  float correction[kRowsPerThread];
  float v_scale;

  TileScheduler scheduler(params.scheduler, blockIdx.x);
  Tile tile{};
  int unmasked_end = 0;  // key blocks before it are seen by all of this warpgroup's rows
  auto const first_row = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    return tile.block * Config::kTileM + warpgroup_idx * kRowsPerWarpgroup;
  };

  using State = decltype(state);
  auto const issue_qk = [&](State const& k_state) CUTLASS_LAMBDA_FUNC_INLINE {
    gemm(mma_qk, tSrQ(_, _, _, q_state.stage), tSrK(_, _, _, k_state.stage), tSrS, /*accumulate=*/false);
  };
  auto const issue_pv = [&](auto part, FragmentPVAndSums& tOrPV) CUTLASS_LAMBDA_FUNC_INLINE {
    auto const issue = [&](auto& mma, auto columns, auto&& tOrPV) CUTLASS_LAMBDA_FUNC_INLINE {
      Tensor sV = domain_offset(make_coord(part * typename Config::PvColumns{}, _0{}, _0{}), sVt);
      Tensor tOrV = mma.get_slice(0).partition_fragment_B(local_tile(
          sV, make_shape(columns, typename Config::TileN{}, Int<Config::kStagesKV>{}), make_coord(_0{}, _0{}, _0{})));
      gemm(mma, tOrP, tOrV(_, _, _, state.stage), tOrPV, /*accumulate=*/false);
    };
    if constexpr (part == Config::kPvParts - 1) {
      issue(mma_pv_and_sums, typename Config::PvColumnsAndSums{}, tOrPV);
    } else {
      issue(mma_pv, typename Config::PvColumns{}, make_tensor(tOrPV.data(), FragmentPV{}.layout()));
    }
  };
  auto const add_pv = [&](auto part, FragmentPVAndSums const& pv) CUTLASS_LAMBDA_FUNC_INLINE {
    constexpr int kCount = decltype(size(FragmentPV{}))::value;
    add_scaled<kCount>(tOrO, part * kCount, pv, v_scale);
    if constexpr (part == Config::kPvParts - 1) {
      softmax.row_sum[0] += pv(kCount);  // four registers: two columns, both the sum, of each row
      softmax.row_sum[1] += pv(kCount + 2);
    }
  };
  auto const mask_and_update_max = [&](int n_block, float qk_scale_log2) CUTLASS_LAMBDA_FUNC_INLINE {
    if constexpr (Config::kMaxOfIntegers) {
      warpgroup_fence_operand(tSrS);  // else NVVM compares before the wait
    }
    if (n_block >= unmasked_end) {
      int limit[kRowsPerThread];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRowsPerThread; ++i) {
        int const row = first_row() + accumulator_row(i);
        limit[i] = visible_keys(row, params.seqlen_q, params.seqlen_k, params.causal) - n_block * Config::kTileN;
      }
      mask_columns(tSrS, limit);
    }
    softmax.template update_max<Config::kMaxOfIntegers>(tSrS, qk_scale_log2, correction);
  };
  // Makes O of the blocks before fit the maximum of the block whose P V is under way.
  auto const rescale_o = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    // Most blocks of a long sequence raise no row's maximum.
    if (__any_sync(0xffffffff, correction[0] != 1.f || correction[1] != 1.f)) {
      rescale(tOrO, correction);
    }
    softmax.rescale_sums(correction);
  };

  auto const pass_turn = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    int idx = warpgroup_idx;
    if constexpr (!Config::kKeepsTurns) {
      asm volatile("" : "+r"(idx));  // what follows from it is computed here
    }
    Schedule::pass_turn(idx);
  };

  int n_block = 0;
  bool skips_block = false;  // the CTA's last key block, hidden from all of this warpgroup's rows
  // What the tile's rows see.
  auto const find_blocks = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    BlockRange const range =
        block_range(first_row(), kRowsPerWarpgroup, Config::kTileN, params.seqlen_q, params.seqlen_k, params.causal);
    unmasked_end = range.unmasked_end;
    n_block = range.end - 1;
    skips_block = range.end < block_range(tile.block * Config::kTileM, Config::kTileM, Config::kTileN, params.seqlen_q,
                                          params.seqlen_k, params.causal)
                                  .end;
  };
  // The turn and the K of a block that is skipped. Its V, which lands later, goes back after the first S.
  auto const skip_block = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    pass_turn();
    pipeline_k.wait(state);
    __syncwarp();  // no lane still polls the barrier when the stage goes back
    pipeline_k.release(state);
    state.advance();
  };
  // Config::kOverlapsTiles: issues the first S of a tile, in a turn that this warpgroup already has.
  auto const begin_tile = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    find_blocks();
    if (skips_block) {
      skip_block();
      Schedule::wait_turn(warpgroup_idx);
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

  Schedule::start(warpgroup_idx);
  if (!scheduler.next(tile)) {
    return;
  }
  if constexpr (Config::kOverlapsTiles) {
    Schedule::wait_turn(warpgroup_idx);
    begin_tile();
    warpgroup_wait<0>();
  }
  while (true) {
    if constexpr (!Config::kOverlapsTiles) {
      find_blocks();
    }
    int const kv_head_idx = tile.head_idx / params.group_size;
    int const k_offset = scales_offset(params.k_scales, tile.batch_idx, kv_head_idx);
    int const v_offset = scales_offset(params.v_scales, tile.batch_idx, kv_head_idx);
    int const q_offset = scales_offset(params.q_scales, tile.batch_idx, tile.head_idx / params.q_scales_group);
    // A warpgroup past the last query has no scale, and needs none.
    float const q_scale_log2 =
        first_row() < params.seqlen_q
            ? scale_of(params.q_scales, q_offset, first_row() / kFp8BlockRows) * params.softmax_scale_log2
            : 1.f;
    auto const qk_scale_log2 = [&](int n_block) CUTLASS_LAMBDA_FUNC_INLINE {
      float const scale = scale_of(params.k_scales, k_offset, n_block) * q_scale_log2;
      return scale == 0.f ? kSmallestScale : scale;
    };
    auto const v_scale_of = [&](int n_block)
                                CUTLASS_LAMBDA_FUNC_INLINE { return scale_of(params.v_scales, v_offset, n_block); };

    softmax.reset();
    clear(tOrO);
    if constexpr (!Config::kOverlapsTiles) {
      if (skips_block) {
        Schedule::wait_turn(warpgroup_idx);
        skip_block();
      }
      pipeline_q.wait(q_state);
    }
    float scale = qk_scale_log2(n_block);
    v_scale = v_scale_of(n_block);
    if constexpr (!Config::kOverlapsTiles) {
      pipeline_k.wait(state);
      Schedule::wait_turn(warpgroup_idx);
      issue_qk(state);
      pass_turn();
      warpgroup_wait<0>();
    }
    pipeline_k.release(state);
    if (Config::kOverlapsTiles && n_block == 0) {
      release_q();
    }
    if (skips_block) {
      pipeline_v.wait(state.previous());
      __syncwarp();
      pipeline_v.release(state.previous());
    }
    mask_and_update_max(n_block, scale);
    correction[0] = correction[1] = 1.f;  // O is empty
    softmax.exponentiate(tSrS, scale, tOrP);

    if constexpr (!Config::kOverlaps) {
      bool v_landed = false;
      // One loop, left in the middle: with the last P V after it, ptxas spills.
      while (true) {
        Schedule::wait_turn(warpgroup_idx);
        pipeline_v.wait(state, v_landed);
        bool k_landed = false;
        // Part p is added to O when kPvBuffers - 1 more are under way.
        constexpr int kParts = Config::kPvParts, kAhead = Config::kPvBuffers - 1;
        for_each(make_int_sequence<kParts + kAhead>{}, [&](auto step) CUTLASS_LAMBDA_FUNC_INLINE {
          if constexpr (step < kParts) {
            issue_pv(step, tOrPV[step % Config::kPvBuffers]);
          }
          if constexpr (Config::kAsksEarly && step == kParts - 1) {
            k_landed = pipeline_k.landed(state.next());
          }
          if constexpr (step == 0) {
            rescale_o();
          }
          constexpr int part = step - kAhead;
          if constexpr (part >= 0) {
            warpgroup_wait<cute::min(kAhead, kParts - 1 - part)>();
            if constexpr (part == kParts - 1) {
              pipeline_v.release(state);
              state.advance();
            }
            add_pv(Int<part>{}, tOrPV[part % Config::kPvBuffers]);
          }
        });
        if (n_block == 0) {
          break;
        }
        --n_block;
        pipeline_k.wait(state, k_landed);
        issue_qk(state);
        pass_turn();
        scale = qk_scale_log2(n_block);
        v_scale = v_scale_of(n_block);
        warpgroup_wait<0>();
        pipeline_k.release(state);
        if (Config::kOverlapsTiles && n_block == 0) {
          release_q();
        }
        if constexpr (Config::kAsksEarly) {
          v_landed = pipeline_v.landed(state);
        }
        mask_and_update_max(n_block, scale);
        softmax.exponentiate(tSrS, scale, tOrP);
      }
      if constexpr (!Config::kOverlapsTiles) {
        pass_turn();
      }
    } else {
      for (--n_block; n_block >= 0; --n_block) {
        scale = qk_scale_log2(n_block);
        float const next_v_scale = v_scale_of(n_block);
        State const next_state = state.next();
        pipeline_k.wait(next_state);
        Schedule::wait_turn(warpgroup_idx);
        issue_qk(next_state);
        pipeline_v.wait(state);
        issue_pv(_0{}, tOrPV[0]);
        pass_turn();
        rescale_o();
        warpgroup_wait<1>();
        pipeline_k.release(next_state);
        mask_and_update_max(n_block, scale);
        warpgroup_wait<0>();
        pipeline_v.release(state);
        add_pv(_0{}, tOrPV[0]);
        softmax.exponentiate(tSrS, scale, tOrP);
        v_scale = next_v_scale;
        state = next_state;
      }
      pipeline_v.wait(state);
      Schedule::wait_turn(warpgroup_idx);
      issue_pv(_0{}, tOrPV[0]);
      pass_turn();
      rescale_o();
      warpgroup_wait<0>();
      pipeline_v.release(state);
      state.advance();
      add_pv(_0{}, tOrPV[0]);
    }
    if constexpr (Config::kOverlapsTiles) {
      Tile const ended = tile;
      if (!scheduler.next(tile)) {
        pass_turn();
        store_tile<Config>(params, smem, warpgroup_idx, ended, softmax, tOrO);
        break;
      }
      begin_tile();
      store_tile<Config>(params, smem, warpgroup_idx, ended, softmax, tOrO);
      warpgroup_wait<0>();
    } else {
      release_q();
      store_tile<Config>(params, smem, warpgroup_idx, tile, softmax, tOrO);
      if (!scheduler.next(tile)) {
        break;
      }
    }
  }
  cute::tma_store_wait<0>();  // shared memory outlives the reads of the last store
}

}  // namespace fa3
