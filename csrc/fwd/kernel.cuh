// Forward: out = softmax(Q K^T * softmax_scale) V and lse (FlashAttention-3, arXiv 2407.08608). Read this file first.
//
//   warpgroup 0        producer: one warp issues all TMA loads (fwd/producer.cuh)
//                      FP8: the other three transpose V, unless it comes so (fwd/transpose_v.cuh)
//   warpgroups 1..     consumers: 64 query rows each (fwd/consumer.cuh, fwd/epilogue.cuh)
//                      FP8: fwd/fp8_consumer.cuh
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "fwd/config.h"
#include "fwd/consumer.cuh"
#include "fwd/fp8_consumer.cuh"
#include "fwd/producer.cuh"
#include "fwd/transpose_v.cuh"

namespace fa3 {

enum class Role { kProducer, kConsumer };

template <class Config>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    fwd_kernel(__grid_constant__ typename Config::Params const params) {
  extern __shared__ __align__(1024) char dynamic_smem[];
  auto& smem = *reinterpret_cast<typename Config::SharedStorage*>(dynamic_smem);

  if (threadIdx.x == 0) {
    for (auto& pipeline_q : smem.pipeline_q) {
      pipeline_q.init(cutlass::NumWarpsPerWarpGroup);
    }
    smem.pipeline_k.init(Config::kConsumerWarps);
    smem.pipeline_v.init(Config::kVReaderWarps);
    if constexpr (Config::kFp8 && !Config::kVTransposed) {
      smem.pipeline_vt.init(Config::kConsumerWarps, Config::kTransposerWarps);
    }
    cutlass::arch::fence_barrier_init();
  }
  if constexpr (Config::kFp8) {
    write_ones<Config>(smem);
  }
  __syncthreads();

  int const warpgroup_idx = cutlass::canonical_warp_group_idx();
  Role const role = warpgroup_idx == 0 ? Role::kProducer : Role::kConsumer;
  if (role == Role::kProducer) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    int const warp_idx = cutlass::canonical_warp_idx_sync();
    if (warp_idx == 0 && cute::elect_one_sync()) {
      produce<Config>(params, smem);
    }
    if constexpr (Config::kFp8 && !Config::kVTransposed) {
      // Code of its own for each warp, whose offsets are constants in it.
      cute::for_each(cute::make_int_sequence<Config::kTransposerWarps>{}, [&](auto transposer) {
        if (warp_idx == transposer + 1) {
          transpose_v<Config, transposer>(params, smem);
        }
      });
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    if constexpr (Config::kFp8) {
      consume_fp8<Config>(params, smem, warpgroup_idx - 1);
    } else {
      consume<Config>(params, smem, warpgroup_idx - 1);
    }
  }
}

}  // namespace fa3
