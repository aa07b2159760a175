// A consumer warpgroup: dK and dV of 64 keys, step after step, and its columns of every step's dQ.
//
//   S^T = K Q^T   P^T = exp2(S^T - lse)   dP^T = V dO^T   dS^T = P^T (dP^T - D)
//   dV += P^T dO        dK += dS^T Q        dQ = dS K
//
// The transposed products have keys as rows: P^T and dS^T become A operands in registers. dQ sums over the keys of both
// warpgroups, so dS goes through shared memory. dQ is computed one step late, so that no warpgroup waits for the
// other's dS: the two may drift apart by a step, and one computes while the other uses the tensor cores.
//
// One iteration of the loop goes from P_j to P_j+1. What is issued before a wait overlaps what is computed after it:
//
//   compute dS_j
//   issue   S_j+1, dQ_j-1, dK_j      wait for dV_j, S_j+1, dQ_j-1
//   store   dQ_j-1 to shared memory
//   issue   dP_j+1
//   compute P_j+1                    wait for dK_j
//   issue   dV_j+1                   wait for dP_j+1
//
// pipeline     filled by          full arrivals            freed by        empty arrivals
// ds           all consumers      one per consumer warp    all consumers   one per consumer warp
// dq[w]        this warpgroup     one per warp             a dq_writer     1
//
// Q of a step is in use until its dK, when S of the next step has long been issued: three stages. dO needs two.
#pragma once

#include "bwd/dq.cuh"
#include "bwd/epilogue.cuh"
#include "bwd/pointwise.cuh"
#include "bwd/steps.cuh"
#include "common/wgmma.cuh"

