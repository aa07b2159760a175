// The quantiser's tile, who has what of it, and its shared memory.
//
// A tile is 128 rows of one head. A warp has whole rows: 32, 16 or 8 of them at 64, 128 or 256 columns, so that 4, 8 or
// 16 warps work on a tile and a CTA of 16 warps on 4, 2 or 1. A thread has 64 columns of one row, the same 32 of both
// halves, here with kWidth = 128:
//
//   columns   0..31  32..63 | 64..95  96..127
//   part        0      1    |    0       1          lane = part * kRowsPerWarp + row
//
// So the pairs of a rotary embedding over all columns (c, c + kWidth / 2) are a thread's own, six stages of the
// Hadamard transform too, and log2(kWidth) - 6 are left for shuffles, each of which costs the shared-memory pipe as
// much as a read of 4 bytes.
//
// The 32 columns of a half are four vectors of 8. A lane has them in the order 0 1 2 3, each number xor lane / 8: then
// shuffles need to carry only the vectors that another lane is to have (hadamard.cuh), and 16 lanes that write 8 bytes
// of their rows find all banks.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/array.h>
#include <cutlass/fast_math.h>
#include <cutlass/numeric_types.h>

#include "common/swizzle.h"
#include "common/tma.cuh"
#include "quantize/quantize.h"

namespace fa3 {

using Vector = cutlass::Array<float, 8>;  // neighbouring columns

// Number i of a thread's 64.
CUTLASS_DEVICE float& value(Vector (&x)[8], int i) { return x[i / 8][i % 8]; }

template <class Element_, int kWidth_>
struct QuantizeConfig {
  using Element = Element_;

  static constexpr int kWidth = kWidth_;
  static constexpr int kThreadsPerRow = kWidth / 64;
  static constexpr int kRowsPerWarp = 32 / kThreadsPerRow;

  static constexpr int kNumThreads = 512;  // at 128 registers each: one CTA per SM
  static constexpr int kNumWarps = kNumThreads / 32;
  static constexpr int kWarpsPerTile = kQuantizeBlock / kRowsPerWarp;
  static constexpr int kNumTiles = kNumWarps / kWarpsPerTile;  // at the same time

  // Rows lie in slabs of 128 bytes of columns, [kRowsPerWarp][128], swizzled (common/tma.cuh).
  static constexpr int kSlabBytes = kRowsPerWarp * 128;
  static constexpr int kRowBytes = kWidth * 2;  // of x; of cosines and of sines too
  static constexpr int kX8SlabColumns = kWidth < 128 ? kWidth : 128;

  // What a warp needs is its own, so that only the largest value of a tile makes it wait for others.
  struct WarpSmem {
    alignas(1024) uint8_t x[kRowsPerWarp * kRowBytes];  // the next tile's, as soon as this one's is in registers
    uint8_t cosines[kRowsPerWarp * kRowBytes];          // float32; kept while tiles have the same rows
    uint8_t sines[kRowsPerWarp * kRowBytes];
    uint8_t x8[kRowsPerWarp * kWidth];  // in column_sums_kernel the warp's sums
  };
  struct Smem {
    WarpSmem warps[kNumWarps];
    cutlass::arch::ClusterTransactionBarrier full[kNumWarps];  // the warp's x and tables have landed
    alignas(8) uint8_t signs[kWidth];                          // as hadamard.cuh has them
    alignas(16) uint32_t flips[kWidth / 4];                    // of two columns each, of the right half (rotary.cuh)
    float amax[2][kNumWarps];  // of tiles in turn, so that one barrier per tile is enough
  };
  static_assert(sizeof(Smem) <= 227 * 1024);
};

// What the kernels are told: the caller's parameters, and how TMA finds the rows of a warp.
struct QuantizeKernelParams : QuantizeParams {
  CUtensorMap x_map;
  CUtensorMap cos_map;  // of float32 tables only
  CUtensorMap sin_map;
  CUtensorMap x8_map;  // transposed: 16 columns of a tile
};

// Where byte `byte` of a warp's row lies among slabs of kSlabWidth bytes of columns.
template <class Config, int kSlabWidth = 128>
CUTLASS_DEVICE int place(int row, int byte) {
  return (byte / kSlabWidth * Config::kRowsPerWarp + row) * kSlabWidth +
         (byte % kSlabWidth ^ swizzled_chunk<kSlabWidth>(row, 0) * 16);
}

// A tile.
struct HeadBlock {
  int block;  // of rows
  int batch_idx;
  int head_idx;
  int head_batch;  // batch_idx * num_heads + head_idx
};

// The same number, of which the compiler no longer knows that it is the same for all tiles: else it would keep dozens
// of addresses that depend on it in registers, and spill.
CUTLASS_DEVICE unsigned opaque(unsigned number) {
  asm volatile("" : "+r"(number));
  return number;
}

// What a thread has. Made anew for each tile.
template <class Config>
struct ThreadRow {
  int lane_idx;
  int row;   // in the warp's rows
  int part;  // of the columns of a half
  int swap;  // of the vectors

