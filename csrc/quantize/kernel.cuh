// The quantizer: rotary embedding, subtraction of the mean, signs and Hadamard transform, scale, cast to e4m3.
//
// A CTA goes through its tiles. A tile stays in registers as float32 from its load to its cast: x is read once and x8
// written once, both by TMA. Warps wait for each other only to find the largest absolute value of a tile.
#pragma once

#include <cfloat>

#include "quantize/hadamard.cuh"
#include "quantize/rotary.cuh"
#include "quantize/store.cuh"

namespace fa3::quantize {

// One scale per block of rows needs one pass over x, one scale per head two passes.
enum class Pass {
  kBlockScales,  // finds the scale of each block, and casts
  kHeadAmax,     // finds the largest absolute value of each head
  kHeadScales,   // casts by the scale of the head
};

// The steps that the caller's parameters ask for, the same for all tiles.
struct Steps {
  bool transforms;
  bool fuses_rotary;  // rotary embedding, signs and the first butterfly stage in one step (rotary.cuh)

  CUTLASS_DEVICE Steps(QuantizeParams const& params, int width) {
    transforms = params.signs != nullptr;
    fuses_rotary = transforms && params.rotary.dim == width && !params.rotary.interleaved && params.mean == nullptr;
  }
};

// Writes the signs to shared memory, as the transform and the fused rotary embedding read them.
template <class Config>
CUTLASS_DEVICE void write_signs(float const* signs, Steps const& steps, typename Config::Smem& smem) {
  if (steps.transforms && threadIdx.x < Config::kWidth) {
    smem.signs[threadIdx.x] = sign_byte(signs[threadIdx.x]);
  }
  if (steps.fuses_rotary && threadIdx.x < Config::kWidth / 4) {
    smem.flips[threadIdx.x] = sign_flips(signs + 2 * threadIdx.x, Config::kWidth / 2);
  }
}

// Reads the thread's values and rotates them. With a fused rotary embedding this includes the signs and the first
// butterfly stage.
template <class Config>
CUTLASS_DEVICE void read_and_rotate(TileWalk<Config> const& tiles, Steps const& steps, ThreadRow<Config> const& thread,
                                    Fragment& x) {
  auto& smem = tiles.warp_smem();
  if (steps.fuses_rotary) {
    if (tiles.new_tables) {
      fuse_tables(thread, tiles.smem.signs, smem);
    }
    read_row<true>(thread, smem, x, tiles.smem.flips);
    apply_fused_rotary(thread, smem, x);
  } else {
    read_row(thread, smem, x);
    if (tiles.rotates) {
      apply_rotary(tiles.params.rotary, thread, smem, x);
    }
  }
}

// Subtracts each channel's mean. Columns past head_dim are zero and stay zero.
template <class Config>
CUTLASS_DEVICE void subtract_mean(ThreadRow<Config> const& thread, float const* mean, int head_dim, Fragment& x) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 8; ++i) {
    int const column = thread.column(i);
    if (column < head_dim) {
      auto const* entries = reinterpret_cast<float4 const*>(mean + column);
      float4 const low = __ldg(entries), high = __ldg(entries + 1);
      x[i][0] -= low.x, x[i][1] -= low.y, x[i][2] -= low.z, x[i][3] -= low.w;
      x[i][4] -= high.x, x[i][5] -= high.y, x[i][6] -= high.z, x[i][7] -= high.w;
    }
  }
}

// Prefetches a head's mean into the L1, one cache line per lane, before subtract_mean reads it.
CUTLASS_DEVICE void prefetch_mean(float const* mean, int head_dim) {
  int const column = threadIdx.x % 32 * 32;
  if (column < head_dim) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(mean + column));
  }
}

// The thread's largest absolute value, NaN left out.
CUTLASS_DEVICE float abs_max(Fragment const& x) {
  float amax[4] = {};  // four independent chains of maxima
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 64; ++i) {
    amax[i % 4] = fmaxf(amax[i % 4], fabsf(x[i / 8][i % 8]));
  }
  return fmaxf(fmaxf(amax[0], amax[1]), fmaxf(amax[2], amax[3]));
}

// Applies the Hadamard transform, if any, and returns the thread's largest absolute value.
template <class Config>
CUTLASS_DEVICE float transform(TileWalk<Config> const& tiles, Steps const& steps, ThreadRow<Config> const& thread,
                               Fragment& x) {
  if (!steps.transforms) {
    return abs_max(x);
  }
  if (!steps.fuses_rotary) {
    hadamard_of_halves(thread, tiles.smem.signs, x);
  }
  return hadamard_in_halves(thread, x);
}

// The maximum over a warp of non-negative numbers, which have the order of their bits.
CUTLASS_DEVICE float warp_max(float x) { return __uint_as_float(__reduce_max_sync(0xffffffff, __float_as_uint(x))); }

