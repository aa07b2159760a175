// A tile's values, cast, from registers to global memory: as rows, or transposed as P V wants V.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cutlass/numeric_conversion.h>

#include "fwd/fp8_layout.h"
#include "quantize/config.h"

namespace fa3 {

// 16 neighbouring columns of the thread's: those of its vectors i and i + 1.
CUTLASS_DEVICE uint4 cast_columns(Vector const (&x)[8], int i, float factor) {
  cutlass::Array<float, 16> scaled;
  CUTLASS_PRAGMA_UNROLL
  for (int j = 0; j < 16; ++j) {
    scaled[j] = x[i + j / 8][j % 8] * factor;
  }
  auto const cast = cutlass::NumericArrayConverter<cutlass::float_e4m3_t, float, 16>::convert(scaled);
  return reinterpret_cast<uint4 const&>(cast);
}

// Casts a warp's rows and writes them, half of the columns at a time, through shared memory so that a row's bytes go
// out together. 8 bytes per thread: head_dim may be an odd multiple of 8.
template <class Config>
CUTLASS_DEVICE void store_rows(QuantizeParams const& params, HeadBlock const& tile, int first_row,
                               ThreadRow<Config> const& thread, float factor, Vector const (&x)[8],
                               typename Config::WarpSmem& smem) {
  constexpr int kHalf = Config::kWidth / 2;
  constexpr int kPieces = kHalf / 8;  // per row
  int64_t const row_stride = int64_t(params.num_heads) * params.columns;
  auto* out = static_cast<uint8_t*>(params.x8) + (int64_t(tile.batch_idx) * params.seqlen + first_row) * row_stride +
              int64_t(tile.head_idx) * params.columns;
  CUTLASS_PRAGMA_UNROLL
  for (int half = 0; half < 2; ++half) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<uint4*>(smem.x8 + swizzled_bytes<kHalf>(thread.row, thread.part * 32 + i * 16)) =
          cast_columns(x, half * 4 + i * 2, factor);
    }
    __syncwarp();
    CUTLASS_PRAGMA_UNROLL
    for (int pass = 0; pass < Config::kRowsPerWarp; pass += 32 / kPieces) {
      int const row = pass + thread.lane_idx / kPieces;
      int const piece = thread.lane_idx % kPieces;
      int const column = half * kHalf + piece * 8;
      if (first_row + row < params.seqlen && column < params.columns) {
        *reinterpret_cast<uint2*>(out + row * row_stride + column) =
            *reinterpret_cast<uint2 const*>(smem.x8 + swizzled_bytes<kHalf>(row, piece * 8));
      }
    }
    __syncwarp();
  }
}

// Casts a tile and writes it as x8 (batch, num_heads, columns, whole blocks of rows), the rows permuted: each warp the
// lines of 16 columns. The bytes move as fwd/fp8_layout.h draws it. V has no rotary embedding: the space of its tables
// is free, that of the cosines for the tile's rows, that of the sines for its lines.
template <class Config>
CUTLASS_DEVICE void store_transposed(QuantizeParams const& params, HeadBlock const& tile, int num_blocks,
                                     ThreadRow<Config> const& thread, float factor, Vector const (&x)[8],
                                     typename Config::Smem& smem) {
  static_assert(Config::kWidth == kTransposedChannels * Config::kNumWarps);
  constexpr int kLoads = kQuantizeBlock / kTransposedKeys;
  int const lane_idx = thread.lane_idx;
  auto& own = smem.warps[thread.warp_idx];
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 8; i += 2) {
    *reinterpret_cast<uint4*>(own.cosines + swizzled_bytes<Config::kWidth>(thread.row, thread.column(i))) =
        cast_columns(x, i, factor);
  }
  __syncthreads();
  int const first_column = thread.warp_idx * kTransposedChannels;
  uint32_t r[kLoads][4];
  CUTLASS_PRAGMA_UNROLL
  for (int load = 0; load < kLoads; ++load) {
    int const row = load * kTransposedKeys + lane_idx;
    auto const* source = smem.warps[row / Config::kRowsPerWarp].cosines +
                         swizzled_bytes<Config::kWidth>(row % Config::kRowsPerWarp, first_column);
    cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<cute::uint128_t const*>(source), r[load][0], r[load][1], r[load][2],
                                  r[load][3]);
  }
  __syncthreads();  // the next tile's rows may come
  int const first = channel_bytes(lane_idx, 0), second = channel_bytes(lane_idx, 1);
  CUTLASS_PRAGMA_UNROLL
  for (int load = 0; load < kLoads; ++load) {
    auto const& [r0, r1, r2, r3] = r[load];
    cute::SM90_U32x4_STSM_N::copy(
        __byte_perm(r0, r1, first), __byte_perm(r0, r1, second), __byte_perm(r2, r3, first),
        __byte_perm(r2, r3, second),
        *reinterpret_cast<cute::uint128_t*>(own.sines + vt_store_offset(lane_idx, load * kTransposedKeys, 0)));
  }
  __syncwarp();
  auto* out = static_cast<uint8_t*>(params.x8) +
              (int64_t(tile.head_batch) * params.columns * num_blocks + tile.block) * kQuantizeBlock;
  int const chunk = lane_idx % 8;  // of a line
  CUTLASS_PRAGMA_UNROLL
  for (int line = lane_idx / 8; line < kTransposedChannels; line += 4) {
    int const column = first_column + line;
    if (column < params.columns) {
      *reinterpret_cast<uint4*>(out + int64_t(column) * num_blocks * kQuantizeBlock + chunk * 16) =
          *reinterpret_cast<uint4 const*>(own.sines + line * kQuantizeBlock + swizzled_chunk<128>(line, chunk) * 16);
    }
  }
  __syncwarp();
}

}  // namespace fa3
