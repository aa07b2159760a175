// The fp32 accumulator of dQ in global memory: written tile by tile by the dq_writer, read by the postprocess.
//
// A tile (64 queries of one head) is held as the consumer warpgroups hold it in registers: warpgroup w computes the
// columns [w * columns, (w + 1) * columns), and of its N / 2 registers per thread four at a time lie together,
//
//   tile[warpgroup][register / 4][thread][register % 4]
//
// so that threads write shared memory in 16-byte units without bank conflicts, and a warpgroup's part is one contiguous
// piece for the bulk reduction. Wide heads: a warpgroup's columns are computed, and lie here, slice after slice, each
// in this order. common/accumulator.cuh says which row and column a register is.
#pragma once

#include <cute/tensor.hpp>

#include "common/accumulator.cuh"
#include "common/pipeline.cuh"

namespace fa3::bwd {

// Copies a warpgroup's accumulator to its part of the tile in shared memory, once that is empty.
template <class Accumulator>
CUTLASS_DEVICE void store_dq_to_smem(Accumulator const& tdQrdQ, float* part) {
  constexpr int kNumRegisters = decltype(cute::size(tdQrdQ))::value;
  compiler_fence();
  auto* destination = reinterpret_cast<float4*>(part) + threadIdx.x % cutlass::NumThreadsPerWarpGroup;
  CUTLASS_PRAGMA_UNROLL
  for (int r = 0; r < kNumRegisters; r += 4) {
    *destination = make_float4(tdQrdQ(r), tdQrdQ(r + 1), tdQrdQ(r + 2), tdQrdQ(r + 3));
    destination += cutlass::NumThreadsPerWarpGroup;
  }
  compiler_fence();
}

}  // namespace fa3::bwd
