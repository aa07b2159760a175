// Host side of the backward: tensor maps, grids, and three launches on the caller's stream.
#pragma once

#include <algorithm>

#include "bwd/kernel.cuh"
#include "bwd/kernels.h"
#include "bwd/postprocess.cuh"
#include "bwd/preprocess.cuh"

namespace fa3::bwd {

// Q, dO and the fp32 dQ of the heads that run together should stay in the L2 (50 MB on H100, 60 MB on H200).
constexpr int64_t kL2BudgetBytes = 40 << 20;
// Deterministic: at most this many n_blocks of one head start in the same wave, if other heads can fill the CTAs.
constexpr int kMaxNBlocksPerWave = 8;

// Which (batch, KV head) pairs are worked on together, and in which order.
inline TileSchedulerParams make_scheduler(BwdParams const& params, int num_n_blocks, int64_t head_bytes) {
  int const num_batch_heads = params.num_heads_kv * params.seqlen.batch;
  int const num_ctas = std::min(num_batch_heads * num_n_blocks, params.num_sms);
  // Heads that fit the L2, but enough of them that every CTA has a tile and that, for deterministic sums, only few
  // n_blocks of a head are at work together: these wait for each other (dq_writer.cuh).
  int const most_blocks_of_a_head = params.deterministic ? std::min(num_n_blocks, kMaxNBlocksPerWave) : num_n_blocks;
  int const l2_heads = static_cast<int>(std::min<int64_t>(
      std::max<int64_t>(kL2BudgetBytes / head_bytes, (num_ctas + most_blocks_of_a_head - 1) / most_blocks_of_a_head),
      num_batch_heads));
  // Under a causal mask the first n_blocks are seen by the most queries. Deterministic: where the queries of an n_block
  // begin with it, the last one gets to an m_block first (dq_writer.cuh).
  WorkTrend const trend = trend_of_queries(params.mask);
  bool const last_comes_first = params.deterministic && params.mask.limits_right();
  TileOrder const order = last_comes_first || trend == WorkTrend::kFalling ? TileOrder::kDescending
                          : trend == WorkTrend::kRising                    ? TileOrder::kAscending
                                                                           : TileOrder::kEqual;
  int const heads_per_l2_group = order != TileOrder::kEqual
                                     ? heads_that_fill_waves(num_n_blocks, num_batch_heads, num_ctas, l2_heads)
                                 : params.deterministic ? l2_heads
                                                        : 1;
  return make_tile_scheduler(num_n_blocks, params.num_heads_kv, params.seqlen.batch, params.num_sms, order,
                             heads_per_l2_group);
}

template <class Config>
void launch(BwdParams const& params, cudaStream_t stream) {
  using Element = typename Config::Element;
  auto const& [batch, seqlen_q, seqlen_k] = params.seqlen;
  int const num_m_blocks = (seqlen_q + Config::kTileM - 1) / Config::kTileM;
  int const num_n_blocks = (seqlen_k + Config::kTileN - 1) / Config::kTileN;
  int const group_size = params.num_heads_q / params.num_heads_kv;
  int64_t const num_q_tiles = int64_t(num_m_blocks) * params.num_heads_q * batch;
  int64_t const num_k_tiles = int64_t(num_n_blocks) * params.num_heads_kv * batch;
  FA3_CHECK(num_q_tiles < (int64_t{1} << 30) && num_k_tiles < (int64_t{1} << 30),
            "batch x num_heads x seqlen / 64 must be below 2^30, got " + std::to_string(num_q_tiles) + " tiles of " +
                std::to_string(Config::kTileM) + " queries and " + std::to_string(num_k_tiles) + " of " +
                std::to_string(Config::kTileN) + " keys");
  // Of Q, dO and dQ.
  int64_t const head_bytes =
      int64_t(seqlen_q) * group_size *
      ((Config::kHeadDim + Config::kHeadDimV) * sizeof(Element) + Config::kHeadDim * sizeof(float));
  auto const rows_q = [&](TensorArg const& tensor) { return dense_rows<Element>(tensor, seqlen_q, batch); };
  auto const rows_k = [&](TensorArg const& tensor) { return dense_rows<Element>(tensor, seqlen_k, batch); };

  KernelParams kernel_params{
      .q = make_tensor_map<Element, Config::kSlabColumns>(params.q, params.head_dim, params.num_heads_q,
                                                          rows_q(params.q), Config::kTileM),
      .k = make_tensor_map<Element, Config::kSlabColumnsK>(params.k, params.head_dim, params.num_heads_kv,
                                                           rows_k(params.k), Config::kTileN),
      .v = make_tensor_map<Element, Config::kSlabColumnsV>(params.v, params.head_dim_v, params.num_heads_kv,
                                                           rows_k(params.v), Config::kTileN),
      .dout = make_tensor_map<Element, Config::kSlabColumnsV>(params.dout, params.head_dim_v, params.num_heads_q,
                                                              rows_q(params.dout), Config::kTileM),
      .dk = make_tensor_map<Element, Config::kSlabColumnsK>(params.dk, params.head_dim, params.num_heads_kv,
                                                            rows_k(params.dk), kRowsPerWarp),
      .dv = make_tensor_map<Element, Config::kSlabColumnsV>(params.dv, params.head_dim_v, params.num_heads_kv,
                                                            rows_k(params.dv), kRowsPerWarp),
      .lse_log2 = params.lse_log2,
      .dsum = params.dsum,
      .dq_accum = params.dq_accum,
      .dq_semaphore = params.deterministic ? params.dq_semaphore : nullptr,
      .seqlen = params.seqlen,
      .mask = params.mask,
      .scores = params.scores,
      .num_m_blocks = num_m_blocks,
      .num_heads_q = params.num_heads_q,
      .group_size = group_size,
      .scheduler = make_scheduler(params, num_n_blocks, head_bytes),
  };

  double const lse_to_log2 = static_cast<double>(params.scores.softmax_scale_log2) / params.scores.softmax_scale;
  bwd_preprocess_kernel<Element, Config::kHeadDim, Config::kHeadDimV, Config::kTileM>
      <<<static_cast<unsigned>(num_q_tiles), kPreprocessThreads, 0, stream>>>(params, num_m_blocks,
                                                                              Config::kConsumerWarpgroups, lse_to_log2);
  FA3_CHECK_CUDA(cudaGetLastError());
  auto* kernel = bwd_kernel<Config>;
  FA3_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSmemBytes));
  // CTAs that wait for each other's semaphores must all be resident: a cooperative launch waits until they can be.
  // Otherwise the kernel may begin while the preprocess ends. The postprocess may always begin while this kernel ends.
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

// The row of the kernel table. Each kernel's source file has one.
template <class Element, class HeadDims, BwdTile kTile>
Kernel kernel_row(char const* name) {
  using KernelConfig = Config<Element, HeadDims, kTile>;
  return {
      .info =
          {
              .name = name,
              .rank = kTile.rank,
              .dtype = std::is_same_v<Element, cutlass::half_t> ? Dtype::kFloat16 : Dtype::kBFloat16,
              .head_dim = KernelConfig::kHeadDim,
              .head_dim_v = KernelConfig::kHeadDimV,
              .tile_m = KernelConfig::kTileM,
              .tile_n = KernelConfig::kTileN,
              .stages = KernelConfig::kStagesQ,
              .consumer_warpgroups = KernelConfig::kConsumerWarpgroups,
              .smem_bytes = KernelConfig::kSmemBytes,
          },
      .launch = launch<KernelConfig>,
  };
}

}  // namespace fa3::bwd
