// Host side of the forward: tensor maps, grid, launch on the caller's stream.
#pragma once

#include <algorithm>

#include "fwd/kernel.cuh"
#include "fwd/kernels.h"

namespace fa3 {

// K and V of the heads that run together should stay in the L2 (50 MB on H100, 60 MB on H200).
constexpr int64_t kL2BudgetBytes = 32 << 20;

// A transposed V is (batch, num_heads_kv, head_dim, keys), whose rows are channels.
template <class Config>
CUtensorMap v_tensor_map(FwdParams const& params) {
  using Element = typename Config::Element;
  if constexpr (Config::kVTransposed) {
    int const num_keys = (params.seqlen_k + Config::kTileN - 1) / Config::kTileN * Config::kTileN;
    return make_tensor_map<Element, Config::kTileN>(params.v, num_keys, params.head_dim, params.num_heads_kv,
                                                    params.batch, Config::kHeadDim);
  } else {
    return make_tensor_map<Element, Config::kSlabColumns>(params.v, params.head_dim, params.seqlen_k,
                                                          params.num_heads_kv, params.batch, Config::kTileN);
  }
}

template <class Config>
void launch_fwd(FwdParams const& params, cudaStream_t stream) {
  using Element = typename Config::Element;
  int const num_m_blocks = (params.seqlen_q + Config::kTileM - 1) / Config::kTileM;
  int const group_size = params.num_heads_q / params.num_heads_kv;
  int64_t const num_head_batches = int64_t(params.num_heads_q) * params.batch;
  FA3_CHECK(num_head_batches < (int64_t{1} << 30) / num_m_blocks,
            "batch x num_heads_q x ceil(seqlen_q / " + std::to_string(Config::kTileM) + ") must be below 2^30, got " +
                std::to_string(num_head_batches) + " x " + std::to_string(num_m_blocks));
  int64_t const kv_bytes = int64_t(params.seqlen_k) * Config::kHeadDim * 2 * sizeof(Element);
  int64_t const l2_heads = std::max<int64_t>(kL2BudgetBytes / kv_bytes, 1) * group_size;

  FwdKernelParams const common_params{
      .q = make_tensor_map<Element, Config::kSlabColumns>(params.q, params.head_dim, params.seqlen_q,
                                                          params.num_heads_q, params.batch, kRowsPerWarpgroup),
      .k = make_tensor_map<Element, Config::kSlabColumns>(params.k, params.head_dim, params.seqlen_k,
                                                          params.num_heads_kv, params.batch, Config::kTileN),
      .v = v_tensor_map<Config>(params),
      .out = make_tensor_map<typename Config::OutElement, Config::kOutSlabColumns>(
          params.out, params.head_dim, params.seqlen_q, params.num_heads_q, params.batch, kRowsPerWarp),
      .lse = params.lse,
      .seqlen_q = params.seqlen_q,
      .seqlen_k = params.seqlen_k,
      .num_heads_q = params.num_heads_q,
      .group_size = group_size,
      .softmax_scale = params.softmax_scale,
      .softmax_scale_log2 = softmax_scale_log2(params.softmax_scale),
      .causal = params.causal,
      .scheduler = make_tile_scheduler(num_m_blocks, params.num_heads_q, params.batch, params.num_sms,
                                       // causal: the last blocks see the most keys
                                       params.causal ? TileOrder::kDescending : TileOrder::kEqual,
                                       params.causal ? static_cast<int>(std::min(l2_heads, num_head_batches)) : 1),
  };
  typename Config::Params const kernel_params = [&] {
    if constexpr (Config::kFp8) {
      return FwdFp8KernelParams{common_params,   params.q_scales,       params.k_scales,
                                params.v_scales, params.q_scales_group, params.out_fp16};
    } else {
      return common_params;
    }
  }();
  auto* kernel = fwd_kernel<Config>;
  FA3_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSmemBytes));
  kernel<<<kernel_params.scheduler.num_ctas, Config::kNumThreads, Config::kSmemBytes, stream>>>(kernel_params);
  FA3_CHECK_CUDA(cudaGetLastError());
}

// The row of the kernel table for a config.
template <class Config>
FwdKernel fwd_kernel_row(char const* name, Dtype dtype, int max_seqlen_k_full, int max_seqlen_k_causal) {
  return {
      .info =
          {
              .name = name,
              .dtype = dtype,
              .head_dim = Config::kHeadDim,
              .tile_m = Config::kTileM,
              .tile_n = Config::kTileN,
              .stages = Config::kStagesK,
              .consumer_warpgroups = Config::kConsumerWarpgroups,
              .smem_bytes = Config::kSmemBytes,
          },
      .v_transposed = Config::kVTransposed,
      .max_seqlen_k_full = max_seqlen_k_full,
      .max_seqlen_k_causal = max_seqlen_k_causal,
      .launch = launch_fwd<Config>,
  };
}

template <class Element, int kHeadDim, FwdTile kTile>
FwdKernel fwd_kernel_row(char const* name) {
  return fwd_kernel_row<FwdConfig<Element, kHeadDim, kTile>>(
      name, std::is_same_v<Element, cutlass::half_t> ? Dtype::kFloat16 : Dtype::kBFloat16, kTile.max_seqlen_k_full,
      kTile.max_seqlen_k_causal);
}

template <int kHeadDim, FwdFp8Tile kTile>
FwdKernel fwd_fp8_kernel_row(char const* name) {
  constexpr int kUnlimited = std::numeric_limits<int>::max();
  return fwd_kernel_row<FwdFp8Config<kHeadDim, kTile>>(name, Dtype::kFloat8E4M3, kUnlimited, kUnlimited);
}

}  // namespace fa3
