// The quantizer's tile, how it is spread over threads, and its shared memory.
//
// A tile is kFp8ScaleRows rows of one head. A warp owns whole rows: 32, 16 or 8 of them at a width of 64, 128 or 256
// columns. So 4, 8 or 16 warps share a tile, and the 16 warps of a CTA work on 4, 2 or 1 tiles at the same time. A
// thread owns 64 columns of one row: the same 32 of both halves. With kWidth = 128:
//
//   columns   0..31  32..63 | 64..95  96..127
//   part        0      1    |    0       1          lane = part * kRowsPerWarp + row
//
// Each pair (c, c + kWidth / 2) of a rotary embedding over all columns therefore lies in one thread, and six butterfly
// stages of the Hadamard transform stay within a thread. The other log2(kWidth) - 6 stages use shuffles. A shuffle
// costs the shared-memory pipe as much as a read of 4 bytes.
//
// The 32 columns of a half are four vectors of 8. At index i a lane holds vector i ^ (lane / 8). With this order a
// shuffle carries only vectors that the other lane needs (hadamard.cuh), and 16 lanes that write 8 bytes each of their
// rows reach all banks.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/array.h>
#include <cutlass/fast_math.h>
#include <cutlass/numeric_types.h>

#include "common/fp8_format.h"
#include "common/swizzle.h"
#include "common/tma.cuh"
#include "quantize/quantize.h"

namespace fa3::quantize {

using F32x8 = cutlass::Array<float, 8>;  // values of 8 adjacent columns
using Fragment = F32x8[8];               // a thread's 64 values of a tile

CUTLASS_DEVICE float& element(Fragment& x, int i) { return x[i / 8][i % 8]; }

template <class Element_, int kWidth_>
struct QuantizeConfig {
  using Element = Element_;

  static constexpr int kWidth = kWidth_;
  static constexpr int kThreadsPerRow = kWidth / 64;
  static constexpr int kRowsPerWarp = 32 / kThreadsPerRow;

  static constexpr int kNumThreads = 512;  // at 128 registers each: one CTA per SM
  static constexpr int kNumWarps = kNumThreads / 32;
  static constexpr int kWarpsPerTile = kFp8ScaleRows / kRowsPerWarp;
  static constexpr int kNumTiles = kNumWarps / kWarpsPerTile;  // in flight per CTA

  // A warp's rows lie in slabs of 128 bytes of columns, [kRowsPerWarp][128], swizzled (common/tma.cuh).
  static constexpr int kSlabBytes = kRowsPerWarp * 128;
  static constexpr int kRowBytes = kWidth * 2;  // of x, and of the cosines and the sines
  static constexpr int kX8SlabColumns = kWidth < 128 ? kWidth : 128;

  // Each warp has its own buffers, so that a warp waits for others only to find the tile's largest absolute value.
  struct WarpSmem {
    alignas(1024) uint8_t x[kRowsPerWarp * kRowBytes];  // refilled for the next tile once this one is in registers
    uint8_t cosines[kRowsPerWarp * kRowBytes];          // float32; kept while tiles have the same rows
    uint8_t sines[kRowsPerWarp * kRowBytes];
    uint8_t x8[kRowsPerWarp * kWidth];  // column_sums_kernel: the warp's sums
  };
  struct Smem {
    WarpSmem warps[kNumWarps];
    cutlass::arch::ClusterTransactionBarrier full[kNumWarps];  // the warp's x and tables have landed
    alignas(8) uint8_t signs[kWidth];                          // encoded by sign_byte (hadamard.cuh)
    alignas(16) uint32_t flips[kWidth / 4];  // sign bits to flip in the right half, two columns each (rotary.cuh)
    float amax[2][kNumWarps];                // alternate tiles use alternate rows, so one barrier per tile is enough
  };
  static_assert(sizeof(Smem) <= 227 * 1024);
};

// Kernel parameters: the caller's, and the tensor maps through which TMA moves a warp's rows.
struct QuantizeKernelParams : QuantizeParams {
  CUtensorMap x_map;
  CUtensorMap cos_map;  // used if the tables are float32
  CUtensorMap sin_map;
  CUtensorMap x8_map;  // transposed: the box is 16 columns of a tile
};

// Offset of byte `byte` of a warp's row in slabs of kSlabWidth bytes of columns.
template <class Config, int kSlabWidth = 128>
CUTLASS_DEVICE int swizzled_offset(int row, int byte) {
  return (byte / kSlabWidth * Config::kRowsPerWarp + row) * kSlabWidth +
         (byte % kSlabWidth ^ swizzled_chunk<kSlabWidth>(row, 0) * 16);
}

// Returns its argument, but the compiler no longer knows that the value is the same for all tiles. Otherwise it keeps
// dozens of addresses that depend on it in registers across tiles, and spills.
CUTLASS_DEVICE unsigned hide_from_compiler(unsigned number) {
  asm volatile("" : "+r"(number));
  return number;
}

// Which row and which columns a thread owns, and where they lie in shared memory. Constructed anew for each tile.
template <class Config>
struct ThreadRow {
  int lane_idx;
  int row;         // among the warp's rows
  int part;        // which 32 columns of each half
  int vector_xor;  // index i holds vector i ^ vector_xor of a half

