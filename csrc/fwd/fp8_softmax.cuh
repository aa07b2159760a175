// Online softmax for FP8: a scale of its own for every tile of scores, and P scaled up into the range of e4m3.
#pragma once

#include "common/softmax.cuh"

namespace fa3 {

// P is at most 1; 2^8 times as large, probabilities down to 2^-17 are e4m3 numbers (of which the largest is 448).
constexpr float kPScaleLog2 = 8.f;

// In place of a scale of 0, which would make NaN of a masked score's -inf.
constexpr float kSmallestScale = 1e-37f;

struct ScaledSoftmax {
  float row_max[kRowsPerThread];  // of the scaled scores, in base 2: the scale of the scores differs from tile to tile
  float row_sum[kRowsPerThread];  // 2^kPScaleLog2 times as large; this thread's columns only, until finish()

  CUTLASS_DEVICE void reset() {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsPerThread; ++i) {
      row_max[i] = -INFINITY;
      row_sum[i] = 0.f;
    }
  }

  // As OnlineSoftmax::update, for raw scores that `scale_log2` > 0 turns into exponents of 2.
  template <class Scores>
  CUTLASS_DEVICE void update(Scores& scores, float scale_log2, float (&correction)[kRowsPerThread]) {
    auto s = rows_and_columns(scores);
    constexpr int kNumColumns = decltype(cute::size<1>(s))::value;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsPerThread; ++i) {
      float max_even = s(i, 0), max_odd = s(i, 1);
      CUTLASS_PRAGMA_UNROLL
      for (int c = 2; c < kNumColumns; c += 2) {
        max_even = fmaxf(max_even, s(i, c));
        max_odd = fmaxf(max_odd, s(i, c + 1));
      }
      float const new_max = fmaxf(row_max[i], quad_reduce(fmaxf(max_even, max_odd), Max{}) * scale_log2);
      // A row that has seen no key yet has maximum -inf; 0 in its place keeps (-inf) - max from being NaN.
      float const subtract = new_max == -INFINITY ? 0.f : new_max;
      correction[i] = exp2_approx(row_max[i] - subtract);
      row_max[i] = new_max;
      float sum_even = row_sum[i] * correction[i], sum_odd = 0.f;
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kNumColumns; c += 2) {
        s(i, c) = exp2_approx(fmaf(s(i, c), scale_log2, kPScaleLog2 - subtract));
        s(i, c + 1) = exp2_approx(fmaf(s(i, c + 1), scale_log2, kPScaleLog2 - subtract));
        sum_even += s(i, c);
        sum_odd += s(i, c + 1);
      }
      row_sum[i] = sum_even + sum_odd;
    }
  }

  // As OnlineSoftmax::finish. The scale is in row_max already.
  CUTLASS_DEVICE void finish(float /*softmax_scale*/, float (&inverse)[kRowsPerThread], float (&lse)[kRowsPerThread]) {
    constexpr float kLn2 = 0.693147180559945309417f;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsPerThread; ++i) {
      float const sum = quad_reduce(row_sum[i], Sum{});
      inverse[i] = sum == 0.f ? 0.f : __fdividef(1.f, sum);
      lse[i] = sum == 0.f ? -INFINITY : (row_max[i] - kPScaleLog2) * kLn2 + __logf(sum);
    }
  }
};

}  // namespace fa3
