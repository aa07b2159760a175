// The quantiser: rotary embedding, minus the mean, signs and Hadamard transform, largest value of a block, e4m3.
//
// A CTA goes through its tiles, each of which stays in registers, as float32, from the load to the cast: x is read
// once, x8 written once, both by TMA. Warps work alone but for the largest value of a tile.
#pragma once

#include <cfloat>

#include "quantize/hadamard.cuh"
#include "quantize/rotary.cuh"
#include "quantize/store.cuh"

namespace fa3 {

enum class QuantizeStep {
  kBlocks,    // one scale per block of rows, found and used
  kHeadAmax,  // one scale per head: first its largest value
  kHead,      // then the scale and the values
};

constexpr float kLargestE4m3 = 448.f;

struct Scales {
  float descale;
  float factor;  // of a value that the transform left without its 1 / sqrt(width)
};

// a / b, rounded as by a full division nearly always: that may call a function, which costs registers. b is from 2^-126
// to 2^126.
CUTLASS_DEVICE float quotient(float a, float b) {
  float const near = __fdividef(a, b);
  return fmaf(fmaf(-near, b, a), __fdividef(1.f, b), near);
}

// x8 is the value times the factor, not over descale: the two are within 2^-22 of each other, and the cast rounds to
// 2^-4, so that only a value as near to a tie may come out as its neighbour. A descale that has no reciprocal in
// float32 is made larger; then the values do not reach 448.
CUTLASS_DEVICE Scales scales(float amax, float norm) {
  float const largest = fmaxf(amax * norm, kLargestE4m3 * FLT_MIN);
  float const descale = quotient(largest, kLargestE4m3);
  float const factor = norm * quotient(kLargestE4m3 / 256.f, largest / 256.f);  // 256: largest may be near 2^128
  return {amax == 0.f ? 1.f : isinf(amax) ? amax : descale, isinf(amax) ? 0.f : factor};
}

// The largest absolute value, of those that are not NaN.
CUTLASS_DEVICE float largest(Vector const (&x)[8]) {
  float amax[4] = {};  // not one, whose 64 steps would wait for each other
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 64; ++i) {
    amax[i % 4] = fmaxf(amax[i % 4], fabsf(x[i / 8][i % 8]));
  }
  return fmaxf(fmaxf(amax[0], amax[1]), fmaxf(amax[2], amax[3]));
}

// Over a warp, and of non-negative numbers: those are ordered as their bits are.
CUTLASS_DEVICE float warp_max(float x) { return __uint_as_float(__reduce_max_sync(0xffffffff, __float_as_uint(x))); }

// Minus the means of their channels. Past head_dim there are zeros, and stay.
template <class Config>
CUTLASS_DEVICE void subtract(ThreadRow<Config> const& thread, float const* means, int head_dim, Vector (&x)[8]) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 8; ++i) {
    int const column = thread.column(i);
    if (column < head_dim) {
      auto const* mean = reinterpret_cast<float4 const*>(means + column);
      float4 const low = __ldg(mean), high = __ldg(mean + 1);
      x[i][0] -= low.x, x[i][1] -= low.y, x[i][2] -= low.z, x[i][3] -= low.w;
      x[i][4] -= high.x, x[i][5] -= high.y, x[i][6] -= high.z, x[i][7] -= high.w;
    }
  }
}