  CUTLASS_DEVICE ThreadRow() {
    lane_idx = opaque(threadIdx.x) % 32;
    row = lane_idx % Config::kRowsPerWarp;
    part = lane_idx / Config::kRowsPerWarp;
    swap = lane_idx / 8;
  }

  // First column of the thread's vector i of 8: four are of the left half, four of the right.
  CUTLASS_DEVICE int column(int i) const { return i / 4 * (Config::kWidth / 2) + part * 32 + (i % 4 ^ swap) * 8; }

  // Where vector i lies among the warp's rows of x: place(row, column(i) * 2), but from one register. The numbers of
  // its pairs (column(i) / 2), as float32, lie at the same place.
  CUTLASS_DEVICE int offset(int i) const {
    int const byte = i / 4 * Config::kWidth + i % 4 * 16;  // from the thread's first
    return (place<Config>(row, part * 64 + swap * 16) ^ (byte % 128)) + byte / 128 * Config::kSlabBytes;
  }

  // Where it lies among those of x8. The Hadamard transform exchanges bits of `part` for bits of i: after it the
  // vector's number in its half is swap, with those bits of i above (or, where a row has one or two threads, in their
  // place).
  CUTLASS_DEVICE int offset_of_x8(int i, bool transformed) const {
    constexpr int kSlab = Config::kX8SlabColumns;
    int const bit0 = transformed && Config::kThreadsPerRow == 4 ? 32 : 8;
    int const bit1 = transformed && Config::kThreadsPerRow >= 2 ? 16 * Config::kThreadsPerRow : 16;
    int const half = i / 4 * (Config::kWidth / 2);
    int const first = place<Config, kSlab>(row, (transformed ? 0 : part * 32) + swap * 8);
    return (first ^ (i & 1 ? bit0 : 0) ^ (i & 2 ? bit1 : 0) ^ half % kSlab) +
           half / kSlab * kSlab * Config::kRowsPerWarp;
  }
};

// The tiles of a launch, in order: all heads of all sequences before the next block of rows. A CTA takes neighbours,
// and so reads the rotary tables of its rows once for many heads.
struct HeadBlocks {
  int num_tiles;
  int num_blocks;
  cutlass::FastDivmod head_batches;  // batch x num_heads
  cutlass::FastDivmod heads;

  CUTLASS_DEVICE int first_of(int cta) const {
    int const num_ctas = gridDim.x;
    return num_tiles / num_ctas * cta + min(num_tiles % num_ctas, cta);  // the first CTAs have one more
  }

  CUTLASS_DEVICE HeadBlock operator[](int number) const {
    HeadBlock tile;
    head_batches(tile.block, tile.head_batch, number);
    heads(tile.batch_idx, tile.head_idx, tile.head_batch);
    return tile;
  }
};

// A warp's way through the tiles of its CTA: every kNumTiles-th one.
template <class Config>
struct WarpTiles {
  HeadBlocks const& tiles;
  int const warp_idx = cutlass::canonical_warp_idx_sync();
  int const slot = warp_idx / Config::kWarpsPerTile;  // its tile's, of kNumTiles
  int number;
  int end;
  int parity = 0;  // of the tile in the warp's order

  CUTLASS_DEVICE explicit WarpTiles(HeadBlocks const& tiles)
      : tiles(tiles), number(tiles.first_of(blockIdx.x) + slot), end(tiles.first_of(blockIdx.x + 1)) {}

  CUTLASS_DEVICE bool is_tile() const { return number < end; }
  CUTLASS_DEVICE bool has_next() const { return number + Config::kNumTiles < end; }
  CUTLASS_DEVICE HeadBlock tile() const { return tiles[number]; }
  CUTLASS_DEVICE HeadBlock next() const { return tiles[number + Config::kNumTiles]; }

  CUTLASS_DEVICE void advance() {
    number += Config::kNumTiles;
    parity ^= 1;
  }

  CUTLASS_DEVICE int first_row(HeadBlock const& tile) const {
    return tile.block * kQuantizeBlock + warp_idx % Config::kWarpsPerTile * Config::kRowsPerWarp;
  }

  // Waits for the warps that work on the same tile.
  CUTLASS_DEVICE void sync() const { cutlass::arch::NamedBarrier::sync(Config::kWarpsPerTile * 32, slot); }
};

}  // namespace fa3
