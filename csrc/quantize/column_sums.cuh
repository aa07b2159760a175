// The mean of each channel over all rows of a head, after the rotary embedding. The order of the sums is fixed.
#pragma once

#include "quantize/rotary.cuh"
#include "quantize/tile_walk.cuh"

namespace fa3::quantize {

// Butterfly reduction over a warp's rows. Per step, lanes whose row index differs in one bit exchange half of their
// registers and add; each keeps half as many sums. The partner's register has another index where the two lanes order
// their vectors differently. In the end a lane has the sums of its registers from row * (64 / kRowsPerWarp) on, moved
// to the front.
template <class Config, int kKept = 32>
CUTLASS_DEVICE void sum_rows(ThreadRow<Config> const& thread, Fragment& x) {
  constexpr int kBit = Config::kRowsPerWarp * kKept / 64;
  constexpr int kSwapped = kBit & 24;  // bit 3 of a lane swaps vectors of 8 registers, bit 4 pairs of vectors
  bool const keeps_upper = thread.row & kBit;
  float sums[kKept];
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kKept; ++i) {
    float const sent = keeps_upper ? element(x, i ^ kSwapped) : element(x, (i ^ kSwapped) + kKept);
    sums[i] = (keeps_upper ? element(x, i + kKept) : element(x, i)) + __shfl_xor_sync(0xffffffff, sent, kBit);
  }
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kKept; ++i) {
    element(x, i) = sums[i];
  }
  if constexpr (kBit > 1) {
    sum_rows<Config, kKept / 2>(thread, x);
  }
}

// Adds the sums of the warps that share a tile, and writes them to global memory.
template <class Config>
CUTLASS_DEVICE void write_tile_sums(TileWalk<Config> const& tiles, ThreadRow<Config> const& thread, Fragment& x) {
  QuantizeKernelParams const& params = tiles.params;
  auto const sums_of = [&](int warp_idx) { return reinterpret_cast<float*>(tiles.smem.warps[warp_idx].x8); };
  constexpr int kSumsPerLane = 64 / Config::kRowsPerWarp;
  int const first = thread.row * kSumsPerLane;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kSumsPerLane; ++i) {
    sums_of(tiles.warp_idx)[thread.column(first / 8) + first % 8 + i] = element(x, i);
  }

  tiles.sync_tile();
  float* tile_sums =
      params.column_sums + (int64_t(tiles.tile.bh) * tiles.order.num_blocks + tiles.tile.block) * params.head_dim;
  int const column = threadIdx.x % (Config::kWarpsPerTile * 32);
  if (column < params.head_dim) {
    float sum = 0.f;
    CUTLASS_PRAGMA_UNROLL
    for (int warp = 0; warp < Config::kWarpsPerTile; ++warp) {
      sum += sums_of(tiles.slot * Config::kWarpsPerTile + warp)[column];
    }
    tile_sums[column] = sum;
  }
  tiles.sync_tile();
}

// The sums over the rows of each tile. Rows past seqlen are zeros.
template <class Config>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    column_sums_kernel(__grid_constant__ QuantizeKernelParams const params, TileOrder const order) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  TileWalk<Config> tiles(params, order, *reinterpret_cast<typename Config::Smem*>(smem_bytes));
  tiles.init_barrier();
  __syncthreads();

  for (tiles.begin(); tiles.is_valid(); tiles.advance()) {
    ThreadRow<Config> const thread;
    Fragment x;
    tiles.wait();
    read_row(thread, tiles.warp_smem(), x);
    if (tiles.rotates) {
      apply_rotary(params.rotary, thread, tiles.warp_smem(), x);
    }
    tiles.load_next([](Tile const&) {});
    sum_rows(thread, x);
    write_tile_sums(tiles, thread, x);
  }
}

constexpr int kMeanWarps = 8;

// One CTA per 32 channels of a head. Each warp sums every eighth tile, then the first warp adds the eight sums.
static __global__ void __launch_bounds__(kMeanWarps * 32)
    mean_kernel(float const* column_sums, float* mean, int num_blocks, int head_dim, int seqlen) {
  __shared__ float warp_sums[kMeanWarps][32];
  int const warp_idx = threadIdx.x / 32;
  int const lane_idx = threadIdx.x % 32;
  int const slices = (head_dim + 31) / 32;
  int64_t const bh = blockIdx.x / slices;
  int const channel = blockIdx.x % slices * 32 + lane_idx;

  float sum = 0.f;
  if (channel < head_dim) {
    float const* tile_sums = column_sums + bh * num_blocks * head_dim + channel;
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
    mean[bh * head_dim + channel] = sum / seqlen;
  }
}

}  // namespace fa3::quantize
