// A consumer warpgroup: dK and dV of 64 keys, step after step, and its columns of every step's dQ.
//
//   S^T = K Q^T   P^T = exp2(S^T - lse)   dP^T = V dO^T   dS^T = P^T (dP^T - D)
//   dV += P^T dO        dK += dS^T Q        dQ = dS K
//
// The transposed products have keys as rows: P^T and dS^T become A operands in registers, and dS goes to shared memory
// for dQ alone, which sums over the keys of both warpgroups. The GEMMs are issued so that the tensor cores have work
// queued whenever the warpgroup computes (-- is a wait for all but the last GEMM issued):
//
//   issue   dP_j              dV_j           S_j+1  |barrier|  dQ_j  dK_j
//   compute       P_j  -- (dK_j-1)   -- (dP_j)   dS_j                       -- (dQ_j)  stage dQ_j
//   under   dK_j-1, dP_j             dP_j    dV_j                                      dK_j
//
// Q of a step is in use until its dK, when S of the next step has long been issued: three stages. dO needs two.
#pragma once

#include "bwd/dq.cuh"
#include "bwd/epilogue.cuh"
#include "bwd/steps.cuh"
#include "common/mask.cuh"
#include "common/softmax.cuh"
#include "common/wgmma.cuh"

namespace fa3 {

// P^T of a tile of S^T: scores become exp2(score * scale_log2 - lse_log2), with one lse per column.
template <class Scores>
CUTLASS_DEVICE void exponentials(Scores& scores, float const* lse_log2, float scale_log2) {
  auto s = rows_and_columns(scores);
  lse_log2 += accumulator_first_column();
  CUTLASS_PRAGMA_UNROLL
  for (int c = 0; c < decltype(cute::size<1>(s))::value; c += 2) {
    float2 const lse = *reinterpret_cast<float2 const*>(lse_log2 + column_offset(c));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsPerThread; ++i) {
      s(i, c) = exp2_approx(fmaf(s(i, c), scale_log2, -lse.x));
      s(i, c + 1) = exp2_approx(fmaf(s(i, c + 1), scale_log2, -lse.y));
    }
  }
}

// dS^T = P^T (dP^T - D), in place of P^T, with one D per column.
template <class Scores>
CUTLASS_DEVICE void score_gradients(Scores& probabilities, Scores const& dprobabilities, float const* dsum) {
  auto p = rows_and_columns(probabilities);
  auto dp = rows_and_columns(dprobabilities);
  dsum += accumulator_first_column();
  CUTLASS_PRAGMA_UNROLL
  for (int c = 0; c < decltype(cute::size<1>(p))::value; c += 2) {
    float2 const d = *reinterpret_cast<float2 const*>(dsum + column_offset(c));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsPerThread; ++i) {
      p(i, c) *= dp(i, c) - d.x;
      p(i, c + 1) *= dp(i, c + 1) - d.y;
    }
  }
}

