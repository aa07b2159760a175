// Host side of the forward: tensor maps, grid, launch on the caller's stream.
#pragma once

#include <algorithm>

#include "fwd/kernel.cuh"
#include "fwd/kernels.h"

namespace fa3::fwd {

// K and V of the heads that run together should stay in the L2 (50 MB on H100, 60 MB on H200).
constexpr int64_t kL2BudgetBytes = 32 << 20;

template <class Config>
CUtensorMap v_tensor_map(FwdParams const& params) {
  using Element = typename Config::Element;
  int const batch = params.seqlen.batch;
  if constexpr (Config::kVLayout == VLayout::kTransposed) {
    // (batch, num_heads_kv, head_dim_v, keys): the rows are channels.
    int const num_keys = (params.seqlen.seqlen_k + Config::kTileN - 1) / Config::kTileN * Config::kTileN;
    return make_tensor_map<Element, Config::kTileN>(params.v, num_keys, params.num_heads_kv,
                                                    dense_rows<Element>(params.v, params.head_dim_v, batch),
                                                    Config::kHeadDimV);
  } else {
    return make_tensor_map<Element, Config::kSlabColumnsV>(params.v, params.head_dim_v, params.num_heads_kv,
                                                           dense_rows<Element>(params.v, params.seqlen.seqlen_k, batch),
                                                           Config::kTileN);
  }
}

template <class Config>
void launch(FwdParams const& params, cudaStream_t stream) {
  using Element = typename Config::Element;
  using OutElement = typename Config::OutElement;
  auto const& [batch, seqlen_q, seqlen_k] = params.seqlen;
  int const num_m_blocks = (seqlen_q + Config::kTileM - 1) / Config::kTileM;
  int const group_size = params.num_heads_q / params.num_heads_kv;
  int64_t const num_batch_heads = int64_t(params.num_heads_q) * batch;
  FA3_CHECK(num_batch_heads < (int64_t{1} << 30) / num_m_blocks,
            "batch x num_heads_q x ceil(seqlen_q / " + std::to_string(Config::kTileM) + ") must be below 2^30, got " +
                std::to_string(num_batch_heads) + " x " + std::to_string(num_m_blocks));
  int64_t const kv_bytes = int64_t(seqlen_k) * (Config::kHeadDim + Config::kHeadDimV) * sizeof(Element);
  int64_t const l2_heads = std::max<int64_t>(kL2BudgetBytes / kv_bytes, 1) * group_size;
  WorkTrend const trend = trend_of_queries(params.mask);
  TileOrder const order = trend == WorkTrend::kEven     ? TileOrder::kEqual
                          : trend == WorkTrend::kRising ? TileOrder::kDescending
                                                        : TileOrder::kAscending;

  KernelParams const common_params{
      .q = make_tensor_map<Element, Config::kSlabColumns>(params.q, params.head_dim, params.num_heads_q,
                                                          dense_rows<Element>(params.q, seqlen_q, batch),
                                                          kRowsPerWarpgroup),
      .k = make_tensor_map<Element, Config::kSlabColumns>(params.k, params.head_dim, params.num_heads_kv,
                                                          dense_rows<Element>(params.k, seqlen_k, batch),
                                                          Config::kTileN),
      .v = v_tensor_map<Config>(params),
      .out = make_tensor_map<OutElement, Config::kSlabColumnsOut>(params.out, params.head_dim_v, params.num_heads_q,
                                                                  dense_rows<OutElement>(params.out, seqlen_q, batch),
                                                                  kRowsPerWarp),
      .lse = params.lse,
      .seqlen = params.seqlen,
      .mask = params.mask,
      .scores = params.scores,
      .num_heads_q = params.num_heads_q,
      .group_size = group_size,
      .scheduler =
          make_tile_scheduler(num_m_blocks, params.num_heads_q, batch, params.num_sms, order,
                              order == TileOrder::kEqual ? 1 : static_cast<int>(std::min(l2_heads, num_batch_heads))),
  };
  typename Config::Params const kernel_params = [&] {
    if constexpr (Config::kFp8) {
      return Fp8KernelParams{common_params, params.fp8, params.mask.window_right == 0};
    } else {
      return common_params;
    }
  }();
  auto* kernel = fwd_kernel<Config>;
  FA3_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSmemBytes));
  kernel<<<kernel_params.scheduler.num_ctas, Config::kNumThreads, Config::kSmemBytes, stream>>>(kernel_params);
  FA3_CHECK_CUDA(cudaGetLastError());
}

template <class Element>
constexpr Dtype dtype_of() {
  return std::is_same_v<Element, cutlass::half_t>       ? Dtype::kFloat16
         : std::is_same_v<Element, cutlass::bfloat16_t> ? Dtype::kBFloat16
                                                        : Dtype::kFloat8E4M3;
}

// The row of the kernel table. Each kernel's source file has one.
template <class Element, class HeadDims, FwdTile kTile>
Kernel kernel_row(char const* name) {
  using KernelConfig = Config<Element, HeadDims, kTile>;
  return {
      .info =
          {
              .name = name,
              .rank = kTile.rank,
              .dtype = dtype_of<Element>(),
              .head_dim = KernelConfig::kHeadDim,
              .head_dim_v = KernelConfig::kHeadDimV,
              .tile_m = KernelConfig::kTileM,
              .tile_n = KernelConfig::kTileN,
              .stages = KernelConfig::kStagesKV,
              .consumer_warpgroups = KernelConfig::kConsumerWarpgroups,
              .smem_bytes = KernelConfig::kSmemBytes,
          },
      .v_layout = kTile.v_layout,
      .max_seqlen_k_full = kTile.max_seqlen_k_full,
      .max_seqlen_k_causal = kTile.max_seqlen_k_causal,
      .launch = launch<KernelConfig>,
  };
}

}  // namespace fa3::fwd
