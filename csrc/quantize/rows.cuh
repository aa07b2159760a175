// Moves a warp's rows of a tile from global to shared memory, and from there to registers.
#pragma once

#include <cutlass/numeric_conversion.h>

#include "quantize/config.h"

namespace fa3::quantize {

// Four entries of a 16-bit table, as float32.
template <class Element>
CUTLASS_DEVICE float4 read_table(void const* table, int64_t index) {
  uint2 const packed = __ldg(reinterpret_cast<uint2 const*>(static_cast<Element const*>(table) + index));
  auto const values = cutlass::NumericArrayConverter<float, Element, 4>::convert(
      reinterpret_cast<cutlass::Array<Element, 4> const&>(packed));
  return make_float4(values[0], values[1], values[2], values[3]);
}

// Copies the rows' cosines and sines where the tables have x's type, which TMA cannot convert. Rows past seqlen, whose
// x is 0, take the entries of the last row.
template <class Config>
CUTLASS_DEVICE void copy_16_bit_tables(QuantizeKernelParams const& params, int first_row,
                                       typename Config::WarpSmem& smem) {
  using Element = typename Config::Element;
  constexpr int kChunks = Config::kRowBytes / 16;  // per row, of four entries
  ThreadRow<Config> const thread;
  int const chunk = thread.lane_idx % kChunks;
  int const half = params.rotary.dim / 2;
  if (chunk * 4 < half) {
#pragma unroll 4
    for (int row = thread.lane_idx / kChunks; row < Config::kRowsPerWarp; row += 32 / kChunks) {
      int64_t const index = int64_t(min(first_row + row, params.seqlen - 1)) * half + chunk * 4;
      int const offset = swizzled_offset<Config>(row, chunk * 16);
      *reinterpret_cast<float4*>(smem.cosines + offset) = read_table<Element>(params.rotary.cos, index);
      *reinterpret_cast<float4*>(smem.sines + offset) = read_table<Element>(params.rotary.sin, index);
    }
  }
  __syncwarp();
}

// Starts the loads of a warp's rows of a tile and, if `needs_tables`, of their cosines and sines. Rows past seqlen and
// columns past head_dim arrive as zeros. All lanes must have read the previous tile's rows.
template <class Config>
CUTLASS_DEVICE void issue_loads(QuantizeKernelParams const& params, Tile const& tile, int first_row, bool needs_tables,
                                cutlass::arch::ClusterTransactionBarrier& full, typename Config::WarpSmem& smem) {
  using Element = typename Config::Element;
  using CacheHint = cute::TMA::CacheHintSm90;
  bool const loads_tables = needs_tables && params.rotary.is_float;
  if (cute::elect_one_sync()) {
    full.arrive_and_expect_tx((loads_tables ? 3 : 1) * sizeof(smem.x));
    auto* barrier = reinterpret_cast<uint64_t*>(&full);
    load_tile<Config::kRowsPerWarp, Config::kWidth, 64>(params.x_map, barrier, CacheHint::EVICT_NORMAL,
                                                        reinterpret_cast<Element*>(smem.x), tile.rows(), first_row,
                                                        tile.head_idx);
    if (loads_tables) {
      TmaRows const rows{.row_origin = 0, .wrap = 0, .outer = 0};
      load_tile<Config::kRowsPerWarp, Config::kWidth / 2, 32>(
          params.cos_map, barrier, CacheHint::EVICT_NORMAL, reinterpret_cast<float*>(smem.cosines), rows, first_row, 0);
      load_tile<Config::kRowsPerWarp, Config::kWidth / 2, 32>(params.sin_map, barrier, CacheHint::EVICT_NORMAL,
                                                              reinterpret_cast<float*>(smem.sines), rows, first_row, 0);
    }
  }
  if (needs_tables && !params.rotary.is_float) {
    copy_16_bit_tables<Config>(params, first_row, smem);
  }
}

template <class Config>
CUTLASS_DEVICE F32x8 to_float(uint4 const& packed) {
  using Element = typename Config::Element;
  return cutlass::NumericArrayConverter<float, Element, 8>::convert(
      reinterpret_cast<cutlass::Array<Element, 8> const&>(packed));
}

// Reads the thread's values of the loaded tile. With kFlips, `flips` holds the sign bits to flip in the right half, one
// word for two columns.
template <bool kFlips = false, class Config>
CUTLASS_DEVICE void read_row(ThreadRow<Config> const& thread, typename Config::WarpSmem const& smem, Fragment& x,
                             uint32_t const* flips = nullptr) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 8; ++i) {
    uint4 packed = *reinterpret_cast<uint4 const*>(smem.x + thread.x_offset(i));
    if (kFlips && i >= 4) {
      uint4 const flip = *reinterpret_cast<uint4 const*>(flips + thread.column(i - 4) / 2);
      packed = {packed.x ^ flip.x, packed.y ^ flip.y, packed.z ^ flip.z, packed.w ^ flip.w};
    }
    x[i] = to_float<Config>(packed);
  }
  // Pins the conversion here. Otherwise the compiler sinks it into each branch that follows, with registers for both
  // types.
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 64; ++i) {
    asm volatile("" : "+f"(element(x, i)));
  }
}

}  // namespace fa3::quantize
