// Applies row-wise column limits to one tile of scores.
#pragma once

#include "common/layout.cuh"

namespace fa3 {

// Scores of columns >= limit[i] in this thread's row i become -inf. The limits count from the tile's first column.
template <class Scores>
CUTLASS_DEVICE void mask_columns(Scores& scores, int const (&limit)[kRowsPerThread]) {
  auto s = rows_and_columns(scores);
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kRowsPerThread; ++i) {
    int const thread_limit = limit[i] - accumulator_first_column();
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < decltype(cute::size<1>(s))::value; ++c) {
      if (column_offset(c) >= thread_limit) {
        s(i, c) = -INFINITY;
      }
    }
  }
}

// Scores of columns < from[i] in this thread's row i become -inf. The limits count from the tile's first column.
template <class Scores>
CUTLASS_DEVICE void mask_columns_before(Scores& scores, int const (&from)[kRowsPerThread]) {
  auto s = rows_and_columns(scores);
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kRowsPerThread; ++i) {
    int const thread_from = from[i] - accumulator_first_column();
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < decltype(cute::size<1>(s))::value; ++c) {
      if (column_offset(c) < thread_from) {
        s(i, c) = -INFINITY;
      }
    }
  }
}

}  // namespace fa3
