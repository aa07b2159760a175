// After the main kernel: dQ = softmax_scale * the fp32 accumulator, in the input dtype.
#pragma once

#include "bwd/dq.cuh"
#include "bwd/query_tile.h"
#include "common/grid_dependency.cuh"
#include "common/mask.h"
#include "params.h"

namespace fa3::bwd {

constexpr int kPostprocessThreads = 128;

// One CTA per tile of 64 query rows of one head. The threads read the accumulator as the consumers' registers lay
// (bwd/dq.cuh), and turn it around in shared memory into rows.
template <class Element, int kHeadDim, int kDqColumns>
__global__ void __launch_bounds__(kPostprocessThreads)
    bwd_postprocess_kernel(BwdParams const params, int num_m_blocks) {
  constexpr int kTileM = kRowsPerWarpgroup;
  static_assert(kPostprocessThreads == cutlass::NumThreadsPerWarpGroup);
  constexpr int kRowPitch = kHeadDim + 8;  // 16 bytes more, so that a column does not lie in one bank
  __shared__ alignas(16) Element rows[kTileM][kRowPitch];

  grid_dependency_wait();
  int64_t const tile = blockIdx.x;
  auto const [m_block, head_idx, batch_idx] = query_tile(tile, num_m_blocks, params.num_heads_q);
  SeqlenInfo const seqlen = queries_with_keys(params.seqlen, params.mask, batch_idx);

  auto const* accum = reinterpret_cast<float4 const*>(params.dq_accum + tile * kTileM * kHeadDim) + threadIdx.x;
  CUTLASS_PRAGMA_UNROLL
  for (int column = 0; column < kHeadDim; column += 8) {
    // Registers 4 i to 4 i + 3 of a warpgroup: rows g and g + 8, two columns each.
    float4 const dq = accum[column / 8 * kPostprocessThreads];
    auto const store = [&](int i, float x, float y) {
      cutlass::Array<float, 2> const scaled = {x * params.scores.softmax_scale, y * params.scores.softmax_scale};
      *reinterpret_cast<cutlass::Array<Element, 2>*>(&rows[accumulator_row(i)][column + accumulator_first_column()]) =
          cutlass::NumericArrayConverter<Element, float, 2>::convert(scaled);
    };
    store(0, dq.x, dq.y);
    store(1, dq.z, dq.w);
  }
  __syncthreads();

  auto* out = static_cast<Element*>(params.dq.data) + int64_t(batch_idx) * params.dq.batch_stride +
              head_idx * params.dq.head_stride;
  constexpr int kThreadsPerRow = kHeadDim / 8;
  for (int i = threadIdx.x; i < kTileM * kThreadsPerRow; i += kPostprocessThreads) {
    int const row_in_tile = i / kThreadsPerRow;
    int const column = i % kThreadsPerRow * 8;
    int64_t const row = int64_t(m_block) * kTileM + row_in_tile;
    auto const write = [&](int64_t row, uint4 value) {
      *reinterpret_cast<uint4*>(out + row * params.dq.row_stride + column) = value;
    };
    if (row < seqlen.seqlen_q && column < params.head_dim) {
      write(seqlen.first_q + row, *reinterpret_cast<uint4 const*>(&rows[row_in_tile][column]));
    }
    if (row < seqlen.first_q && column < params.head_dim) {  // queries without keys
      write(row, {});
    }
  }
}

}  // namespace fa3::bwd
