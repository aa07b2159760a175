// Host side of the quantiser: the launches on the caller's stream.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include "check.h"
#include "quantize/column_sums.cuh"
#include "quantize/kernel.cuh"

namespace fa3 {

// Boxes are a warp's rows.
template <class Config>
QuantizeKernelParams with_tensor_maps(QuantizeParams const& params, int num_blocks) {
  using Element = typename Config::Element;
  QuantizeKernelParams kernel_params{params};
  kernel_params.x_map = make_tensor_map<Element, 64>(params.x, params.head_dim, params.seqlen, params.num_heads,
                                                     params.batch, Config::kRowsPerWarp);
  if (params.rotary.dim > 0 && params.rotary.is_float) {
    int const half = params.rotary.dim / 2;
    auto const table_map = [&](void const* table) {
      return make_tensor_map<float, 32>({.data = const_cast<void*>(table), .row_stride = half}, half, params.seqlen, 1,
                                        1, Config::kRowsPerWarp);
    };
    kernel_params.cos_map = table_map(params.rotary.cos);
    kernel_params.sin_map = table_map(params.rotary.sin);
  }
  using E4m3 = cutlass::float_e4m3_t;
  if (params.transpose) {
    kernel_params.x8_map = make_tensor_map<E4m3, kQuantizeBlock>(params.x8, num_blocks * kQuantizeBlock, params.columns,
                                                                 params.num_heads, params.batch, kTransposedChannels);
  } else {
    kernel_params.x8_map = make_tensor_map<E4m3, Config::kX8SlabColumns>(
        params.x8, params.columns, params.seqlen, params.num_heads, params.batch, Config::kRowsPerWarp);
  }
  return kernel_params;
}

template <class Config>
void launch_quantize(QuantizeParams const& params, cudaStream_t stream) {
  int const num_blocks = (params.seqlen + kQuantizeBlock - 1) / kQuantizeBlock;
  int64_t const num_head_batches = int64_t(params.batch) * params.num_heads;
  int64_t const num_tiles = num_head_batches * num_blocks;
  FA3_CHECK(num_tiles < (int64_t{1} << 31) && num_head_batches < (int64_t{1} << 28),
            "batch x num_heads must be below 2^28 and, times ceil(seqlen / " + std::to_string(kQuantizeBlock) +
                "), below 2^31, got " + std::to_string(num_head_batches) + " x " + std::to_string(num_blocks));
  HeadBlocks const head_blocks{
      .num_tiles = static_cast<int>(num_tiles),
      .num_blocks = num_blocks,
      .head_batches = cutlass::FastDivmod(static_cast<int>(num_head_batches)),
      .heads = cutlass::FastDivmod(params.num_heads),
  };
  QuantizeKernelParams const kernel_params = with_tensor_maps<Config>(params, num_blocks);
  auto const launch = [&](auto* kernel, auto... arguments) {
    constexpr int kSmemBytes = sizeof(typename Config::Smem);
    FA3_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes));
    unsigned const num_ctas = static_cast<unsigned>(
        std::min<int64_t>((num_tiles + Config::kNumTiles - 1) / Config::kNumTiles, params.num_sms));
    kernel<<<num_ctas, Config::kNumThreads, kSmemBytes, stream>>>(kernel_params, head_blocks, arguments...);
    FA3_CHECK_CUDA(cudaGetLastError());
  };

  if (params.mean != nullptr) {
    launch(column_sums_kernel<Config>);
    unsigned const slices = (params.head_dim + 31) / 32;
    mean_kernel<<<static_cast<unsigned>(num_head_batches) * slices, kMeanWarps * 32, 0, stream>>>(
        params.column_sums, params.mean, num_blocks, params.head_dim, params.seqlen);
    FA3_CHECK_CUDA(cudaGetLastError());
  }
  auto* quantize = quantize_fp8_kernel<Config>;
  float const norm = params.signs == nullptr ? 1.f : 1.f / (kSign * std::sqrt(static_cast<float>(Config::kWidth)));
  if (params.amax == nullptr) {
    launch(quantize, QuantizeStep::kBlocks, norm);
  } else {
    FA3_CHECK_CUDA(cudaMemsetAsync(params.amax, 0, num_head_batches * sizeof(float), stream));
    launch(quantize, QuantizeStep::kHeadAmax, norm);
    launch(quantize, QuantizeStep::kHead, norm);
  }
}

template <class Element>
void launch_quantize_of_width(QuantizeParams const& params, cudaStream_t stream) {
  switch (params.width) {
    case 64:
      return launch_quantize<QuantizeConfig<Element, 64>>(params, stream);
    case 128:
      return launch_quantize<QuantizeConfig<Element, 128>>(params, stream);
    case 256:
      return launch_quantize<QuantizeConfig<Element, 256>>(params, stream);
    default:
      FA3_CHECK(false, "the width of the quantiser must be 64, 128 or 256, got " + std::to_string(params.width));
  }
}

}  // namespace fa3