namespace fa3::bwd {

template <class Config>
CUTLASS_DEVICE void consume(KernelParams const& params, typename Config::SharedStorage& smem, int warpgroup_idx) {
  using namespace cute;
  using Element = typename Config::Element;
  using HeadDim = typename Config::HeadDim;
  using HeadDimV = typename Config::HeadDimV;
  using TileM = typename Config::TileM;
  using TileN = typename Config::TileN;
  using DqColumns = typename Config::DqColumns;

  typename Config::MmaS mma_s;
  typename Config::MmaDp mma_dp;
  typename Config::MmaDv mma_dv;
  typename Config::MmaDk mma_dk;
  typename Config::MmaDq mma_dq;
  auto const smem_tensor = [](Element* data, auto layout) { return make_tensor(make_smem_ptr(data), layout); };
  // This warpgroup's 64 keys, and its columns of K as what dQ is multiplied with.
  Tensor sK = local_tile(smem_tensor(smem.k, typename Config::LayoutK{}), Shape<_64, HeadDim>{},
                         make_coord(warpgroup_idx, _0{}));
  Tensor sV = local_tile(smem_tensor(smem.v, typename Config::LayoutV{}), Shape<_64, HeadDimV>{},
                         make_coord(warpgroup_idx, _0{}));
  Tensor sKt = local_tile(smem_tensor(smem.k, typename Config::LayoutKt{}), Shape<DqColumns, TileN>{},
                          make_coord(warpgroup_idx, _0{}));
  Tensor sQ = smem_tensor(smem.q[0], typename Config::LayoutQ{});           // (kTileM, kHeadDim, stages)
  Tensor sQt = smem_tensor(smem.q[0], typename Config::LayoutQt{});         // (kHeadDim, kTileM, stages)
  Tensor sdO = smem_tensor(smem.dout[0], typename Config::LayoutDout{});    // (kTileM, kHeadDimV, stages)
  Tensor sdOt = smem_tensor(smem.dout[0], typename Config::LayoutDoutt{});  // (kHeadDimV, kTileM, stages)
  Tensor sdS = smem_tensor(smem.ds[0], typename Config::LayoutDs{});        // (kTileM, kTileN, stages)
  Tensor sdSt = local_tile(smem_tensor(smem.ds[0], typename Config::LayoutDst{}),
                           Shape<_64, TileM, Int<Config::kStagesDs>>{}, make_coord(warpgroup_idx, _0{}, _0{}));

  Tensor tSrK = mma_s.get_slice(0).partition_fragment_A(sK);
  Tensor tSrQ = mma_s.get_slice(0).partition_fragment_B(sQ);
  Tensor tdPrV = mma_dp.get_slice(0).partition_fragment_A(sV);
  Tensor tdPrdO = mma_dp.get_slice(0).partition_fragment_B(sdO);
  Tensor tdVrdO = mma_dv.get_slice(0).partition_fragment_B(sdOt);
  Tensor tdKsdS = typename Config::MmaDkShared{}.get_slice(0).partition_fragment_A(sdSt);
  Tensor tdKrQ = mma_dk.get_slice(0).partition_fragment_B(sQt);
  Tensor tdQrdS = mma_dq.get_slice(0).partition_fragment_A(sdS);
  Tensor tdQrK = mma_dq.get_slice(0).partition_fragment_B(sKt);

  Tensor tSrS = partition_fragment_C(mma_s, Shape<_64, TileM>{});
  Tensor tdPrdP = partition_fragment_C(mma_s, Shape<_64, TileM>{});
  Tensor tdVrdV = partition_fragment_C(mma_dv, Shape<_64, HeadDimV>{});
  Tensor tdKrdK = partition_fragment_C(mma_dk, Shape<_64, HeadDim>{});
  Tensor tdQrdQ = partition_fragment_C(mma_dq, Shape<TileM, DqColumns>{});
  Tensor tdVrP = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<Config::kTileM / 16>>{});
  Tensor rdS = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<Config::kTileM / 16>>{});

  PipelineState<1> kv_state;
  PipelineState<Config::kStagesQ> q_state;  // of the step whose S is issued next; dS follows it, with as many stages
  PipelineState<Config::kStagesDout> dout_state;
  auto& pipeline_dq = smem.pipeline_dq[warpgroup_idx];
  // First of the warp's 16 keys among the CTA's. Computed from threadIdx, it costs no register from step to step.
  int const warp_key = (threadIdx.x / cutlass::NumThreadsPerWarp - cutlass::NumWarpsPerWarpGroup) * kRowsPerWarp;

  // Registers hold one S and one dP, and dQ takes the place of dP: dP of the next step waits until dQ has been stored.
  auto const issue_s = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    smem.pipeline_q.wait(q_state);
    gemm(mma_s, not_hoisted(tSrK), tSrQ(_, _, _, q_state.stage), tSrS, /*accumulate=*/false);
  };
  auto const issue_dp = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    smem.pipeline_dout.wait(dout_state);
    if constexpr (Config::kVFromRegisters) {
      gemm(mma_dp, tdPrV, tdPrdO(_, _, _, dout_state.stage), tdPrdP, /*accumulate=*/false);
    } else {
      gemm(mma_dp, not_hoisted(tdPrV), tdPrdO(_, _, _, dout_state.stage), tdPrdP, /*accumulate=*/false);
    }
  };
  auto const issue_dk = [&](int stage, bool accumulate) CUTLASS_LAMBDA_FUNC_INLINE {
    if constexpr (Config::kDsFromRegisters) {
      gemm(mma_dk, rdS, tdKrQ(_, _, _, stage), tdKrdK, accumulate);
    } else {
      gemm(mma_dk, tdKsdS(_, _, _, stage), tdKrQ(_, _, _, stage), tdKrdK, accumulate);
    }
  };
  auto const issue_dq = [&](PipelineState<Config::kStagesDs> const& state) CUTLASS_LAMBDA_FUNC_INLINE {
    smem.pipeline_ds.wait(state);
    gemm(mma_dq, tdQrdS(_, _, _, state.stage), not_hoisted(tdQrK), tdQrdQ, /*accumulate=*/false);
  };
  // The buffer is filled once per step and dO has two stages, so dO's stage index doubles as this barrier's phase: the
  // buffer is one step (late) or none behind. That saves a register.
  static_assert(Config::kStagesDout == 2);
  auto const store_dq = [&](PipelineState<Config::kStagesDs> const& state, bool late) CUTLASS_LAMBDA_FUNC_INLINE {
    smem.pipeline_ds.release(state);
    pipeline_dq.empty.wait(dout_state.stage ^ late);
    store_dq_to_smem(tdQrdQ, smem.dq[warpgroup_idx]);
  };
  auto const publish_dq = [&](int stage) CUTLASS_LAMBDA_FUNC_INLINE {
    cutlass::arch::fence_view_async_shared();  // dQ is written, then read by TMA
    __syncwarp();
    if (cutlass::canonical_lane_idx() == 0) {
      pipeline_dq.full[stage].arrive();
    }
  };
  auto const release_dout = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    smem.pipeline_dout.release(dout_state);
    dout_state.advance();
  };

  // On its way to global memory dV takes the place of V, of which only this warpgroup has read these rows, and dK that
  // of the last dS, so that K is free for the next tile at once.
  auto const v_rows = [&](int slab) CUTLASS_LAMBDA_FUNC_INLINE {
    return smem.v + (slab * Config::kTileN + warp_key) * Config::kSlabColumnsV;
  };
  auto const ds_rows = [&](int slab) CUTLASS_LAMBDA_FUNC_INLINE {
    constexpr int kSlabsPerStage = Config::kTileM / Config::kSlabColumnsK;
    return smem.ds[slab / kSlabsPerStage] + warp_key * Config::kTileM +
           slab % kSlabsPerStage * kRowsPerWarp * Config::kSlabColumnsK;
  };
  auto const store_dv = [&](Tile const& tile) CUTLASS_LAMBDA_FUNC_INLINE {
    store_gradient<Config, Config::kSlabColumnsV>(params, params.dv, tdVrdV, v_rows, warp_key, tile);
  };
  auto const store_dk = [&](Tile const& tile) CUTLASS_LAMBDA_FUNC_INLINE {
    store_gradient<Config, Config::kSlabColumnsK>(params, params.dk, tdKrdK, ds_rows, warp_key, tile);
  };

  StaticScheduler scheduler(params.scheduler, blockIdx.x);
  Tile tile;
  while (scheduler.next(tile)) {
    QueryTileIterator<Config> steps(params, tile);
    if (steps.done()) {  // no query sees a key of the tile
      clear(tdVrdV);
      clear(tdKrdK);
      smem.pipeline_k.wait(kv_state);
      smem.pipeline_v.wait(kv_state);
      cute::tma_store_wait<0>();  // dK of the previous tile has left the place of dS
      __syncwarp();
      store_dv(tile);
      store_dk(tile);
      cute::tma_store_wait<0>();
      smem.pipeline_k.release(kv_state);
      smem.pipeline_v.release(kv_state);
      kv_state.advance();
      continue;
    }
    KeyMask<Config> const mask(params, tile.batch_idx, tile.block * Config::kTileN + warpgroup_idx * kRowsPerWarpgroup);

    // P of the step that q_state and dout_state are at. Its S has arrived, its dP is in flight.
    auto const compute_p = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
      mask.apply(tSrS, steps.m_block);
      exponentials(tSrS, QueryVector<Config::kTileM>(smem.lse_log2[q_state.stage]), params.scores.softmax_scale_log2);
    };
    auto const issue_dv = [&](auto is_first) CUTLASS_LAMBDA_FUNC_INLINE {
      q_state.advance();
      steps.advance();
      convert(tSrS, tdVrP);
      gemm(mma_dv, tdVrP, tdVrdO(_, _, _, dout_state.stage), tdVrdV, /*accumulate=*/!is_first);
    };
    // dS of the step before q_state, to shared memory. Its dP has arrived, its dV is in flight.
    auto const compute_ds = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
      score_gradients(tSrS, tdPrdP, QueryVector<Config::kTileM>(smem.dsum[dout_state.stage]));
      convert(tSrS, rdS);
      auto const state = q_state.previous();
      smem.pipeline_ds.empty[state.stage].wait(state.phase ^ 1);
      store_rows_to_smem<Config::kTileM>(reinterpret_cast<uint32_t const*>(rdS.data()),
                                         smem.ds[state.stage] + warp_key * Config::kTileM);
    };
    auto const publish_ds = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
      cutlass::arch::fence_view_async_shared();  // dS is written, then read by WGMMA
      __syncwarp();
      if (cutlass::canonical_lane_idx() == 0) {
        smem.pipeline_ds.full[q_state.previous().stage].arrive();
      }
      if constexpr (!Config::kDsFromRegisters) {  // dK reads what the warps of this warpgroup wrote
        cutlass::arch::NamedBarrier::sync(cutlass::NumThreadsPerWarpGroup, kWarpgroup + warpgroup_idx);
      }
    };
    // From P of one step to P of the next, with dQ of the step before both.
    auto const do_step = [&](auto is_first) CUTLASS_LAMBDA_FUNC_INLINE {
      compute_ds();
      issue_s();
      publish_ds();
      auto const ds_state = q_state.previous();
      if constexpr (!is_first) {
        issue_dq(ds_state.previous());
      }
      issue_dk(ds_state.stage, /*accumulate=*/!is_first);
      warpgroup_wait<1>();  // dV, S of the next step, dQ
      release_dout();
      if constexpr (!is_first) {
        store_dq(ds_state.previous(), /*late=*/true);
      }
      issue_dp();
      compute_p();
      warpgroup_wait<1>();  // dK of the previous step
      smem.pipeline_q.release(q_state.previous());
      issue_dv(cute::false_type{});
      if constexpr (!is_first) {
        publish_dq(q_state.stage);  // of three steps before; by now its stores have completed, and the fence is cheap
      }
      warpgroup_wait<1>();  // dP
    };

    smem.pipeline_k.wait(kv_state);
    issue_s();
    smem.pipeline_v.wait(kv_state);
    if constexpr (Config::kVFromRegisters) {
      load_a_operand(mma_dp, sV, tdPrV);
    }
    issue_dp();
    warpgroup_wait<1>();  // S
    compute_p();
    issue_dv(cute::true_type{});
    cute::tma_store_wait<0>();  // dK of the previous tile has left the place of dS
    __syncwarp();
    warpgroup_wait<1>();  // dP
    bool const several_steps = !steps.done();
    if (several_steps) {
      do_step(cute::true_type{});
      while (!steps.done()) {
        do_step(cute::false_type{});
      }
    }
    compute_ds();
    publish_ds();
    warpgroup_wait<0>();  // dV
    release_dout();
    auto const ds_state = q_state.previous();
    if (several_steps) {
      issue_dq(ds_state.previous());
      warpgroup_wait<0>();
      store_dq(ds_state.previous(), /*late=*/true);
      publish_dq(ds_state.previous().stage);
    }
    issue_dq(ds_state);
    issue_dk(ds_state.stage, several_steps);
    store_dv(tile);
    warpgroup_wait<1>();  // dQ
    store_dq(ds_state, /*late=*/false);
    publish_dq(ds_state.stage);
    warpgroup_wait<0>();  // dK
    smem.pipeline_q.release(ds_state);
    cutlass::arch::NamedBarrier::sync(Config::kConsumerThreads, kConsumers);  // both have read K and dS for dQ
    smem.pipeline_k.release(kv_state);
    scale_gradient(tdKrdK, params.scores.softmax_scale);
    store_dk(tile);
    cute::tma_store_wait<1>();  // dV has left the place of V
    smem.pipeline_v.release(kv_state);
    kv_state.advance();
  }
  cute::tma_store_wait<0>();  // shared memory outlives the reads of the last store
}

}  // namespace fa3::bwd
