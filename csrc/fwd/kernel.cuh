// Forward: out = softmax(Q K^T * softmax_scale) V and lse (FlashAttention-3, arXiv 2407.08608). Read this file first.
//
//   warpgroup 0        producer: one warp issues all TMA loads (producer.cuh)
//                      converter: FP8, the other three warps transpose V in shared memory (converter.cuh), unless the
//                      quantizer has written it transposed
//   warpgroups 1..     consumers: 64 query rows each (consumer.cuh); the main loop is in schedule_overlapped.cuh, of
//   FP8
//                      in schedule_fp8.cuh
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "fwd/config.h"
#include "fwd/converter.cuh"
#include "fwd/producer.cuh"
#include "fwd/schedule_fp8_overlapped.cuh"
#include "fwd/schedule_overlapped.cuh"
#include "fwd/schedule_serial.cuh"

namespace fa3::fwd {

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
  if (warpgroup_idx == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::Registers::kProducer>();
    // Computed before the branch, this index costs FP8 consumers a register that they do not have.
    int const warp_idx = cutlass::canonical_warp_idx_sync();
    if (warp_idx == 0 && cute::elect_one_sync()) {
      produce<Config>(params, smem);
    }
    if constexpr (Config::kConvertsV) {
      // Code of its own for each warp, in which offsets are constants.
      cute::for_each(cute::make_int_sequence<Config::kConverterWarps>{}, [&](auto converter_idx) {
        if (warp_idx == converter_idx + 1) {
          convert_v<Config, converter_idx>(params, smem);
        }
      });
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::Registers::kConsumer>();
    if constexpr (Config::kSchedule == Schedule::kSerial) {
      consume_serial<Config>(params, smem, warpgroup_idx - 1);
    } else if constexpr (Config::kFp8) {
      Fp8OverlappedSchedule<Config>(params, smem, warpgroup_idx - 1).run();
    } else {
      OverlappedSchedule<Config>(params, smem, warpgroup_idx - 1).run();
    }
  }
}

}  // namespace fa3::fwd
