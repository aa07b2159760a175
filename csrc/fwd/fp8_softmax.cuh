// Online softmax for FP8: every block of keys has a scale of its own, and P is scaled up into the range of e4m3.
#pragma once

#include <cutlass/numeric_conversion.h>

#include "common/fp8_format.h"
#include "common/softmax.cuh"

namespace fa3::fwd {

// P is at most 1; 2^8 times as large, probabilities down to 2^-17 are e4m3 numbers (of which the largest is 448).
constexpr float kPScaleLog2 = 8.f;

// row_max is of the scaled scores, in base 2. row_sum is of the rounded, scaled P, which is what O is to be divided by:
// the tensor cores compute it as an extra column of P V, so it is one block behind row_max.
struct BlockScaledSoftmax : RowStatistics {
  // Takes a tile of raw scores (-inf where masked), which `scale_log2` > 0 turns into exponents of 2, into row_max.
  // `correction` is what earlier results of each row must be multiplied with.
  template <bool kAsIntegers, class Scores>
  CUTLASS_DEVICE void update_max(Scores& scores, float scale_log2, float (&correction)[kRowsPerThread]) {
    float tile_max[kRowsPerThread];
    if constexpr (kAsIntegers) {
      max_as_integers(scores, tile_max);
      bool is_wrong = false;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRowsPerThread; ++i) {
        is_wrong |= tile_max[i] < 0.f && row_max[i] < 0.f;  // a row_max that is not below 0 stays in any case
      }
      if (__any_sync(0xffffffff, is_wrong)) {
        max_of_rows</*kWithRowMax=*/false>(scores, tile_max);
      }
    } else {
      max_of_rows</*kWithRowMax=*/false>(scores, tile_max);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsPerThread; ++i) {
      float const new_max = fmaxf(row_max[i], tile_max[i] * scale_log2);
      correction[i] = exp2_approx(row_max[i] - finite_max(new_max));
      row_max[i] = new_max;
    }
  }

  CUTLASS_DEVICE void rescale_sums(float const (&correction)[kRowsPerThread]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsPerThread; ++i) {
      row_sum[i] *= correction[i];
    }
  }

  // Then P in e4m3, as an A operand over the permuted keys (common/fp8_format.h). The compiler puts the casts of some
  // scores between the exponentials of others, which take 8 cycles each, as long as no branch separates them.
  template <class Scores, class Operand>
  CUTLASS_DEVICE void exponentiate(Scores const& scores, float scale_log2, Operand& p) {
    using Convert = cutlass::NumericArrayConverter<cutlass::float_e4m3_t, float, 4>;
    constexpr int kRegisters = decltype(cute::size(p))::value / 4;
    auto* registers = reinterpret_cast<uint32_t*>(p.data());
    CUTLASS_PRAGMA_UNROLL
    for (int row = 0; row < kRowsPerThread; ++row) {
      float const offset = kPScaleLog2 - finite_max(row_max[row]);
      CUTLASS_PRAGMA_UNROLL
      for (int r = row; r < kRegisters; r += kRowsPerThread) {
        auto const exponential = [&](int j) CUTLASS_LAMBDA_FUNC_INLINE {
          return exp2_approx(fmaf(scores(first_accumulator_register(r) + j), scale_log2, offset));
        };
        auto const bytes = Convert::convert({exponential(0), exponential(1), exponential(4), exponential(5)});
        registers[r] = reinterpret_cast<uint32_t const&>(bytes);
      }
    }
  }

  // After the last tile: the factor that normalizes the output of each row and its log-sum-exp (natural log). A row
  // without keys gets 0 and -inf.
  CUTLASS_DEVICE void finish(float (&inverse)[kRowsPerThread], float (&lse)[kRowsPerThread]) {
    constexpr float kLn2 = 0.693147180559945309417f;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsPerThread; ++i) {
      inverse[i] = row_sum[i] == 0.f ? 0.f : __fdividef(1.f, row_sum[i]);
      lse[i] = row_sum[i] == 0.f ? -INFINITY : (row_max[i] - kPScaleLog2) * kLn2 + __logf(row_sum[i]);
    }
  }

 private:
  // max_of_rows in half the instructions: VIMNMX3 takes the largest of three integers. Floats that are not negative are
  // ordered as their bits are, and the bits of negative ones are less. So a result below 0 says only that the true one
  // is below 0 too.
  template <class Scores>
  CUTLASS_DEVICE static void max_as_integers(Scores& scores, float (&max)[kRowsPerThread]) {
    auto s = rows_and_columns(scores);
    constexpr int kColumns = decltype(cute::size<1>(s))::value;
    auto const larger = [](int a, int b) CUTLASS_LAMBDA_FUNC_INLINE { return a > b ? a : b; };
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsPerThread; ++i) {
      auto const bits = [&](int c) CUTLASS_LAMBDA_FUNC_INLINE { return __float_as_int(s(i, c)); };
      int max_even = larger(bits(0), bits(1)), max_odd = larger(bits(2), bits(3));
      CUTLASS_PRAGMA_UNROLL
      for (int c = 4; c < kColumns; c += 4) {
        max_even = __vimax3_s32(max_even, bits(c), bits(c + 1));
        max_odd = __vimax3_s32(max_odd, bits(c + 2), bits(c + 3));
      }
      max[i] = __int_as_float(quad_reduce(larger(max_even, max_odd), larger));
    }
  }
};

// O += scale * (P V of a block), for kCount of O's registers from `first` on.
template <int kCount, class TensorO, class TensorPV>
CUTLASS_DEVICE void add_scaled(TensorO& o, int first, TensorPV const& pv, float scale) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kCount; ++i) {
    o(first + i) = fmaf(pv(i), scale, o(first + i));
  }
}

}  // namespace fa3::fwd
