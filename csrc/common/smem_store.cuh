// Stores an accumulator that was cast to 16 bits to a slab of shared memory.
#pragma once

#include <cute/arch/copy_sm90.hpp>

#include "common/accumulator.cuh"
#include "common/swizzle.h"

namespace fa3 {

// A warp writes 16 rows of kSlabColumns columns. `packed` holds two columns per register, in the order of the
// accumulator; `slab` is the warp's first row, [16][kSlabColumns], swizzled as TMA and WGMMA expect it.
//
// stmatrix.x4 writes four 8x8 matrices; lane l gives the address of row l % 8 of matrix l / 8, which are, for 16
// columns held as accumulator registers 8t to 8t + 7 (common/accumulator.cuh):
//
//               columns 16t..16t+7   16t+8..16t+15
//   rows 0-7        matrix 0            matrix 2
//   rows 8-15       matrix 1            matrix 3
template <int kSlabColumns, class Element>
CUTLASS_DEVICE void store_rows_to_smem(uint32_t const* packed, Element* slab) {
  int const lane_idx = cutlass::canonical_lane_idx();
  int const matrix_row = lane_idx % 8 + lane_idx / 8 % 2 * 8;
  int const matrix_chunk = lane_idx / 16;  // 8 columns, 16 bytes
  Element* row = slab + matrix_row * kSlabColumns;
  CUTLASS_PRAGMA_UNROLL
  for (int column = 0; column < kSlabColumns; column += 16) {
    int const chunk = swizzled_chunk<kSlabColumns * sizeof(Element)>(matrix_row, column / 8 + matrix_chunk);
    int const reg = column / 4;
    cute::SM90_U32x4_STSM_N::copy(packed[reg], packed[reg + 1], packed[reg + 2], packed[reg + 3],
                                  *reinterpret_cast<cute::uint128_t*>(row + chunk * 8));
  }
}

}  // namespace fa3
