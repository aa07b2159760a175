// Applies row-wise column limits to one tile of scores: forward, rows are queries; backward, keys. Limits count from
// the tile's first column. What is hidden becomes -inf.
#pragma once

#include "common/accumulator.cuh"

namespace fa3 {

template <class Scores, class IsHidden>
CUTLASS_DEVICE void hide(Scores& scores, int const (&limits)[kRowsPerThread], IsHidden const& is_hidden) {
  auto s = rows_and_columns(scores);
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kRowsPerThread; ++i) {
    int const thread_limit = limits[i] - accumulator_first_column();
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < decltype(cute::size<1>(s))::value; ++c) {
      if (is_hidden(column_offset(c), thread_limit)) {
        s(i, c) = -INFINITY;
      }
    }
  }
}

// Hides columns >= end[i] of this thread's row i.
template <class Scores>
CUTLASS_DEVICE void mask_from(Scores& scores, int const (&end)[kRowsPerThread]) {
  hide(scores, end, [](int column, int limit) { return column >= limit; });
}

// Hides columns < begin[i] of this thread's row i.
template <class Scores>
CUTLASS_DEVICE void mask_before(Scores& scores, int const (&begin)[kRowsPerThread]) {
  hide(scores, begin, [](int column, int limit) { return column < limit; });
}

// Both. Most tiles that need a mask need one side of it: a warp does each only where one of its rows needs it.
template <class Scores>
CUTLASS_DEVICE void mask_outside(Scores& scores, int const (&begin)[kRowsPerThread], int const (&end)[kRowsPerThread]) {
  constexpr int kNumColumns = decltype(cute::size(scores))::value / kRowsPerThread * 4;
  if (__any_sync(0xffffffff, begin[0] > 0 || begin[1] > 0)) {
    mask_before(scores, begin);
  }
  if (__any_sync(0xffffffff, end[0] < kNumColumns || end[1] < kNumColumns)) {
    mask_from(scores, end);
  }
}

}  // namespace fa3
