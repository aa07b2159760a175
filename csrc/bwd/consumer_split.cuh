// The consumer warpgroups for head_dim above 128: one holds dV of the CTA's 64 keys in registers, the other dK; each
// computes half of dQ's columns, slice by slice.
//
//   warpgroup 0 (dV)                                  warpgroup 1 (dK)
//   S^T_j = K Q_j^T                                   dP^T_j = V dO_j^T
//   P_j = exp2(S_j - lse)   -- P_j in shared memory ->  dS_j = P_j (dP_j - D)
//   dV += P_j^T dO_j        <- dS_j, in its place --    dK += dS_j^T Q_j
//   dQ_j-1, left columns                              dQ_j, right columns
//
// The two issue different GEMMs at different times, so that one computes while the tensor cores work for the other.
//
// barrier         arrives                    waits           when
// p_full          each warp of warpgroup 0   warpgroup 1     P of a step is in the stage of the ds ring
// pipeline_ds     full: warps of 1           both            dS has taken its place
//                 empty: all warps           warpgroup 0     dQ of the step has been computed by both
#pragma once

#include "bwd/dq.cuh"
#include "bwd/epilogue.cuh"
#include "bwd/pointwise.cuh"
#include "bwd/steps.cuh"
#include "common/wgmma.cuh"

namespace fa3::bwd {

// P is sent as fp16, 2^14 times as large, which gives 11 bits to the small probabilities of long sequences too. bf16
// gradients do not show more; for fp16 gradients the rounding residual is sent along in a second fp16. A warp's P lies
// in its 16 rows of dS's tile, 16 bytes of a lane together; the same lane of the other warpgroup reads it.
constexpr float kProbabilityScale = 16384.f;
constexpr float kResidualScale = 2048.f;  // the residual is below 2^-11 of P

template <int kSize>
CUTLASS_DEVICE void store_halves(cutlass::Array<cutlass::half_t, kSize> const& halves, void* rows) {
  auto* destination = static_cast<uint4*>(rows) + cutlass::canonical_lane_idx();
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kSize / 8; ++i) {
    destination[i * cutlass::NumThreadsPerWarp] = reinterpret_cast<uint4 const*>(&halves)[i];
  }
}

template <int kSize>
CUTLASS_DEVICE auto load_halves(void const* rows) {
  auto const* source = static_cast<uint4 const*>(rows) + cutlass::canonical_lane_idx();
  cutlass::Array<cutlass::half_t, kSize> halves;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kSize / 8; ++i) {
    reinterpret_cast<uint4*>(&halves)[i] = source[i * cutlass::NumThreadsPerWarp];
  }
  return cutlass::NumericArrayConverter<float, cutlass::half_t, kSize>::convert(halves);
}

template <bool kWithResidual, class Accumulator>
CUTLASS_DEVICE void send_probabilities(Accumulator const& probabilities, void* rows, void* residual_rows) {
  constexpr int kSize = decltype(cute::size(probabilities))::value;
  using ToHalf = cutlass::NumericArrayConverter<cutlass::half_t, float, kSize>;
  cutlass::Array<float, kSize> scaled;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kSize; ++i) {
    scaled[i] = probabilities(i) * kProbabilityScale;
  }
  auto const halves = ToHalf::convert(scaled);
  compiler_fence();
  store_halves<kSize>(halves, rows);
  if constexpr (kWithResidual) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSize; ++i) {
      scaled[i] = (scaled[i] - static_cast<float>(halves[i])) * kResidualScale;
    }
    store_halves<kSize>(ToHalf::convert(scaled), residual_rows);
  }
  compiler_fence();
}

template <bool kWithResidual, class Accumulator>
CUTLASS_DEVICE void receive_probabilities(Accumulator& probabilities, void const* rows, void const* residual_rows) {
  constexpr int kSize = decltype(cute::size(probabilities))::value;
  compiler_fence();
  auto const scaled = load_halves<kSize>(rows);
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kSize; ++i) {
    probabilities(i) = scaled[i] * (1.f / kProbabilityScale);
  }
  if constexpr (kWithResidual) {
    auto const residual = load_halves<kSize>(residual_rows);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSize; ++i) {
      probabilities(i) = fmaf(residual[i], 1.f / (kProbabilityScale * kResidualScale), probabilities(i));
    }
  }
}

// What both warpgroups do: dQ = dS K for the columns of one of them, in slices.
template <class Config>
class SplitDq {
 public:
  using SharedStorage = typename Config::SharedStorage;
  using State = PipelineState<Config::kStagesDs>;

  CUTLASS_DEVICE SplitDq(SharedStorage& smem, int warpgroup_idx) : smem_(smem), warpgroup_idx_(warpgroup_idx) {}

