// Forward: out = softmax(Q K^T * softmax_scale) V and lse (FlashAttention-3, arXiv 2407.08608). Read this file first.
//
//   warpgroup 0        producer: one warp issues all TMA loads (producer.cuh)
//                      converter: FP8, the other three warps transpose V in shared memory (converter.cuh), unless the
//                      quantizer has written it transposed
//   warpgroups 1..     consumers: 64 query rows each (consumer.cuh); the main loop is in schedule_overlapped.cuh, for
//                      FP8 at head_dim 128 and 256 in schedule_serial.cuh
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "fwd/config.h"
#include "fwd/converter.cuh"
#include "fwd/producer.cuh"
#include "fwd/schedule_overlapped.cuh"
#include "fwd/schedule_serial.cuh"

namespace fa3::fwd {

enum class Role { kProducer, kConverter, kConsumer };

template <class Config>
CUTLASS_DEVICE void init_barriers(typename Config::SharedStorage& smem) {
  for (auto& pipeline_q : smem.pipeline_q) {
    pipeline_q.init(cutlass::NumWarpsPerWarpGroup);
  }
  smem.pipeline_k.init(Config::kConsumerWarps);
  if constexpr (Config::kConvertsV) {
    smem.pipeline_v_rows.init(Config::kConverterWarps);
    smem.pipeline_v.init(Config::kConsumerWarps, Config::kConverterWarps);
  } else {
    smem.pipeline_v.init(Config::kConsumerWarps);
  }
  cutlass::arch::fence_barrier_init();
}

template <class Config>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    fwd_kernel(__grid_constant__ typename Config::Params const params) {
  extern __shared__ __align__(1024) char dynamic_smem[];
  auto& smem = *reinterpret_cast<typename Config::SharedStorage*>(dynamic_smem);

  if (threadIdx.x == 0) {
    init_barriers<Config>(smem);
  }
  if constexpr (Config::kFp8) {
    write_ones<Config>(smem);
  }
  __syncthreads();

  int const warpgroup_idx = cutlass::canonical_warp_group_idx();
  int const warp_idx = cutlass::canonical_warp_idx_sync();
  Role const role = warpgroup_idx > 0 ? Role::kConsumer : warp_idx == 0 ? Role::kProducer : Role::kConverter;
  if (role == Role::kConsumer) {
    cutlass::arch::warpgroup_reg_alloc<Config::Registers::kConsumer>();
    if constexpr (Config::kSchedule == Schedule::kOverlapped) {
      OverlappedSchedule<Config>(params, smem, warpgroup_idx - 1).run();
    } else {
      SerialSchedule<Config>(params, smem, warpgroup_idx - 1).run();
    }
  } else {
    cutlass::arch::warpgroup_reg_dealloc<Config::Registers::kProducer>();
    if (role == Role::kProducer) {
      if (cute::elect_one_sync()) {
        produce<Config>(params, smem);
      }
    } else if constexpr (Config::kConvertsV) {
      convert_v<Config>(params, smem, warp_idx - 1);
    }
  }
}

}  // namespace fa3::fwd
