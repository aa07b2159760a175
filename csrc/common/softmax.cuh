// Online softmax of the two rows of a score tile that a thread holds.
#pragma once

#include "common/accumulator.cuh"

namespace fa3 {

CUTLASS_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));  // one MUFU; exp2f() adds three instructions for denormals
  return y;
}

template <class T, class Op>
CUTLASS_DEVICE T quad_reduce(T x, Op op) {
  x = op(x, __shfl_xor_sync(0xffffffff, x, 2));
  return op(x, __shfl_xor_sync(0xffffffff, x, 1));
}

struct Max {
  CUTLASS_DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
  CUTLASS_DEVICE float operator()(float a, float b) const { return a + b; }
};

// Multiplies each row of an accumulator with its factor.
template <class Accumulator>
CUTLASS_DEVICE void rescale(Accumulator& accumulator, float const (&factor)[kRowsPerThread]) {
  auto rows = rows_and_columns(accumulator);
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kRowsPerThread; ++i) {
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < decltype(cute::size<1>(rows))::value; ++c) {
      rows(i, c) *= factor[i];
    }
  }
}

// The maximum and the sum of each row so far.
struct RowStatistics {
  float row_max[kRowsPerThread];
  float row_sum[kRowsPerThread];

  CUTLASS_DEVICE void reset() {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsPerThread; ++i) {
      row_max[i] = -INFINITY;
      row_sum[i] = 0.f;
    }
  }

 protected:
  // Of the scores, and of row_max where it is in the same units: first in the chain it delays nothing.
  template <bool kWithRowMax, class Scores>
  CUTLASS_DEVICE void max_of_rows(Scores& scores, float (&max)[kRowsPerThread]) const {
    auto s = rows_and_columns(scores);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsPerThread; ++i) {
      // Two chains, to halve the latency.
      float max_even = kWithRowMax ? fmaxf(row_max[i], s(i, 0)) : s(i, 0), max_odd = s(i, 1);
      CUTLASS_PRAGMA_UNROLL
      for (int c = 2; c < decltype(cute::size<1>(s))::value; c += 2) {
        max_even = fmaxf(max_even, s(i, c));
        max_odd = fmaxf(max_odd, s(i, c + 1));
      }
      max[i] = quad_reduce(fmaxf(max_even, max_odd), Max{});
    }
  }

  // A row that has seen no key yet has maximum -inf; 0 in its place keeps (-inf) - max from being NaN.
  CUTLASS_DEVICE static float finite_max(float max) { return max == -INFINITY ? 0.f : max; }
};

// For scores of 16-bit inputs, which all have the same scale. row_max is of the raw scores; row_sum of this thread's
// columns only, until finish().
struct OnlineSoftmax : RowStatistics {
  // Takes a tile of raw scores (-inf where masked) into row_max. `correction` is what earlier results of each row must
  // be multiplied with. scale_log2 is softmax_scale * log2(e).
  template <class Scores>
  CUTLASS_DEVICE void update_max(Scores& scores, float scale_log2, float (&correction)[kRowsPerThread]) {
    float new_max[kRowsPerThread];
    max_of_rows</*kWithRowMax=*/true>(scores, new_max);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsPerThread; ++i) {
      correction[i] = exp2_approx((row_max[i] - finite_max(new_max[i])) * scale_log2);
      row_max[i] = new_max[i];
    }
  }

  // Then turns the scores into P = exp2((score - max) * scale_log2), in place, and adds it to row_sum.
  template <class Scores>
  CUTLASS_DEVICE void exponentiate(Scores& scores, float scale_log2, float const (&correction)[kRowsPerThread]) {
    auto s = rows_and_columns(scores);
    constexpr int kNumColumns = decltype(cute::size<1>(s))::value;
    float max_scaled[kRowsPerThread];
    bool large = false;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsPerThread; ++i) {
      max_scaled[i] = finite_max(row_max[i]) * scale_log2;
      large |= fabsf(max_scaled[i]) > kLargestFusedScore;
    }
    // score * scale - max * scale in one FFMA is off by half an ulp of max * scale. Where that could matter, subtract
    // first.
    if (__any_sync(0xffffffff, large)) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRowsPerThread; ++i) {
        float const subtract = finite_max(row_max[i]);
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < kNumColumns; ++c) {
          s(i, c) -= subtract;
        }
        max_scaled[i] = 0.f;
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsPerThread; ++i) {
      float sum_even = row_sum[i] * correction[i], sum_odd = 0.f;
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kNumColumns; c += 2) {
        s(i, c) = exp2_approx(fmaf(s(i, c), scale_log2, -max_scaled[i]));
        s(i, c + 1) = exp2_approx(fmaf(s(i, c + 1), scale_log2, -max_scaled[i]));
        sum_even += s(i, c);
        sum_odd += s(i, c + 1);
      }
      row_sum[i] = sum_even + sum_odd;
    }
  }

  // After the last tile: completes row_sum over the quad, and returns the factor that normalizes the output of each row
  // and its log-sum-exp (natural log). A row without keys gets 0 and -inf.
  CUTLASS_DEVICE void finish(float softmax_scale, float (&inverse)[kRowsPerThread], float (&lse)[kRowsPerThread]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsPerThread; ++i) {
      float const sum = quad_reduce(row_sum[i], Sum{});
      inverse[i] = sum == 0.f ? 0.f : __fdividef(1.f, sum);
      lse[i] = sum == 0.f ? -INFINITY : row_max[i] * softmax_scale + __logf(sum);
    }
  }

 private:
  static constexpr float kLargestFusedScore = 65536.f;  // half an ulp is 2^-8 in the exponent
};

}  // namespace fa3