  // Computes and publishes dQ of the step whose dS is at `state`. For each slice it waits for all GEMMs of this
  // warpgroup that are in flight. `after_wait` is called after the first of these waits, `after_slice` when the first
  // slice has been published.
  template <class AfterWait, class AfterSlice>
  CUTLASS_DEVICE void compute(State const& state, AfterWait const& after_wait, AfterSlice const& after_slice) {
    using namespace cute;
    typename Config::MmaDq mma;
    Tensor sdS = make_tensor(make_smem_ptr(smem_.ds[0]), typename Config::LayoutDs{});
    Tensor sKt = make_tensor(make_smem_ptr(smem_.k), typename Config::LayoutKt{});
    Tensor tdQrdS = mma.get_slice(0).partition_fragment_A(sdS);
    Tensor tdQrdQ = partition_fragment_C(mma, Shape<typename Config::TileM, typename Config::DqColumns>{});
    smem_.pipeline_ds.wait(state);
    CUTLASS_PRAGMA_UNROLL
    for (int slice = 0; slice < Config::kDqSlices; ++slice) {
      Tensor tdQrK = mma.get_slice(0).partition_fragment_B(
          local_tile(sKt, Shape<typename Config::DqColumns, typename Config::TileN>{},
                     make_coord(warpgroup_idx_ * Config::kDqSlices + slice, _0{})));
      gemm(mma, tdQrdS(_, _, _, state.stage), not_hoisted(tdQrK), tdQrdQ, /*accumulate=*/false);
      warpgroup_wait<0>();
      if (slice == 0) {
        after_wait();
      }
      if (slice == Config::kDqSlices - 1) {
        smem_.pipeline_ds.release(state);
      }
      auto& pipeline_dq = smem_.pipeline_dq[warpgroup_idx_];
      pipeline_dq.empty.wait(phase_);
      phase_ ^= 1;
      store_dq_to_smem(tdQrdQ, smem_.dq[warpgroup_idx_]);
      cutlass::arch::fence_view_async_shared();  // dQ is written, then read by TMA
      __syncwarp();
      if (cutlass::canonical_lane_idx() == 0) {
        pipeline_dq.full[writer_].arrive();
      }
      if (slice == 0) {
        after_slice();
      }
    }
    writer_ = writer_ + 1 == Config::kDqWriters ? 0 : writer_ + 1;
  }

 private:
  SharedStorage& smem_;
  int const warpgroup_idx_;
  uint32_t phase_ = 1;  // the buffer is empty at first
  int writer_ = 0;      // of the step
};

CUTLASS_DEVICE int first_row_of_warp() { return threadIdx.x % cutlass::NumThreadsPerWarpGroup / 32 * kRowsPerWarp; }

template <class Config>
CUTLASS_DEVICE auto warp_rows(typename Config::SharedStorage& smem, int stage) {
  return smem.ds[stage] + first_row_of_warp() * Config::kTileM;
}
template <class Config>
CUTLASS_DEVICE auto residual_rows(typename Config::SharedStorage& smem, int stage) {
  if constexpr (Config::kSendResidual) {
    return smem.p_residual[stage] + first_row_of_warp() * Config::kTileM;
  } else {
    return nullptr;
  }
}

// Waits until the other warpgroup has come here too: both have read K and V for the last time.
template <class Config>
CUTLASS_DEVICE void meet_other_warpgroup(int warpgroup_idx) {
  cutlass::arch::NamedBarrier::arrive(Config::kConsumerThreads, kWarpgroup + 1 - warpgroup_idx);
  cutlass::arch::NamedBarrier::sync(Config::kConsumerThreads, kWarpgroup + warpgroup_idx);
}

// Stores dV or dK of the tile through the shared memory at `place`, that of V or K.
template <class Config, int kSlabColumns, class Accumulator>
CUTLASS_DEVICE void store_split_gradient(KernelParams const& params, CUtensorMap const& map,
                                         Accumulator const& gradient, typename Config::Element* place,
                                         Tile const& tile) {
  auto const slab_rows = [&](int slab) CUTLASS_LAMBDA_FUNC_INLINE {
    return place + (slab * Config::kTileN + first_row_of_warp()) * kSlabColumns;
  };
  store_gradient<Config, kSlabColumns>(params, map, gradient, slab_rows, first_row_of_warp(), tile);
  cute::tma_store_wait<0>();
}