template <class Config>
CUTLASS_DEVICE void consume(BwdKernelParams const& params, typename Config::SharedStorage& smem, int warpgroup_idx) {
  using namespace cute;
  using Element = typename Config::Element;
  using HeadDim = typename Config::HeadDim;
  using TileM = typename Config::TileM;

  typename Config::MmaS mma_s;
  typename Config::MmaDv mma_dv;
  typename Config::MmaDk mma_dk;
  typename Config::MmaDq mma_dq;
  auto const smem_tensor = [](Element* data, auto layout) { return make_tensor(make_smem_ptr(data), layout); };
  // This warpgroup's 64 keys; its columns of K as what dQ is multiplied with.
  Tensor sK = local_tile(
      smem_tensor(smem.k, typename Config::template LayoutRows<Config::kTileN, 1, Config::kSlabColumnsK>{})(_, _, 0),
      Shape<_64, HeadDim>{}, make_coord(warpgroup_idx, _0{}));
  Tensor sV = local_tile(smem_tensor(smem.v, typename Config::template LayoutRows<Config::kTileN, 1>{})(_, _, 0),
                         Shape<_64, HeadDim>{}, make_coord(warpgroup_idx, _0{}));
  Tensor sKt = local_tile(
      smem_tensor(smem.k,
                  typename Config::template LayoutTransposed<Config::kTileN, 1, Config::kSlabColumnsK>{})(_, _, 0),
      Shape<typename Config::DqColumns, typename Config::TileN>{}, make_coord(warpgroup_idx, _0{}));
  Tensor sQ = smem_tensor(smem.q[0], typename Config::template LayoutRows<Config::kTileM, Config::kStagesQ>{});
  Tensor sQt = smem_tensor(smem.q[0], typename Config::template LayoutTransposed<Config::kTileM, Config::kStagesQ>{});
  Tensor sdO = smem_tensor(smem.dout[0], typename Config::template LayoutRows<Config::kTileM, Config::kStagesDout>{});
  Tensor sdOt =
      smem_tensor(smem.dout[0], typename Config::template LayoutTransposed<Config::kTileM, Config::kStagesDout>{});
  Tensor sdS = smem_tensor(smem.ds[0], typename Config::LayoutDs{});
  Tensor sdSt = local_tile(smem_tensor(smem.ds[0], typename Config::LayoutDst{}),
                           Shape<_64, TileM, Int<Config::kStagesDs>>{}, make_coord(warpgroup_idx, _0{}, _0{}));

  Tensor tSrK = mma_s.get_slice(0).partition_fragment_A(sK);
  Tensor tSrQ = mma_s.get_slice(0).partition_fragment_B(sQ);
  Tensor tdPrV = mma_s.get_slice(0).partition_fragment_A(sV);
  Tensor tdPrdO = mma_s.get_slice(0).partition_fragment_B(sdO);
  Tensor tdVrdO = mma_dv.get_slice(0).partition_fragment_B(sdOt);
  Tensor tdKrQ = mma_dk.get_slice(0).partition_fragment_B(sQt);
  Tensor tdKsdS = typename Config::MmaDkShared{}.get_slice(0).partition_fragment_A(sdSt);
  Tensor tdQrdS = mma_dq.get_slice(0).partition_fragment_A(sdS);
  Tensor tdQrK = mma_dq.get_slice(0).partition_fragment_B(sKt);

  Tensor tSrS = partition_fragment_C(mma_s, Shape<_64, TileM>{});
  Tensor tdPrdP = partition_fragment_C(mma_s, Shape<_64, TileM>{});
  Tensor tdVrdV = partition_fragment_C(mma_dv, Shape<_64, HeadDim>{});
  Tensor tdKrdK = partition_fragment_C(mma_dk, Shape<_64, HeadDim>{});
  Tensor tdQrdQ = partition_fragment_C(mma_dq, Shape<TileM, typename Config::DqColumns>{});
  Tensor tdVrP = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<Config::kTileM / 16>>{});
  Tensor rdS = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<Config::kTileM / 16>>{});
  auto const tdKrdS = [&](int stage) CUTLASS_LAMBDA_FUNC_INLINE {
    if constexpr (Config::kDsFromRegisters) {
      return rdS;
    } else {
      return tdKsdS(_, _, _, stage);
    }
  };

  PipelineState<1> kv_state;
  PipelineState<Config::kStagesQ> q_state;       // of the next S
  PipelineState<Config::kStagesQ> used_q_state;  // of the next dK
  PipelineState<Config::kStagesDout> dout_state;
  uint32_t dq_phase = 1;  // the buffer is empty at first
  auto& dq_staged = smem.dq_staged[warpgroup_idx];
  int const warp_row =
      warpgroup_idx * kRowsPerWarpgroup +
      cutlass::canonical_warp_idx_sync() % cutlass::NumWarpsPerWarpGroup * kRowsPerWarp;  // of the CTA's keys

  auto const consumers_sync = []() CUTLASS_LAMBDA_FUNC_INLINE {
    cutlass::arch::NamedBarrier::sync(Config::kConsumerThreads, kConsumers);
  };
  auto const issue_s = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    smem.pipeline_q.wait(q_state);
    gemm(mma_s, tSrK, tSrQ(_, _, _, q_state.stage), tSrS, /*accumulate=*/false);
  };
  auto const release_q = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    smem.pipeline_q.release(used_q_state);
    used_q_state.advance();
  };

  TileScheduler scheduler(params.scheduler, blockIdx.x);
  Tile tile;
  while (scheduler.next(tile)) {
    int const n_block = tile_n_block(params, tile);
    Steps steps(params, n_block, tile.head_idx, Config::kTileM, Config::kTileN);
    int const first_key = n_block * Config::kTileN + warpgroup_idx * kRowsPerWarpgroup;
    auto const first_query_of = [&](int key) CUTLASS_LAMBDA_FUNC_INLINE {
      return first_query(key, params.seqlen_q, params.seqlen_k, params.causal);
    };
    int const unmasked_from = first_query_of(first_key + kRowsPerWarpgroup - 1);

    // One step; S of it is there, and S of the next is issued in it.
    auto const do_step = [&](bool first, auto is_last) CUTLASS_LAMBDA_FUNC_INLINE {
      smem.pipeline_dout.wait(dout_state);
      gemm(mma_s, tdPrV, tdPrdO(_, _, _, dout_state.stage), tdPrdP, /*accumulate=*/false);

      int const first_row = steps.m_block * Config::kTileM;
      if (first_row < unmasked_from) {
        int const from[kRowsPerThread] = {first_query_of(first_key + accumulator_row(0)) - first_row,
                                          first_query_of(first_key + accumulator_row(1)) - first_row};
        mask_columns_before(tSrS, from);
      }
      exponentials(tSrS, smem.lse_log2[q_state.stage], params.softmax_scale_log2);
      q_state.advance();
      warpgroup_wait<1>();  // dK of the step before
      if (!first) {
        release_q();
      }
      convert(tSrS, tdVrP);
      gemm(mma_dv, tdVrP, tdVrdO(_, _, _, dout_state.stage), tdVrdV, /*accumulate=*/!first);
      warpgroup_wait<1>();  // dP
      score_gradients(tSrS, tdPrdP, smem.dsum[dout_state.stage]);
      convert(tSrS, rdS);
      stage_rows<Config::kTileM>(reinterpret_cast<uint32_t const*>(rdS.data()),
                                 smem.ds[dout_state.stage] + warp_row * Config::kTileM);
      if constexpr (!is_last) {
        issue_s();
      }
      cutlass::arch::fence_view_async_shared();  // dS is written, then read by WGMMA
      consumers_sync();
      warpgroup_wait<is_last ? 0 : 1>();  // dV: the registers of P are needed
      gemm(mma_dq, tdQrdS(_, _, _, dout_state.stage), tdQrK, tdQrdQ, /*accumulate=*/false);
      gemm(mma_dk, tdKrdS(dout_state.stage), tdKrQ(_, _, _, used_q_state.stage), tdKrdK, /*accumulate=*/!first);
      warpgroup_wait<1>();  // dV, S of the next step, dQ
      smem.pipeline_dout.release(dout_state);
      dout_state.advance();
      dq_staged.empty.wait(dq_phase);
      dq_phase ^= 1;
      stage_dq(tdQrdQ, smem.dq[warpgroup_idx]);
      cutlass::arch::fence_view_async_shared();  // dQ is written, then read by TMA
      __syncwarp();
      if (cutlass::canonical_lane_idx() == 0) {
        dq_staged.full.arrive();
      }
      steps.advance();
    };

    smem.pipeline_k.wait(kv_state);
    issue_s();
    smem.pipeline_v.wait(kv_state);
    warpgroup_wait<0>();
    for (int step = 0; step < steps.num_steps - 1; ++step) {
      do_step(step == 0, cute::false_type{});
    }
    do_step(steps.num_steps == 1, cute::true_type{});

    store_gradient<Config, Config::kSlabColumns>(params.dv, smem.v, tdVrdV, 1.f, warpgroup_idx, n_block, tile.head_idx,
                                                 tile.batch_idx);
    warpgroup_wait<0>();  // the last dK
    release_q();
    consumers_sync();  // both warpgroups have read K for dQ
    store_gradient<Config, Config::kSlabColumnsK>(params.dk, smem.k, tdKrdK, params.softmax_scale, warpgroup_idx,
                                                  n_block, tile.head_idx, tile.batch_idx);
    cute::tma_store_wait<0>();  // dK and dV have left the places of K and V
    smem.pipeline_k.release(kv_state);
    smem.pipeline_v.release(kv_state);
    kv_state.advance();
  }
}

}  // namespace fa3