// To the L1, a line per lane: by the time that subtract reads them they are there.
CUTLASS_DEVICE void prefetch_means(float const* means, int head_dim) {
  int const column = threadIdx.x % 32 * 32;
  if (column < head_dim) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(means + column));
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    quantize_fp8_kernel(__grid_constant__ QuantizeKernelParams const params, HeadBlocks const head_blocks,
                        QuantizeStep step, float norm) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  WarpTiles<Config> tiles(head_blocks);
  auto& warp_smem = smem.warps[tiles.warp_idx];
  auto& full = smem.full[tiles.warp_idx];
  bool const rotates = params.rotary.dim > 0;
  bool const transforms = params.signs != nullptr;
  bool const combines = transforms && params.rotary.dim == Config::kWidth && !params.rotary.interleaved &&
                        params.mean == nullptr;  // the rotary embedding with the first stage of the transform

  init_barrier(full);
  if (transforms && threadIdx.x < Config::kWidth) {
    smem.signs[threadIdx.x] = sign_byte(params.signs[threadIdx.x]);
  }
  if (combines && threadIdx.x < Config::kWidth / 4) {
    smem.flips[threadIdx.x] = sign_flips(params.signs + 2 * threadIdx.x, Config::kWidth / 2);
  }
  __syncthreads();
  bool new_rows = rotates;
  HeadBlock tile, next;
  if (tiles.is_tile()) {
    tile = tiles.tile();
    prefetch<Config>(params, tile, tiles.first_row(tile), new_rows, full, warp_smem);
  }
  for (; tiles.is_tile(); tiles.advance(), tile = next) {
    ThreadRow<Config> const thread;
    int const first_row = tiles.first_row(tile);

    Vector x[8];
    full.wait(tiles.parity);
    if (combines) {
      if (new_rows) {
        combine_tables(thread, smem.signs, warp_smem);
      }
      read_row<true>(thread, warp_smem, x, smem.flips);
      rotate_combined(thread, warp_smem, x);
    } else {
      read_row(thread, warp_smem, x);
      if (rotates) {
        rotate(params.rotary, thread, warp_smem, x);
      }
    }
    if (params.mean != nullptr) {
      subtract(thread, params.mean + int64_t(tile.head_batch) * params.head_dim, params.head_dim, x);
    }
    __syncwarp();
    if (tiles.has_next()) {
      next = tiles.next();
      new_rows = rotates && next.block != tile.block;
      if (params.mean != nullptr) {
        prefetch_means(params.mean + int64_t(next.head_batch) * params.head_dim, params.head_dim);
      }
      prefetch<Config>(params, next, tiles.first_row(next), new_rows, full, warp_smem);
    }
    float amax;
    if (transforms) {
      if (!combines) {
        hadamard_of_halves(thread, smem.signs, x);
      }
      amax = hadamard_in_halves(thread, x);
    } else {
      amax = largest(x);
    }

    if (step != QuantizeStep::kHead) {
      amax = warp_max(first_row + thread.row < params.seqlen ? amax : 0.f);
    }
    if (step == QuantizeStep::kHeadAmax) {
      if (thread.lane_idx == 0) {
        atomicMax(reinterpret_cast<unsigned*>(&params.amax[tile.head_batch]), __float_as_uint(amax));
      }
      continue;
    }
    if (step == QuantizeStep::kBlocks) {
      float* of_warps = smem.amax[tiles.parity];
      if (thread.lane_idx == 0) {
        of_warps[tiles.warp_idx] = amax;
      }
      tiles.sync();
      amax = warp_max(of_warps[tiles.slot * Config::kWarpsPerTile + thread.lane_idx % Config::kWarpsPerTile]);
    } else {
      amax = params.amax[tile.head_batch];
    }
    auto const [descale, factor] = scales(amax, norm);
    if (tiles.warp_idx % Config::kWarpsPerTile == 0 && thread.lane_idx == 0) {
      if (step == QuantizeStep::kBlocks) {
        params.descale[int64_t(tile.head_batch) * head_blocks.num_blocks + tile.block] = descale;
      } else if (tile.block == 0) {
        params.descale[tile.head_batch] = descale;
      }
    }
    uint2 x8[8];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) {
      x8[i] = cast(x[i], factor);
    }
    if (params.transpose) {
      store_transposed(params, tile, tiles, thread, x8, smem);
    } else {
      store_rows(params, tile, first_row, thread, transforms, x8, warp_smem);
    }
  }
  wait_for_stores();  // shared memory outlives the reads of the last one
}

}  // namespace fa3
