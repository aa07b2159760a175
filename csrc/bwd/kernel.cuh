// Backward: dQ, dK and dV of attention (FlashAttention-3, arXiv 2407.08608, algorithm 3). Read this file first.
//
//   warpgroup 0, warp 0        producer: issues all TMA loads (bwd/producer.cuh)
//   warpgroup 0, warps 1 to 3  dq_writer: take the steps in turn (bwd/dq_writer.cuh)
//   warpgroups 1, 2            consumers: all GEMMs and what lies between them (bwd/pointwise.cuh, bwd/epilogue.cuh)
//                              head_dim up to 128: bwd/consumer.cuh; above: bwd/consumer_wide.cuh
//
// before it, bwd/preprocess.cuh: D, lse in base 2, dQ accumulator cleared; after it, bwd/postprocess.cuh: dQ.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "bwd/config.h"
#include "bwd/consumer.cuh"
#include "bwd/consumer_wide.cuh"
#include "bwd/dq_writer.cuh"
#include "bwd/producer.cuh"
#include "common/dependent_launch.cuh"

namespace fa3 {

template <class Config>
__global__ void __launch_bounds__(Config::kNumThreads, 1) bwd_kernel(__grid_constant__ BwdKernelParams const params) {
  extern __shared__ __align__(1024) char dynamic_smem[];
  auto& smem = *reinterpret_cast<typename Config::SharedStorage*>(dynamic_smem);

  if (threadIdx.x == 0) {
    smem.pipeline_k.init(Config::kConsumerWarps);
    smem.pipeline_v.init(Config::kConsumerWarps);
    smem.pipeline_q.init(Config::kConsumerWarps);
    smem.pipeline_dout.init(Config::kConsumerWarps);
    // With wide heads one of the two warpgroups writes dS.
    smem.pipeline_ds.init(Config::kConsumerWarps, Config::kConsumerWarps / (Config::kWide ? 2 : 1));
    for (auto& p_full : smem.p_full) {
      p_full.init(cutlass::NumWarpsPerWarpGroup);
    }
    for (auto& staged : smem.dq_staged) {
      staged.init(cutlass::NumWarpsPerWarpGroup);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();

  let_next_kernel_begin();
  int const warpgroup_idx = cutlass::canonical_warp_group_idx();
  if (warpgroup_idx == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    int const warp_idx = cutlass::canonical_warp_idx_sync();
    if (warp_idx == 0 && cute::elect_one_sync()) {
      wait_for_kernel_before();
      produce<Config>(params, smem);
    } else if (1 <= warp_idx && warp_idx <= Config::kDqWriters && cute::elect_one_sync()) {
      wait_for_kernel_before();
      write_dq<Config>(params, smem, warp_idx - 1);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    if constexpr (!Config::kWide) {
      consume<Config>(params, smem, warpgroup_idx - 1);
    } else if (warpgroup_idx == 1) {
      consume_dv<Config>(params, smem);
    } else {
      consume_dk<Config>(params, smem);
    }
  }
}

}  // namespace fa3
