// A consumer warpgroup: 64 rows of O = softmax(Q K^T) V, tile after tile (FlashAttention-3, algorithm 2).
//
// per step: wait k.full, wait its turn, issue S = Q K^T (this block), wait v.full, issue O += P V (block before),
//           pass the turn, wait S, free k, mask, softmax, wait O, free v, P = S
//
// The two-stage pipeline does not drain between tiles: the last P V of a tile is issued together with the first Q K^T
// of the next, and O is written while the other warpgroups compute.
#pragma once

#include "common/block_range.h"
#include "common/mask.cuh"
#include "common/softmax.cuh"
#include "common/wgmma.cuh"
#include "fwd/config.h"
#include "fwd/epilogue.cuh"

namespace fa3 {

template <class Config>
CUTLASS_DEVICE void consume(FwdKernelParams const& params, typename Config::SharedStorage& smem, int warpgroup_idx) {
  using namespace cute;
  using Element = typename Config::Element;
  using Schedule = typename Config::Schedule;

  typename Config::MmaQK mma_qk;
  typename Config::MmaPV mma_pv;
  Tensor sQ =
      make_tensor(make_smem_ptr(smem.q[warpgroup_idx][0]), typename Config::LayoutQ{});  // (64, kHeadDim, stages)
  Tensor sK = make_tensor(make_smem_ptr(smem.k[0]), typename Config::LayoutK{});         // (kTileN, kHeadDim, stages)
  Tensor sVt = make_tensor(make_smem_ptr(smem.v[0]), typename Config::LayoutVt{});       // (kHeadDim, kTileN, stages)
  Tensor tSrQ = mma_qk.get_slice(0).partition_fragment_A(sQ);  // descriptors are the same for all threads
  Tensor tSrK = mma_qk.get_slice(0).partition_fragment_B(sK);
  Tensor tOrV = mma_pv.get_slice(0).partition_fragment_B(sVt);
  Tensor tSrS = partition_fragment_C(mma_qk, Shape<_64, typename Config::TileN>{});
  Tensor tOrO = partition_fragment_C(mma_pv, Shape<_64, typename Config::HeadDim>{});
  Tensor tOrP = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<Config::kTileN / 16>>{});

  auto& pipeline_q = smem.pipeline_q[warpgroup_idx];
  auto& pipeline_k = smem.pipeline_k;
  auto& pipeline_v = smem.pipeline_v;
  PipelineState<Config::kStagesQ> q_state;
  PipelineState<Config::kStagesK> k_state;
  PipelineState<Config::kStagesV> v_state;

  OnlineSoftmax softmax;
  float correction[kRowsPerThread];

  TileScheduler scheduler(params.scheduler, blockIdx.x);
  Tile tile, next;
  scheduler.next(tile);  // there is one: the grid has no more CTAs than tiles
  auto const rows_range = [&](Tile const& tile) CUTLASS_LAMBDA_FUNC_INLINE {
    return block_range(tile.block * Config::kTileM + warpgroup_idx * kRowsPerWarpgroup, kRowsPerWarpgroup,
                       Config::kTileN, params.seqlen_q, params.seqlen_k, params.causal);
  };
  BlockRange range = rows_range(tile);  // key blocks of `tile` that this warpgroup's 64 rows see
  // Whether the last key block of the CTA's tile is hidden from all of this warpgroup's rows.
  auto const skips_block = [&](Tile const& tile) CUTLASS_LAMBDA_FUNC_INLINE {
    return rows_range(tile).end < block_range(tile.block * Config::kTileM, Config::kTileM, Config::kTileN,
                                              params.seqlen_q, params.seqlen_k, params.causal)
                                      .end;
  };

