// The mean of each channel over all rows of a head, after the rotary embedding. Sums are taken in a fixed order.
#pragma once

#include "quantize/rotary.cuh"

namespace fa3 {

// Sums over the rows of a warp, bit by bit of their numbers, the highest first: of what two lanes have, each gives one
// half away and adds the other's. In the end a lane has the sums of 64 / kRowsPerWarp registers: of those from
// row * 64 / kRowsPerWarp on, as its first ones.
template <class Config, int kKept = 32>
CUTLASS_DEVICE void sum_rows(ThreadRow<Config> const& thread, Vector (&x)[8]) {
  constexpr int kBit = Config::kRowsPerWarp * kKept / 64;
  bool const keeps_upper = thread.row & kBit;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kKept; ++i) {
    float const low = value(x, i), high = value(x, i + kKept);
    value(x, i) = (keeps_upper ? high : low) + __shfl_xor_sync(0xffffffff, keeps_upper ? low : high, kBit);
  }
  if constexpr (kBit > 1) {
    sum_rows<Config, kKept / 2>(thread, x);
  }
}

// Sums over the rows of a tile. Rows past seqlen are zeros.
template <class Config>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kCtasPerSm)
    column_sums_kernel(QuantizeParams const params, HeadBlocks const tiles) {
  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  auto& warp_smem = smem.warps[threadIdx.x / 32];

  int const end = tiles.first_of(blockIdx.x + 1);
  int number = tiles.first_of(blockIdx.x);
  prefetch<Config>(params, nullptr, params.rotary.dim > 0, tiles[number], warp_smem);
  for (; number < end; ++number) {
    ThreadRow<Config> const thread;
    HeadBlock const tile = tiles[number];
    Vector x[8];
    read_row(thread, warp_smem, x);
    if (params.rotary.dim > 0) {
      rotate(params.rotary, thread, warp_smem, x);
    }
    __syncwarp();
    if (number + 1 < end) {
      HeadBlock const next = tiles[number + 1];
      prefetch<Config>(params, nullptr, params.rotary.dim > 0 && next.block != tile.block, next, warp_smem);
    }

    sum_rows(thread, x);
    constexpr int kSumsPerLane = 64 / Config::kRowsPerWarp;
    int const first = thread.row * kSumsPerLane;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSumsPerLane; ++i) {
      warp_smem.channels[thread.column(first / 8) + first % 8 + i] = value(x, i);
    }

    __syncthreads();
    float* tile_sums =
        params.column_sums + (int64_t(tile.head_batch) * tiles.num_blocks + tile.block) * params.head_dim;
    if (threadIdx.x < params.head_dim) {
      float sum = 0.f;
      CUTLASS_PRAGMA_UNROLL
      for (int warp = 0; warp < Config::kNumWarps; ++warp) {
        sum += smem.warps[warp].channels[threadIdx.x];
      }
      tile_sums[threadIdx.x] = sum;
    }
    __syncthreads();
  }
}

constexpr int kMeanWarps = 8;

// One CTA per 32 channels of a head: a warp sums every eighth tile, the first warp what they have.
static __global__ void __launch_bounds__(kMeanWarps * 32)
    mean_kernel(float const* column_sums, float* mean, int num_blocks, int head_dim, int seqlen) {
  __shared__ float warp_sums[kMeanWarps][32];
  int const warp_idx = threadIdx.x / 32;
  int const lane_idx = threadIdx.x % 32;
  int const slices = (head_dim + 31) / 32;
  int64_t const head_batch = blockIdx.x / slices;
  int const channel = blockIdx.x % slices * 32 + lane_idx;

  float sum = 0.f;
  if (channel < head_dim) {
    float const* tile_sums = column_sums + head_batch * num_blocks * head_dim + channel;
#pragma unroll 8
    for (int block = warp_idx; block < num_blocks; block += kMeanWarps) {
      sum += tile_sums[int64_t(block) * head_dim];
    }
  }
  warp_sums[warp_idx][lane_idx] = sum;
  __syncthreads();
  if (warp_idx == 0 && channel < head_dim) {
    sum = 0.f;
    CUTLASS_PRAGMA_UNROLL
    for (int warp = 0; warp < kMeanWarps; ++warp) {
      sum += warp_sums[warp][lane_idx];
    }
    mean[head_batch * head_dim + channel] = sum / seqlen;
  }
}

}  // namespace fa3
