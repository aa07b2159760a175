// The quantiser's tile, who has what of it, and its shared memory.
//
// A tile is 128 rows of one head. A warp has whole rows: 32, 16 or 8 of them at 64, 128 or 256 columns. A thread has 64
// columns of one row, the same 32 of both halves, here with kWidth = 128:
//
//   columns   0..31  32..63 | 64..95  96..127
//   part        0      1    |    0       1          lane = part * kRowsPerWarp + row
//
// So the pairs of a rotary embedding over all columns (c, c + kWidth / 2) are a thread's own, six stages of the
// Hadamard transform too, and log2(kWidth) - 6 are left for shuffles, each of which costs the shared-memory pipe as
// much as a read of 4 bytes. Neighbouring lanes have neighbouring rows: 8 lanes that read the same 16 bytes of their
// rows must find them in different banks, hence swizzled_bytes.
#pragma once

#include <cutlass/array.h>
#include <cutlass/fast_math.h>
#include <cutlass/numeric_types.h>

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
  static constexpr int kNumWarps = kQuantizeBlock / kRowsPerWarp;
  static constexpr int kNumThreads = kNumWarps * 32;
  static constexpr int kCtasPerSm = 512 / kNumThreads;  // at 128 registers per thread

  static constexpr int kRowBytes = kWidth * 2;  // of x; of cosines and of sines too

  // What a warp needs is its own, so that only the largest value of a tile makes it wait for others.
  struct WarpSmem {
    alignas(128) uint8_t x[kRowsPerWarp * kRowBytes];  // the next tile's, as soon as this one's is in registers
    uint8_t cosines[kRowsPerWarp * kRowBytes];         // float32; kept while tiles have the same rows
    uint8_t sines[kRowsPerWarp * kRowBytes];
    uint8_t x8[kRowsPerWarp * kWidth / 2];  // one half of the columns
    float channels[kWidth];                 // the head's means; in column_sums_kernel the warp's sums
  };
  struct Smem {
    WarpSmem warps[kNumWarps];
    float signs[kWidth];
    float amax[2][kNumWarps];  // of tiles in turn, so that one barrier per tile is enough
  };

  // 228 KB per SM, of which each CTA takes 1 KB for the system.
  static_assert(kCtasPerSm * (sizeof(Smem) + 1024) <= 228 * 1024);
};

// Where byte `byte` of row `row` lies among rows of kRowBytes bytes, so that the same 16 bytes of 8 rows are in all 8
// sets of banks.
template <int kRowBytes>
CUTLASS_DEVICE int swizzled_bytes(int row, int byte) {
  constexpr int kRowsPerLine = kRowBytes < 128 ? 128 / kRowBytes : 1;  // a line: all banks
  constexpr int kChunksPerRow = kRowBytes < 128 ? kRowBytes / 16 : 8;
  return row * kRowBytes + (byte ^ (row / kRowsPerLine % kChunksPerRow * 16));
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
  int warp_idx;
  int lane_idx;
  int row;   // in the warp's rows
  int part;  // of the columns of a half

  CUTLASS_DEVICE ThreadRow() {
    unsigned const thread_idx = opaque(threadIdx.x);
    warp_idx = thread_idx / 32;
    lane_idx = thread_idx % 32;
    row = thread_idx % Config::kRowsPerWarp;
    part = thread_idx % 32 / Config::kRowsPerWarp;
  }

  CUTLASS_DEVICE int first_row(HeadBlock const& tile) const {  // of the warp
    return tile.block * kQuantizeBlock + warp_idx * Config::kRowsPerWarp;
  }

  // First column of the thread's vector i of 8: four are of the left half, four of the right.
  CUTLASS_DEVICE int column(int i) const { return i / 4 * (Config::kWidth / 2) + part * 32 + i % 4 * 8; }

  // Where that vector lies among the warp's rows: swizzled_bytes<kRowBytes>(row, column(i) * 2), but from one register.
  // The numbers of its pairs (column(i) / 2), as float32, lie at the same place.
  CUTLASS_DEVICE int offset(int i) const {
    int const byte = i / 4 * Config::kWidth + i % 4 * 16;  // from the thread's first
    return (swizzled_bytes<Config::kRowBytes>(row, part * 64) ^ (byte % 128)) + byte / 128 * 128;
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

}  // namespace fa3
