// The quantiser: rotary embedding, minus the mean, signs and Hadamard transform, largest value of a block, e4m3.
//
// A CTA goes through its tiles, each of which stays in registers, as float32, from the load to the cast. What is left
// is the traffic: x is read once, x8 written once.
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

// op(value, that of its channel) for each of the thread's values.
template <class Config, class Op>
CUTLASS_DEVICE void with_channels(ThreadRow<Config> const& thread, float const* channels, Vector (&x)[8], Op&& op) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 8; ++i) {
    Vector const of_channels = read_vector(channels + thread.column(i));
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 8; ++j) {
      x[i][j] = op(x[i][j], of_channels[j]);
    }
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kCtasPerSm)
    quantize_fp8_kernel(QuantizeParams const params, HeadBlocks const tiles, QuantizeStep step, float norm) {
  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  auto& warp_smem = smem.warps[threadIdx.x / 32];

  int const end = tiles.first_of(blockIdx.x + 1);
  int number = tiles.first_of(blockIdx.x);
  prefetch<Config>(params, params.mean, params.rotary.dim > 0, tiles[number], warp_smem);
  if (params.signs != nullptr && threadIdx.x < Config::kWidth) {
    smem.signs[threadIdx.x] = params.signs[threadIdx.x];
  }
  __syncthreads();
  for (; number < end; ++number) {
    ThreadRow<Config> const thread;
    HeadBlock const tile = tiles[number];
    int const first_row = thread.first_row(tile);

    Vector x[8];
    read_row(thread, warp_smem, x);
    if (params.rotary.dim > 0) {
      rotate(params.rotary, thread, warp_smem, x);
    }
    if (params.mean != nullptr) {
      with_channels(thread, warp_smem.channels, x, [](float value, float mean) { return value - mean; });
    }
    __syncwarp();
    if (number + 1 < end) {
      HeadBlock const next = tiles[number + 1];
      prefetch<Config>(params, params.mean, params.rotary.dim > 0 && next.block != tile.block, next, warp_smem);
    }
    if (params.signs != nullptr) {
      with_channels(thread, smem.signs, x, [](float value, float sign) { return value * sign; });
      hadamard<Config>(thread, x);
    }

    float amax = 0.f;
    if (step != QuantizeStep::kHead) {
      amax = warp_max(first_row + thread.row < params.seqlen ? largest(x) : 0.f);
    }
    if (step == QuantizeStep::kHeadAmax) {
      if (thread.lane_idx == 0) {
        atomicMax(reinterpret_cast<unsigned*>(&params.amax[tile.head_batch]), __float_as_uint(amax));
      }
      continue;
    }
    if (step == QuantizeStep::kBlocks) {
      if (thread.lane_idx == 0) {
        smem.amax[number % 2][thread.warp_idx] = amax;
      }
      __syncthreads();
      amax = warp_max(smem.amax[number % 2][thread.lane_idx % Config::kNumWarps]);
    } else {
      amax = params.amax[tile.head_batch];
    }
    auto const [descale, factor] = scales(amax, norm);
    if (threadIdx.x == 0) {
      if (step == QuantizeStep::kBlocks) {
        params.descale[int64_t(tile.head_batch) * tiles.num_blocks + tile.block] = descale;
      } else if (tile.block == 0) {
        params.descale[tile.head_batch] = descale;
      }
    }
    if (params.transpose) {
      store_transposed<Config>(params, tile, tiles.num_blocks, thread, factor, x, smem);
    } else {
      store_rows<Config>(params, tile, first_row, thread, factor, x, warp_smem);
    }
  }
}

}  // namespace fa3
