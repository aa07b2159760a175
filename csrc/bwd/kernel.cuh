// Backward: dQ, dK and dV of attention (FlashAttention-3, arXiv 2407.08608, algorithm 3). Read this file first.
//
//   warpgroup 0, warp 0        producer: issues all TMA loads (producer.cuh)
//   warpgroup 0, warps 1 to 3  dq_writer: take the steps in rotation (dq_writer.cuh)
//   warpgroups 1, 2            consumers: all GEMMs and what lies between them (pointwise.cuh, epilogue.cuh)
//                              head_dim up to 128: consumer.cuh; above: consumer_split.cuh
//
// Before it runs preprocess.cuh: D, lse in base 2, dQ accumulator cleared; after it postprocess.cuh: dQ.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "bwd/config.h"
#include "bwd/consumer.cuh"
#include "bwd/consumer_split.cuh"
#include "bwd/dq_writer.cuh"
#include "bwd/producer.cuh"
#include "common/grid_dependency.cuh"

namespace fa3::bwd {

enum class Role { kProducer, kDqWriter, kConsumer };

template <class Config>
CUTLASS_DEVICE void init_barriers(typename Config::SharedStorage& smem) {
  smem.pipeline_k.init(Config::kConsumerWarps);
  smem.pipeline_v.init(Config::kConsumerWarps);
  smem.pipeline_q.init(Config::kConsumerWarps);
  smem.pipeline_dout.init(Config::kConsumerWarps);
  // consumer_split.cuh: one of the two warpgroups writes dS.
  smem.pipeline_ds.init(Config::kConsumerWarps, Config::kConsumerWarps / (Config::kSplitRoles ? 2 : 1));
  for (auto& p_full : smem.p_full) {
    p_full.init(cutlass::NumWarpsPerWarpGroup);
  }
  for (auto& pipeline_dq : smem.pipeline_dq) {
    pipeline_dq.init(cutlass::NumWarpsPerWarpGroup);
  }
  cutlass::arch::fence_barrier_init();
}

template <class Config>
__global__ void __launch_bounds__(Config::kNumThreads, 1) bwd_kernel(__grid_constant__ KernelParams const params) {
  extern __shared__ __align__(1024) char dynamic_smem[];
  auto& smem = *reinterpret_cast<typename Config::SharedStorage*>(dynamic_smem);

  if (threadIdx.x == 0) {
    init_barriers<Config>(smem);
  }
  __syncthreads();

  grid_dependency_launch_dependents();
  int const warpgroup_idx = cutlass::canonical_warp_group_idx();
  int const warp_idx = cutlass::canonical_warp_idx_sync();
  Role const role = warpgroup_idx > 0 ? Role::kConsumer : warp_idx == 0 ? Role::kProducer : Role::kDqWriter;
  if (role == Role::kConsumer) {
    cutlass::arch::warpgroup_reg_alloc<Config::Registers::kConsumer>();
    if constexpr (!Config::kSplitRoles) {
      consume<Config>(params, smem, warpgroup_idx - 1);
    } else if (warpgroup_idx == 1) {
      consume_dv<Config>(params, smem);
    } else {
      consume_dk<Config>(params, smem);
    }
  } else {
    cutlass::arch::warpgroup_reg_dealloc<Config::Registers::kProducer>();
    if (cute::elect_one_sync()) {
      grid_dependency_wait();
      if (role == Role::kProducer) {
        produce<Config>(params, smem);
      } else {
        write_dq<Config>(params, smem, warp_idx - 1);
      }
    }
  }
}

}  // namespace fa3::bwd