// Warpgroup 0: S, P and dV. dQ is computed one step late, when its dS is certainly there.
template <class Config>
CUTLASS_DEVICE void consume_dv(KernelParams const& params, typename Config::SharedStorage& smem) {
  using namespace cute;
  using Element = typename Config::Element;
  typename Config::MmaS mma_s;
  typename Config::MmaDv mma_dv;
  Tensor sK = make_tensor(make_smem_ptr(smem.k), typename Config::LayoutK{});     // (kTileN, kHeadDim)
  Tensor sQ = make_tensor(make_smem_ptr(smem.q[0]), typename Config::LayoutQ{});  // (kTileM, kHeadDim, stages)
  Tensor sdOt =
      make_tensor(make_smem_ptr(smem.dout[0]), typename Config::LayoutDoutt{});  // (kHeadDimV, kTileM, stages)
  Tensor tSrK = mma_s.get_slice(0).partition_fragment_A(sK);
  Tensor tSrQ = mma_s.get_slice(0).partition_fragment_B(sQ);
  Tensor tdVrdO = mma_dv.get_slice(0).partition_fragment_B(sdOt);
  Tensor tSrS = partition_fragment_C(mma_s, Shape<_64, typename Config::TileM>{});
  Tensor tdVrdV = partition_fragment_C(mma_dv, Shape<_64, typename Config::HeadDimV>{});
  Tensor tdVrP = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<Config::kTileM / 16>>{});
  SplitDq<Config> dq(smem, 0);

  PipelineState<1> kv_state;
  PipelineState<Config::kStagesQ> q_state;
  PipelineState<Config::kStagesDout> dout_state;
  PipelineState<Config::kStagesDs> ds_state;
  auto const issue_s = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    smem.pipeline_q.wait(q_state);
    gemm(mma_s, not_hoisted(tSrK), tSrQ(_, _, _, q_state.stage), tSrS, /*accumulate=*/false);
  };
  auto const release_dout = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    smem.pipeline_dout.release(dout_state);
    dout_state.advance();
  };

  auto const nothing = []() CUTLASS_LAMBDA_FUNC_INLINE {};

  StaticScheduler scheduler(params.scheduler, blockIdx.x);
  Tile tile;
  while (scheduler.next(tile)) {
    QueryTileIterator<Config> steps(params, tile);
    KeyMask<Config> const mask(params, tile.batch_idx, tile.block * Config::kTileN);

    // P of the step whose S has arrived, sent to the other warpgroup, and its dV.
    auto const compute_p = [&](auto is_first) CUTLASS_LAMBDA_FUNC_INLINE {
      mask.apply(tSrS, steps.m_block);
      exponentials(tSrS, QueryVector<Config::kTileM>(smem.lse_log2[q_state.stage]), params.scores.softmax_scale_log2);
      __syncwarp();
      smem.pipeline_q.release(q_state);
      q_state.advance();
      steps.advance();
      smem.pipeline_ds.empty[ds_state.stage].wait(ds_state.phase ^ 1);
      send_probabilities<Config::kSendResidual>(tSrS, warp_rows<Config>(smem, ds_state.stage),
                                                residual_rows<Config>(smem, ds_state.stage));
      __syncwarp();
      if (cutlass::canonical_lane_idx() == 0) {
        smem.p_full[ds_state.stage].arrive();
      }
      ds_state.advance();
      convert(tSrS, tdVrP);
      smem.pipeline_dout.wait(dout_state);
      gemm(mma_dv, tdVrP, tdVrdO(_, _, _, dout_state.stage), tdVrdV, /*accumulate=*/!is_first);
    };

    if (steps.done()) {  // no query sees a key of the tile
      clear(tdVrdV);
      smem.pipeline_v.wait(kv_state);
    } else {
      smem.pipeline_k.wait(kv_state);
      issue_s();
      warpgroup_wait<0>();
      compute_p(cute::true_type{});
      bool const several_steps = !steps.done();
      if (several_steps) {
        issue_s();
        warpgroup_wait<0>();
        release_dout();
        compute_p(cute::false_type{});
        while (!steps.done()) {
          issue_s();
          dq.compute(ds_state.previous().previous(), release_dout, nothing);
          compute_p(cute::false_type{});
        }
      }
      warpgroup_wait<0>();
      release_dout();
      if (several_steps) {
        dq.compute(ds_state.previous().previous(), nothing, nothing);
      }
      dq.compute(ds_state.previous(), nothing, nothing);
    }

    meet_other_warpgroup<Config>(0);
    store_split_gradient<Config, Config::kSlabColumnsV>(params, params.dv, tdVrdV, smem.v, tile);
    smem.pipeline_k.release(kv_state);
    smem.pipeline_v.release(kv_state);
    kv_state.advance();
  }
}