  auto const release_k = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    pipeline_k.release(k_state);
    k_state.advance();
  };
  auto const release_q = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    pipeline_q.release(q_state);
    q_state.advance();
  };
  auto const release_v = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    pipeline_v.release(v_state);
    v_state.advance();
  };
  auto const wait_first_block = [&](Tile const& tile) CUTLASS_LAMBDA_FUNC_INLINE {
    if (skips_block(tile)) {
      Schedule::wait_turn(warpgroup_idx);
      Schedule::pass_turn(warpgroup_idx);
      pipeline_k.wait(k_state);
      __syncwarp();  // no lane still polls the barrier when the stage goes back
      release_k();
    }
    pipeline_q.wait(q_state);
    pipeline_k.wait(k_state);
  };
  auto const issue_qk = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    gemm(mma_qk, tSrQ(_, _, _, q_state.stage), tSrK(_, _, _, k_state.stage), tSrS, /*accumulate=*/false);
  };
  auto const issue_pv = [&](bool accumulate) CUTLASS_LAMBDA_FUNC_INLINE {
    pipeline_v.wait(v_state);
    gemm(mma_pv, tOrP, tOrV(_, _, _, v_state.stage), tOrO, accumulate);
  };
  // K goes back as soon as S is there, Q with the tile's last K: its successor is loaded under the last softmax.
  auto const release_qk = [&](int n_block) CUTLASS_LAMBDA_FUNC_INLINE {
    release_k();
    if (n_block == 0 && !Config::kOutReplacesQ) {
      release_q();
    }
  };
  auto const mask_and_softmax = [&](int n_block) CUTLASS_LAMBDA_FUNC_INLINE {
    if (n_block >= range.unmasked_end) {
      int limit[kRowsPerThread];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRowsPerThread; ++i) {
        int const row = tile.block * Config::kTileM + warpgroup_idx * kRowsPerWarpgroup + accumulator_row(i);
        limit[i] = visible_keys(row, params.seqlen_q, params.seqlen_k, params.causal) - n_block * Config::kTileN;
      }
      mask_columns(tSrS, limit);
    }
    softmax.update(tSrS, params.softmax_scale_log2, correction);
  };
  // S and P of a tile's first block, with no O yet.
  auto const first_softmax = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    if (skips_block(tile)) {
      pipeline_v.wait(v_state);
      __syncwarp();
      release_v();
    }
    softmax.reset();
    mask_and_softmax(range.end - 1);
    convert(tSrS, tOrP);
  };
  // A tile's first block with nothing to overlap it with.
  auto const first_block = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    wait_first_block(tile);
    Schedule::wait_turn(warpgroup_idx);
    issue_qk();
    Schedule::pass_turn(warpgroup_idx);
    warpgroup_wait<0>();
    release_qk(range.end - 1);
    first_softmax();
  };
  // The blocks in between: S of n_block under way together with O of n_block + 1.
  auto const middle_blocks = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    for (int n_block = range.end - 2; n_block >= 0; --n_block) {
      pipeline_k.wait(k_state);
      Schedule::wait_turn(warpgroup_idx);
      issue_qk();
      issue_pv(n_block < range.end - 2);
      Schedule::pass_turn(warpgroup_idx);
      warpgroup_wait<1>();
      release_qk(n_block);
      mask_and_softmax(n_block);
      warpgroup_wait<0>();
      release_v();
      convert(tSrS, tOrP);
      // Most blocks of a long sequence raise no row's maximum.
      if (__any_sync(0xffffffff, correction[0] != 1.f || correction[1] != 1.f)) {
        rescale(tOrO, correction);
      }
    }
  };
  auto const last_block = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    Schedule::wait_turn(warpgroup_idx);
    issue_pv(range.end > 1);
    Schedule::pass_turn(warpgroup_idx);
    warpgroup_wait<0>();
    release_v();
  };

  Schedule::start(warpgroup_idx);
  if constexpr (Config::kOutReplacesQ) {
    bool has_next = true;
    while (has_next) {
      first_block();
      middle_blocks();
      last_block();
      store_tile<Config>(params, smem, warpgroup_idx, tile, softmax, tOrO);
      cute::tma_store_wait<0>();  // O has left the place of Q
      release_q();
      has_next = scheduler.next(tile);
      range = rows_range(tile);
    }
  } else {
    first_block();
    bool has_next = scheduler.next(next);
    while (true) {
      middle_blocks();
      if (!has_next) {
        break;
      }
      // The last block of one tile and the first of the next.
      wait_first_block(next);
      Schedule::wait_turn(warpgroup_idx);
      issue_qk();
      issue_pv(range.end > 1);
      Schedule::pass_turn(warpgroup_idx);
      Tile const done = tile;
      tile = next;
      range = rows_range(tile);
      has_next = scheduler.next(next);  // under the GEMMs
      warpgroup_wait<0>();
      release_qk(range.end - 1);
      release_v();
      store_tile<Config>(params, smem, warpgroup_idx, done, softmax, tOrO);
      first_softmax();
    }
    last_block();
    store_tile<Config>(params, smem, warpgroup_idx, tile, softmax, tOrO);
    cute::tma_store_wait<0>();  // shared memory outlives the reads of the last store
  }
}

}  // namespace fa3