// The maximum over the warps that share a tile.
template <class Config>
CUTLASS_DEVICE float tile_max(TileWalk<Config> const& tiles, ThreadRow<Config> const& thread, float warp_amax) {
  float* amax = tiles.smem.amax[tiles.parity];
  if (thread.lane_idx == 0) {
    amax[tiles.warp_idx] = warp_amax;
  }
  tiles.sync_tile();
  return warp_max(amax[tiles.slot * Config::kWarpsPerTile + thread.lane_idx % Config::kWarpsPerTile]);
}

// a / b, nearly always with the rounding of a full division, which may call a function and so cost registers. b is from
// 2^-126 to 2^126.
CUTLASS_DEVICE float divide_approx(float a, float b) {
  float const quotient = __fdividef(a, b);
  return fmaf(fmaf(-quotient, b, a), __fdividef(1.f, b), quotient);
}

constexpr float kE4m3Max = 448.f;

struct Scale {
  float descale;
  float factor;  // what the cast multiplies by; includes `norm`
};

// The scale for a largest absolute value of amax * norm, where `norm` is what the transform leaves out.
//
// The cast multiplies by `factor` and does not divide by `descale`. The two agree within 2^-22, and e4m3 rounds to
// 2^-4, so that only a value that close to a tie may become its neighbour. If descale would have no reciprocal in
// float32, it is larger, and the values stay below 448.
CUTLASS_DEVICE Scale make_scale(float amax, float norm) {
  float const largest = fmaxf(amax * norm, kE4m3Max * FLT_MIN);
  float const descale = divide_approx(largest, kE4m3Max);
  float const factor = norm * divide_approx(kE4m3Max / 256.f, largest / 256.f);  // 256: largest may be near 2^128
  return {amax == 0.f ? 1.f : isinf(amax) ? amax : descale, isinf(amax) ? 0.f : factor};
}

template <class Config>
CUTLASS_DEVICE void write_descale(TileWalk<Config> const& tiles, ThreadRow<Config> const& thread, Pass pass,
                                  float descale) {
  Tile const& tile = tiles.tile;
  if (tiles.warp_idx % Config::kWarpsPerTile == 0 && thread.lane_idx == 0) {
    if (pass == Pass::kBlockScales) {
      tiles.params.descale[int64_t(tile.bh) * tiles.order.num_blocks + tile.block] = descale;
    } else if (tile.block == 0) {
      tiles.params.descale[tile.bh] = descale;
    }
  }
}

// Casts the values and writes the tile.
template <class Config>
CUTLASS_DEVICE void cast_and_store(TileWalk<Config> const& tiles, Steps const& steps, ThreadRow<Config> const& thread,
                                   Fragment const& x, float factor) {
  uint2 x8[8];
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 8; ++i) {
    x8[i] = to_e4m3(x[i], factor);
  }
  if (tiles.params.transpose) {
    store_transposed(tiles, thread, x8);
  } else {
    store_rows(tiles, thread, steps.transforms, x8);
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    quantize_fp8_kernel(__grid_constant__ QuantizeKernelParams const params, TileOrder const order, Pass pass,
                        float norm) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  TileWalk<Config> tiles(params, order, smem);
  Steps const steps(params, Config::kWidth);
  auto const mean_of = [&](Tile const& tile) { return params.mean + int64_t(tile.bh) * params.head_dim; };

  tiles.init_barrier();
  write_signs<Config>(params.signs, steps, smem);
  __syncthreads();

  for (tiles.begin(); tiles.is_valid(); tiles.advance()) {
    ThreadRow<Config> const thread;
    Fragment x;
    tiles.wait();
    read_and_rotate(tiles, steps, thread, x);
    if (params.mean != nullptr) {
      subtract_mean(thread, mean_of(tiles.tile), params.head_dim, x);
    }
    tiles.load_next([&](Tile const& next) {
      if (params.mean != nullptr) {
        prefetch_mean(mean_of(next), params.head_dim);
      }
    });

    float amax = transform(tiles, steps, thread, x);
    if (pass != Pass::kHeadScales) {
      bool const is_row = tiles.first_row + thread.row < params.seqlen;
      amax = warp_max(is_row ? amax : 0.f);
    }
    if (pass == Pass::kHeadAmax) {
      if (thread.lane_idx == 0) {
        atomicMax(reinterpret_cast<unsigned*>(&params.amax[tiles.tile.bh]), __float_as_uint(amax));
      }
      continue;
    }
    amax = pass == Pass::kBlockScales ? tile_max(tiles, thread, amax) : params.amax[tiles.tile.bh];
    Scale const scale = make_scale(amax, norm);
    write_descale(tiles, thread, pass, scale.descale);
    cast_and_store(tiles, steps, thread, x, scale.factor);
  }
  wait_for_stores();  // the last stores must have read shared memory before the CTA exits
}

}  // namespace fa3::quantize
