// A warp's rows of a tile, from global to shared memory while the warp works on the tile before, then to registers.
#pragma once

#include <cutlass/arch/memory_sm80.h>
#include <cutlass/numeric_conversion.h>

#include "quantize/config.h"

namespace fa3 {

CUTLASS_DEVICE Vector read_vector(float const* values) {
  return *reinterpret_cast<cutlass::AlignedArray<float, 8, 16> const*>(values);
}

CUTLASS_DEVICE void copy_async(void* smem, void const* global, bool is_inside) {  // 16 bytes, or zeros
  cutlass::arch::cp_async_zfill<16, cutlass::arch::CacheOperation::Global>(smem, global, is_inside);
}

// Begins to bring a tile's rows, with what else its values need: the head's means (null: none), and, where `new_rows`
// says that they are others than before, the rows' cosines and sines. Rows past seqlen and columns past head_dim come
// as zeros. To be called when all lanes have read the tile before.
template <class Config>
CUTLASS_DEVICE void prefetch(QuantizeParams const& params, float const* mean, bool new_rows, HeadBlock const& tile,
                             typename Config::WarpSmem& smem) {
  using Element = typename Config::Element;
  constexpr int kChunks = Config::kRowBytes / 16;  // per row
  constexpr int kRowsPerPass = 32 / kChunks;
  ThreadRow<Config> const thread;
  int const chunk = thread.lane_idx % kChunks;
  int const first_row = thread.first_row(tile) + thread.lane_idx / kChunks;  // of the lane
  auto const offset = [&](int pass) {
    return swizzled_bytes<Config::kRowBytes>(pass + thread.lane_idx / kChunks, chunk * 16);
  };

  auto const* x = static_cast<Element const*>(params.x.data) + tile.batch_idx * params.x.batch_stride +
                  first_row * params.x.row_stride + tile.head_idx * params.x.head_stride + chunk * 8;
  CUTLASS_PRAGMA_UNROLL
  for (int pass = 0; pass < Config::kRowsPerWarp; pass += kRowsPerPass) {
    copy_async(smem.x + offset(pass), x, first_row + pass < params.seqlen && chunk * 8 < params.head_dim);
    x += kRowsPerPass * params.x.row_stride;
  }
  if (mean != nullptr) {
    mean += int64_t(tile.head_batch) * params.head_dim;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Config::kWidth; i += 32 * 4) {
      int const column = i + thread.lane_idx * 4;
      if (column < Config::kWidth) {
        copy_async(&smem.channels[column], mean + column, column < params.head_dim);
      }
    }
  }

  if (new_rows && chunk * 8 < params.rotary.dim) {
    int const half = params.rotary.dim / 2;
#pragma unroll 4
    for (int pass = 0; pass < Config::kRowsPerWarp; pass += kRowsPerPass) {
      int64_t const begin = int64_t(first_row + pass) * half + chunk * 4;
      bool const is_inside = first_row + pass < params.seqlen;
      if (params.rotary.is_float) {
        copy_async(smem.cosines + offset(pass), static_cast<float const*>(params.rotary.cos) + begin, is_inside);
        copy_async(smem.sines + offset(pass), static_cast<float const*>(params.rotary.sin) + begin, is_inside);
      } else {
        auto const converted = [&](void const* table) {
          uint2 const packed =
              is_inside ? __ldg(reinterpret_cast<uint2 const*>(static_cast<Element const*>(table) + begin)) : uint2{};
          auto const values = cutlass::NumericArrayConverter<float, Element, 4>::convert(
              reinterpret_cast<cutlass::Array<Element, 4> const&>(packed));
          return make_float4(values[0], values[1], values[2], values[3]);
        };
        *reinterpret_cast<float4*>(smem.cosines + offset(pass)) = converted(params.rotary.cos);
        *reinterpret_cast<float4*>(smem.sines + offset(pass)) = converted(params.rotary.sin);
      }
    }
  }
  cutlass::arch::cp_async_fence();
}

// 8 neighbouring columns of x, as they came, at a byte of the staged rows.
template <class Config>
CUTLASS_DEVICE Vector read_x(typename Config::WarpSmem const& smem, int offset) {
  using Element = typename Config::Element;
  uint4 const packed = *reinterpret_cast<uint4 const*>(smem.x + offset);
  return cutlass::NumericArrayConverter<float, Element, 8>::convert(
      reinterpret_cast<cutlass::Array<Element, 8> const&>(packed));
}

// The thread's columns of the tile that was prefetched.
template <class Config>
CUTLASS_DEVICE void read_row(ThreadRow<Config> const& thread, typename Config::WarpSmem const& smem, Vector (&x)[8]) {
  cutlass::arch::cp_async_wait<0>();
  __syncwarp();  // what the other lanes have copied
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 8; ++i) {
    x[i] = read_x<Config>(smem, thread.offset(i));
  }
  // Converted here, and not, with registers for both, in each branch of what follows.
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 64; ++i) {
    asm volatile("" : "+f"(value(x, i)));
  }
}

}  // namespace fa3
