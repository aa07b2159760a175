// Host side of the backward: tensor maps, grids, and three launches on the caller's stream.
#pragma once

#include <algorithm>

#include "bwd/kernel.cuh"
#include "bwd/kernels.h"
#include "bwd/postprocess.cuh"
#include "bwd/preprocess.cuh"

namespace fa3 {

// Q, dO and the fp32 dQ of the heads that run together should stay in the L2 (50 MB on H100, 60 MB on H200).
constexpr int64_t kBwdL2BudgetBytes = 40 << 20;
// Deterministic: the most n_blocks of a head that begin together, where there are other heads to begin instead.
constexpr int kMostTurns = 8;

template <class Config>
void launch_bwd(BwdParams const& params, cudaStream_t stream) {
  using Element = typename Config::Element;
  int const num_m_blocks = (params.seqlen_q + Config::kTileM - 1) / Config::kTileM;
  int const num_n_blocks = (params.seqlen_k + Config::kTileN - 1) / Config::kTileN;
  int const group_size = params.num_heads_q / params.num_heads_kv;
  int64_t const num_q_tiles = int64_t(num_m_blocks) * params.num_heads_q * params.batch;
  int64_t const num_kv_head_batches = int64_t(params.num_heads_kv) * params.batch;
  FA3_CHECK(num_q_tiles < (int64_t{1} << 30) && num_kv_head_batches * num_n_blocks < (int64_t{1} << 30),
            "batch x num_heads x seqlen / 64 must be below 2^30, got " + std::to_string(num_q_tiles) + " tiles of " +
                std::to_string(Config::kTileM) + " queries and " + std::to_string(num_kv_head_batches * num_n_blocks) +
                " of " + std::to_string(Config::kTileN) + " keys");
  int64_t const head_bytes =
      int64_t(params.seqlen_q) * Config::kHeadDim * (2 * sizeof(Element) + sizeof(float)) * group_size;
  int const num_head_batches = static_cast<int>(num_kv_head_batches);
  int const num_ctas = std::min(num_head_batches * num_n_blocks, params.num_sms);
  // Heads that fit the L2, but enough of them that every CTA has a tile and that, for deterministic sums, only few
  // n_blocks of a head are at work together: these wait for each other (bwd/dq_writer.cuh).
  int const most_blocks_of_a_head = params.deterministic ? std::min(num_n_blocks, kMostTurns) : num_n_blocks;
  int const l2_heads = static_cast<int>(std::min<int64_t>(
      std::max<int64_t>(kBwdL2BudgetBytes / head_bytes, (num_ctas + most_blocks_of_a_head - 1) / most_blocks_of_a_head),
      num_head_batches));
  // Under a causal mask the first n_blocks see the most queries.
  TileOrder const order = !params.causal         ? TileOrder::kEqual
                          : params.deterministic ? TileOrder::kDescending
                                                 : TileOrder::kAscending;
  int const section_heads = params.causal ? heads_that_fill_rounds(num_n_blocks, num_head_batches, num_ctas, l2_heads)
                            : params.deterministic ? l2_heads
                                                   : 1;

  BwdKernelParams kernel_params{
      .q = make_tensor_map<Element, Config::kSlabColumns>(params.q, params.head_dim, params.seqlen_q,
                                                          params.num_heads_q, params.batch, Config::kTileM),
      .k = make_tensor_map<Element, Config::kSlabColumnsK>(params.k, params.head_dim, params.seqlen_k,
                                                           params.num_heads_kv, params.batch, Config::kTileN),
      .v = make_tensor_map<Element, Config::kSlabColumns>(params.v, params.head_dim, params.seqlen_k,
                                                          params.num_heads_kv, params.batch, Config::kTileN),
      .dout = make_tensor_map<Element, Config::kSlabColumns>(params.dout, params.head_dim, params.seqlen_q,
                                                             params.num_heads_q, params.batch, Config::kTileM),
      .dk = make_tensor_map<Element, Config::kSlabColumnsK>(params.dk, params.head_dim, params.seqlen_k,
                                                            params.num_heads_kv, params.batch, kRowsPerWarp),
      .dv = make_tensor_map<Element, Config::kSlabColumns>(params.dv, params.head_dim, params.seqlen_k,
                                                           params.num_heads_kv, params.batch, kRowsPerWarp),
      .lse_log2 = params.lse_log2,
      .dsum = params.dsum,
      .dq_accum = params.dq_accum,
      .dq_turn = params.deterministic ? params.dq_turn : nullptr,
      .seqlen_q = params.seqlen_q,
      .seqlen_k = params.seqlen_k,
      .num_m_blocks = num_m_blocks,
      .num_heads_q = params.num_heads_q,
      .group_size = group_size,
      .softmax_scale = params.softmax_scale,
      .softmax_scale_log2 = softmax_scale_log2(params.softmax_scale),
      .causal = params.causal,
      .scheduler =
          make_tile_scheduler(num_n_blocks, params.num_heads_kv, params.batch, params.num_sms, order, section_heads),
  };

  double const lse_to_log2 = static_cast<double>(kernel_params.softmax_scale_log2) / params.softmax_scale;
  bwd_preprocess_kernel<Element, Config::kHeadDim, Config::kTileM>
      <<<static_cast<unsigned>(num_q_tiles), kPreprocessThreads, 0, stream>>>(params, num_m_blocks,
                                                                              Config::kConsumerWarpgroups, lse_to_log2);
  FA3_CHECK_CUDA(cudaGetLastError());
  auto* kernel = bwd_kernel<Config>;
  FA3_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSmemBytes));
  // CTAs that wait for each other's turn must all be on the GPU: a cooperative launch waits until they can be. Else the
  // kernel may begin while the preprocess ends; the postprocess in any case while this one does.
  cudaLaunchAttribute attribute{};
  if (params.deterministic) {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  } else {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kernel_params.scheduler.num_ctas);
  config.blockDim = dim3(Config::kNumThreads);
  config.dynamicSmemBytes = Config::kSmemBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  FA3_CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, kernel_params));

  attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.gridDim = dim3(static_cast<unsigned>(num_q_tiles));
  config.blockDim = dim3(kPostprocessThreads);
  config.dynamicSmemBytes = 0;
  FA3_CHECK_CUDA(cudaLaunchKernelEx(&config, bwd_postprocess_kernel<Element, Config::kHeadDim, Config::kDqColumns>,
                                    params, num_m_blocks));
}

// The row of the kernel table for BwdConfig<Element, kHeadDim, kTile>.
template <class Element, int kHeadDim, BwdTile kTile>
BwdKernel bwd_kernel_row(char const* name) {
  using Config = BwdConfig<Element, kHeadDim, kTile>;
  return {
      .info =
          {
              .name = name,
              .dtype = std::is_same_v<Element, cutlass::half_t> ? Dtype::kFloat16 : Dtype::kBFloat16,
              .head_dim = kHeadDim,
              .tile_m = Config::kTileM,
              .tile_n = Config::kTileN,
              .stages = Config::kStagesQ,
              .consumer_warpgroups = Config::kConsumerWarpgroups,
              .smem_bytes = Config::kSmemBytes,
          },
      .launch = launch_bwd<Config>,
  };
}

}  // namespace fa3
