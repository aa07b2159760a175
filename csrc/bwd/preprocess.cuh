// Before the main kernel: D = rowsum(dO * O) - dlse, lse in base 2, and the dQ accumulator cleared.
#pragma once

#include <cfloat>

#include <cute/tensor.hpp>

#include <cutlass/numeric_conversion.h>

#include "bwd/query_tile.h"
#include "common/grid_dependency.cuh"
#include "common/mask.h"
#include "params.h"

namespace fa3::bwd {

constexpr int kPreprocessThreads = 256;
constexpr float kLargestLse = 4194304.f;  // 2^22

// `lse_to_log2` is log2(e) with the rounding that it has in the main kernel's factor for scores: the score of a key
// that is alone, and its lse, then become the same number.
//
// One CTA per tile of kTileM query rows of one head. A row is read by neighboring threads, 16 bytes each: as many as
// a row of kHeadDimV has, rounded up to a power of two.
template <class Element, int kHeadDim, int kHeadDimV, int kTileM>
__global__ void __launch_bounds__(kPreprocessThreads)
    bwd_preprocess_kernel(BwdParams const params, int num_m_blocks, int semaphores_per_tile, double lse_to_log2) {
  constexpr int kThreadsPerRow = kHeadDimV <= 64 ? 8 : kHeadDimV <= 128 ? 16 : 32;
  constexpr int kRowsPerPass = kPreprocessThreads / kThreadsPerRow;
  static_assert(kTileM % kRowsPerPass == 0);
  using Vector = cutlass::AlignedArray<Element, 8>;
  using ToFloat = cutlass::NumericArrayConverter<float, Element, 8>;

  grid_dependency_launch_dependents();
  int64_t const tile = blockIdx.x;
  auto const [m_block, head_idx, batch_idx] = query_tile(tile, num_m_blocks, params.num_heads_q);
  SeqlenInfo const seqlen = queries_with_keys(params.seqlen, params.mask, batch_idx);
  auto const row_of = [&](TensorArg const& tensor, int64_t row) {
    return static_cast<Element const*>(tensor.data) + batch_idx * tensor.batch_stride +
           (seqlen.first_q + row) * tensor.row_stride + head_idx * tensor.head_stride;
  };
  int const column = threadIdx.x % kThreadsPerRow * 8;

  CUTLASS_PRAGMA_UNROLL
  for (int pass = 0; pass < kTileM / kRowsPerPass; ++pass) {
    int const row_in_tile = pass * kRowsPerPass + threadIdx.x / kThreadsPerRow;
    int const row = m_block * kTileM + row_in_tile;
    float sum = 0.f;
    if (row < seqlen.seqlen_q && column < params.head_dim_v) {
      auto const out = ToFloat::convert(*reinterpret_cast<Vector const*>(row_of(params.out, row) + column));
      auto const dout = ToFloat::convert(*reinterpret_cast<Vector const*>(row_of(params.dout, row) + column));
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8; ++i) {
        sum = fmaf(out[i], dout[i], sum);
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int lane = kThreadsPerRow / 2; lane > 0; lane /= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, lane);
    }
    if (threadIdx.x % kThreadsPerRow == 0) {
      // lse = inf makes P = exp2(S - lse) of a row without keys, or past the end, 0.
      float lse_log2 = INFINITY;
      if (row < seqlen.seqlen_q) {
        int64_t const index = seqlen.lse_offset(params.seqlen, params.num_heads_q, head_idx) + row;
        float const lse = params.lse[index];
        if (lse != -INFINITY) {
          lse_log2 = static_cast<float>(lse * lse_to_log2);
          if (lse_log2 < -FLT_MAX) {
            lse_log2 = -FLT_MAX;  // of a finite lse
          }
          // P is at most 1, but the roundings of lse and of the scores, half an ulp of lse each, could make it up to
          // exp2(|lse| / 2^22). Where that is more than 2 it would soon be infinite; there P is made too small instead.
          if (fabsf(lse_log2) > kLargestLse) {
            lse_log2 += fabsf(lse_log2) / kLargestLse;
          }
          sum -= params.dlse == nullptr ? 0.f : params.dlse[index];
        } else {
          sum = 0.f;
        }
      }
      params.lse_log2[tile * kTileM + row_in_tile] = lse_log2;
      params.dsum[tile * kTileM + row_in_tile] = sum;
    }
  }

  auto* dq = reinterpret_cast<float4*>(params.dq_accum + tile * kTileM * kHeadDim);
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kTileM * kHeadDim / 4; i += kPreprocessThreads) {
    dq[i + threadIdx.x] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  if (params.dq_semaphore != nullptr && threadIdx.x < semaphores_per_tile) {
    params.dq_semaphore[tile * semaphores_per_tile + threadIdx.x] = 0;
  }
}

}  // namespace fa3::bwd
