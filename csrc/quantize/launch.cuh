// Host side of the quantizer: tensor maps, grids and launches on the caller's stream.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include "check.h"
#include "quantize/column_sums.cuh"
#include "quantize/kernel.cuh"

namespace fa3::quantize {

// A box is a warp's rows, or of a transposed x8 a warp's lines.
template <class Config>
QuantizeKernelParams make_kernel_params(QuantizeParams const& params, int num_blocks) {
  using Element = typename Config::Element;
  using E4m3 = cutlass::float_e4m3_t;
  QuantizeKernelParams kernel_params{params};
  kernel_params.x_map =
      make_tensor_map<Element, 64>(params.x, params.head_dim, params.num_heads,
                                   dense_rows<Element>(params.x, params.seqlen, params.batch), Config::kRowsPerWarp);
  if (params.rotary.dim > 0 && params.rotary.is_float) {
    int const half = params.rotary.dim / 2;
    auto const table_map = [&](void const* data) {
      TensorArg const table{.data = const_cast<void*>(data), .row_stride = half};
      return make_tensor_map<float, 32>(table, half, 1, dense_rows<float>(table, params.seqlen, 1),
                                        Config::kRowsPerWarp);
    };
    kernel_params.cos_map = table_map(params.rotary.cos);
    kernel_params.sin_map = table_map(params.rotary.sin);
  }
  if (params.transpose) {  // columns of x8 are rows of the map
    kernel_params.x8_map = make_tensor_map<E4m3, kFp8ScaleRows>(
        params.x8, num_blocks * kFp8ScaleRows, params.num_heads,
        dense_rows<E4m3>(params.x8, params.columns, params.batch), kTransposedChannels);
  } else {
    kernel_params.x8_map = make_tensor_map<E4m3, Config::kX8SlabColumns>(
        params.x8, params.columns, params.num_heads, dense_rows<E4m3>(params.x8, params.seqlen, params.batch),
        Config::kRowsPerWarp);
  }
  return kernel_params;
}

template <class Config>
void launch(QuantizeParams const& params, cudaStream_t stream) {
  int const num_blocks = (params.seqlen + kFp8ScaleRows - 1) / kFp8ScaleRows;
  int64_t const num_batch_heads = int64_t(params.batch) * params.num_heads;
  int64_t const num_tiles = num_batch_heads * num_blocks;
  FA3_CHECK(num_tiles < (int64_t{1} << 31) && num_batch_heads < (int64_t{1} << 28),
            "batch x num_heads must be below 2^28 and, times ceil(seqlen / " + std::to_string(kFp8ScaleRows) +
                "), below 2^31, got " + std::to_string(num_batch_heads) + " x " + std::to_string(num_blocks));
  TileOrder const order{
      .num_tiles = static_cast<int>(num_tiles),
      .num_blocks = num_blocks,
      .batch_heads = cutlass::FastDivmod(static_cast<int>(num_batch_heads)),
      .heads = cutlass::FastDivmod(params.num_heads),
  };
  QuantizeKernelParams const kernel_params = make_kernel_params<Config>(params, num_blocks);
  auto const launch_kernel = [&](auto* kernel, auto... arguments) {
    constexpr int kSmemBytes = sizeof(typename Config::Smem);
    FA3_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes));
    unsigned const num_ctas = static_cast<unsigned>(
        std::min<int64_t>((num_tiles + Config::kNumTiles - 1) / Config::kNumTiles, params.num_sms));
    kernel<<<num_ctas, Config::kNumThreads, kSmemBytes, stream>>>(kernel_params, order, arguments...);
    FA3_CHECK_CUDA(cudaGetLastError());
  };

  if (params.mean != nullptr) {
    launch_kernel(column_sums_kernel<Config>);
    unsigned const slices = (params.head_dim + 31) / 32;
    mean_kernel<<<static_cast<unsigned>(num_batch_heads) * slices, kMeanWarps * 32, 0, stream>>>(
        params.column_sums, params.mean, num_blocks, params.head_dim, params.seqlen);
    FA3_CHECK_CUDA(cudaGetLastError());
  }
  auto* quantize = quantize_fp8_kernel<Config>;
  float const norm = params.signs == nullptr ? 1.f : 1.f / (kSign * std::sqrt(static_cast<float>(Config::kWidth)));
  if (params.amax == nullptr) {
    launch_kernel(quantize, Pass::kBlockScales, norm);
  } else {
    FA3_CHECK_CUDA(cudaMemsetAsync(params.amax, 0, num_batch_heads * sizeof(float), stream));
    launch_kernel(quantize, Pass::kHeadAmax, norm);
    launch_kernel(quantize, Pass::kHeadScales, norm);
  }
}

template <class Element>
void launch_by_width(QuantizeParams const& params, cudaStream_t stream) {
  switch (params.width) {
    case 64:
      return launch<QuantizeConfig<Element, 64>>(params, stream);
    case 128:
      return launch<QuantizeConfig<Element, 128>>(params, stream);
    case 256:
      return launch<QuantizeConfig<Element, 256>>(params, stream);
    default:
      FA3_CHECK(false, "the width of the quantizer must be 64, 128 or 256, got " + std::to_string(params.width));
  }
}

}  // namespace fa3::quantize
