// The mean of each channel over all rows of a head, after the rotary embedding. Sums are taken in a fixed order.
#pragma once

#include "quantize/rotary.cuh"

namespace fa3 {

// Sums over the rows of a warp, bit by bit of their numbers, the highest first: of what two lanes have, each gives one
// half away and adds the other's, which is in another register where the lanes' vectors are swapped. In the end a lane
// has the sums of 64 / kRowsPerWarp registers: of those from row * 64 / kRowsPerWarp on, as its first ones.
template <class Config, int kKept = 32>
CUTLASS_DEVICE void sum_rows(ThreadRow<Config> const& thread, Vector (&x)[8]) {
  constexpr int kBit = Config::kRowsPerWarp * kKept / 64;
  constexpr int kSwapped = kBit & 24;  // a lane's bit 3 swaps vectors of 8 registers, its bit 4 pairs of them
  bool const keeps_upper = thread.row & kBit;
  float sums[kKept];
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kKept; ++i) {
    float const given = keeps_upper ? value(x, i ^ kSwapped) : value(x, (i ^ kSwapped) + kKept);
    sums[i] = (keeps_upper ? value(x, i + kKept) : value(x, i)) + __shfl_xor_sync(0xffffffff, given, kBit);
  }
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kKept; ++i) {
    value(x, i) = sums[i];
  }
  if constexpr (kBit > 1) {
    sum_rows<Config, kKept / 2>(thread, x);
  }
}

// Sums over the rows of a tile. Rows past seqlen are zeros.
template <class Config>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    column_sums_kernel(__grid_constant__ QuantizeKernelParams const params, HeadBlocks const head_blocks) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  WarpTiles<Config> tiles(head_blocks);
  auto& warp_smem = smem.warps[tiles.warp_idx];
  auto& full = smem.full[tiles.warp_idx];
  bool const rotates = params.rotary.dim > 0;
  auto const sums_of = [&](int warp_idx) { return reinterpret_cast<float*>(smem.warps[warp_idx].x8); };

  init_barrier(full);
  __syncthreads();
  HeadBlock tile, next;
  if (tiles.is_tile()) {
    tile = tiles.tile();
    prefetch<Config>(params, tile, tiles.first_row(tile), rotates, full, warp_smem);
  }
  for (; tiles.is_tile(); tiles.advance(), tile = next) {
    ThreadRow<Config> const thread;
    Vector x[8];
    full.wait(tiles.parity);
    read_row(thread, warp_smem, x);
    if (rotates) {
      rotate(params.rotary, thread, warp_smem, x);
    }
    __syncwarp();
    if (tiles.has_next()) {
      next = tiles.next();
      prefetch<Config>(params, next, tiles.first_row(next), rotates && next.block != tile.block, full, warp_smem);
    }

    sum_rows(thread, x);
    constexpr int kSumsPerLane = 64 / Config::kRowsPerWarp;
    int const first = thread.row * kSumsPerLane;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSumsPerLane; ++i) {
      sums_of(tiles.warp_idx)[thread.column(first / 8) + first % 8 + i] = value(x, i);
    }

    tiles.sync();
    float* tile_sums =
        params.column_sums + (int64_t(tile.head_batch) * head_blocks.num_blocks + tile.block) * params.head_dim;
    int const column = threadIdx.x % (Config::kWarpsPerTile * 32);
    if (column < params.head_dim) {
      float sum = 0.f;
      CUTLASS_PRAGMA_UNROLL
      for (int warp = 0; warp < Config::kWarpsPerTile; ++warp) {
        sum += sums_of(tiles.slot * Config::kWarpsPerTile + warp)[column];
      }
      tile_sums[column] = sum;
    }
    tiles.sync();
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