  CUTLASS_DEVICE ThreadRow() {
    lane_idx = hide_from_compiler(threadIdx.x) % 32;
    row = lane_idx % Config::kRowsPerWarp;
    part = lane_idx / Config::kRowsPerWarp;
    vector_xor = lane_idx / 8;
  }

  // First column of x[i]. Indices 0 to 3 are in the left half, 4 to 7 in the right half.
  CUTLASS_DEVICE int column(int i) const { return i / 4 * (Config::kWidth / 2) + part * 32 + (i % 4 ^ vector_xor) * 8; }

  // Offset of x[i] in the warp's x: swizzled_offset(row, column(i) * 2), computed from one register. In a table of
  // float32 the entries of its interleaved pairs, from column(i) / 2 on, have the same offset.
  CUTLASS_DEVICE int x_offset(int i) const {
    int const byte = i / 4 * Config::kWidth + i % 4 * 16;  // from the thread's first byte
    return (swizzled_offset<Config>(row, part * 64 + vector_xor * 16) ^ (byte % 128)) + byte / 128 * Config::kSlabBytes;
  }

  // Offset of the quantized x[i] in the warp's x8. The Hadamard transform exchanges bits of `part` with bits of i.
  // After it, the low bits of the vector's index within its half are vector_xor, and bits of i stand above them (with
  // four threads per row) or are combined with them (with one or two).
  CUTLASS_DEVICE int x8_offset(int i, bool transformed) const {
    constexpr int kSlab = Config::kX8SlabColumns;
    int const bit0 = transformed && Config::kThreadsPerRow == 4 ? 32 : 8;
    int const bit1 = transformed && Config::kThreadsPerRow >= 2 ? 16 * Config::kThreadsPerRow : 16;
    int const half = i / 4 * (Config::kWidth / 2);
    int const first = swizzled_offset<Config, kSlab>(row, (transformed ? 0 : part * 32) + vector_xor * 8);
    return (first ^ (i & 1 ? bit0 : 0) ^ (i & 2 ? bit1 : 0) ^ half % kSlab) +
           half / kSlab * kSlab * Config::kRowsPerWarp;
  }
};

struct Tile {
  int block;  // of kFp8ScaleRows rows
  int batch_idx;
  int head_idx;
  int bh;  // batch-head pair: batch_idx * num_heads + head_idx

  CUTLASS_DEVICE TmaRows rows() const { return {.row_origin = 0, .wrap = 0, .outer = batch_idx}; }
};

// The tiles of a launch in order: all heads of all sequences, then the next block of rows. A CTA takes consecutive
// tiles, and so loads the rotary tables of its rows once for many heads.
struct TileOrder {
  int num_tiles;
  int num_blocks;
  cutlass::FastDivmod batch_heads;  // divides by batch * num_heads
  cutlass::FastDivmod heads;

  CUTLASS_DEVICE int first_tile_of(int cta) const {
    int const num_ctas = gridDim.x;
    return num_tiles / num_ctas * cta + min(num_tiles % num_ctas, cta);  // the first CTAs have one more
  }

  CUTLASS_DEVICE Tile operator[](int tile_idx) const {
    Tile tile;
    batch_heads(tile.block, tile.bh, tile_idx);
    heads(tile.batch_idx, tile.head_idx, tile.bh);
    return tile;
  }
};

}  // namespace fa3::quantize