// Warpgroup 1: dP, dS and dK.
template <class Config>
CUTLASS_DEVICE void consume_dk(KernelParams const& params, typename Config::SharedStorage& smem) {
  using namespace cute;
  using Element = typename Config::Element;
  typename Config::MmaDpShared mma_dp;
  typename Config::MmaDk mma_dk;
  Tensor sV = make_tensor(make_smem_ptr(smem.v), typename Config::LayoutV{});            // (kTileN, kHeadDim)
  Tensor sdO = make_tensor(make_smem_ptr(smem.dout[0]), typename Config::LayoutDout{});  // (kTileM, kHeadDim, stages)
  Tensor sQt = make_tensor(make_smem_ptr(smem.q[0]), typename Config::LayoutQt{});       // (kHeadDim, kTileM, stages)
  Tensor tdPrV = mma_dp.get_slice(0).partition_fragment_A(sV);
  Tensor tdPrdO = mma_dp.get_slice(0).partition_fragment_B(sdO);
  Tensor tdKrQ = mma_dk.get_slice(0).partition_fragment_B(sQt);
  Tensor tdPrdP = partition_fragment_C(mma_dp, Shape<_64, typename Config::TileM>{});
  Tensor tdKrdK = partition_fragment_C(mma_dk, Shape<_64, typename Config::HeadDim>{});
  Tensor tdKrdS = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<Config::kTileM / 16>>{});
  SplitDq<Config> dq(smem, 1);

  PipelineState<1> kv_state;
  PipelineState<Config::kStagesQ> q_state;
  PipelineState<Config::kStagesDout> dout_state;
  PipelineState<Config::kStagesDs> ds_state;
  auto const issue_dp = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    smem.pipeline_dout.wait(dout_state);
    gemm(mma_dp, not_hoisted(tdPrV), tdPrdO(_, _, _, dout_state.stage), tdPrdP, /*accumulate=*/false);
  };
  auto const release_q = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
    smem.pipeline_q.release(q_state);
    q_state.advance();
  };

  auto const nothing = []() CUTLASS_LAMBDA_FUNC_INLINE {};

  StaticScheduler scheduler(params.scheduler, blockIdx.x);
  Tile tile;
  while (scheduler.next(tile)) {
    QueryTileIterator<Config> steps(params, tile);

    // dS of the step whose dP has arrived: P is received, and dS takes its place.
    auto const compute_ds = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
      Element* rows = warp_rows<Config>(smem, ds_state.stage);
      Tensor rP = make_fragment_like(tdPrdP);
      smem.p_full[ds_state.stage].wait(ds_state.phase);
      receive_probabilities<Config::kSendResidual>(rP, rows, residual_rows<Config>(smem, ds_state.stage));
      score_gradients(rP, tdPrdP, QueryVector<Config::kTileM>(smem.dsum[dout_state.stage]));
      convert(rP, tdKrdS);
      __syncwarp();  // the warp has read its P, and D
      smem.pipeline_dout.release(dout_state);
      dout_state.advance();
      store_rows_to_smem<Config::kTileM>(reinterpret_cast<uint32_t const*>(tdKrdS.data()), rows);
      cutlass::arch::fence_view_async_shared();  // dS is written, then read by WGMMA
      __syncwarp();
      if (cutlass::canonical_lane_idx() == 0) {
        smem.pipeline_ds.full[ds_state.stage].arrive();
      }
      ds_state.advance();
      steps.advance();
    };
    auto const issue_dk = [&](bool accumulate) CUTLASS_LAMBDA_FUNC_INLINE {
      smem.pipeline_q.wait(q_state);
      gemm(mma_dk, tdKrdS, tdKrQ(_, _, _, q_state.stage), tdKrdK, accumulate);
    };

    if (steps.done()) {
      clear(tdKrdK);
      smem.pipeline_k.wait(kv_state);
    } else {
      smem.pipeline_v.wait(kv_state);
      issue_dp();
      warpgroup_wait<0>();
      compute_ds();
      smem.pipeline_k.wait(kv_state);
      bool accumulate = false;
      while (!steps.done()) {
        issue_dk(accumulate);
        accumulate = true;
        // dO of the next step can only arrive once dV of this one is done, which is now or later.
        dq.compute(ds_state.previous(), release_q, issue_dp);
        compute_ds();
      }
      issue_dk(accumulate);
      dq.compute(ds_state.previous(), release_q, nothing);
    }

    meet_other_warpgroup<Config>(1);
    scale_gradient(tdKrdK, params.scores.softmax_scale);
    store_split_gradient<Config, Config::kSlabColumnsK>(params, params.dk, tdKrdK, smem.k, tile);
    smem.pipeline_k.release(kv_state);
    smem.pipeline_v.release(kv_state);
    kv_state.advance();
  }
}

}  // namespace fa3::bwd
