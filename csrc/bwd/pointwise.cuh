// What lies between the GEMMs of the backward: P from S, dS from P and dP, on the transposed tiles (keys are rows).
#pragma once

#include "bwd/steps.cuh"
#include "common/mask.cuh"
#include "common/softmax.cuh"

namespace fa3 {

// This thread's columns of a vector with one value per query: lse or D of a step.
template <int kTileM>
struct QueryVector {
  float2 values[kTileM / 8];

  // After the wait for its pipeline.
  CUTLASS_DEVICE explicit QueryVector(float const* smem) {
    compiler_fence();
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kTileM / 8; ++j) {
      values[j] = *reinterpret_cast<float2 const*>(smem + accumulator_first_column() + 8 * j);
    }
  }
  CUTLASS_DEVICE float operator()(int column) const { return column % 2 ? values[column / 2].y : values[column / 2].x; }
};

// P^T of a tile of S^T: scores become exp2(score * scale_log2 - lse_log2).
template <class Scores, int kTileM>
CUTLASS_DEVICE void exponentials(Scores& scores, QueryVector<kTileM> const& lse_log2, float scale_log2) {
  auto s = rows_and_columns(scores);
  CUTLASS_PRAGMA_UNROLL
  for (int c = 0; c < decltype(cute::size<1>(s))::value; ++c) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsPerThread; ++i) {
      s(i, c) = exp2_approx(fmaf(s(i, c), scale_log2, -lse_log2(c)));
    }
  }
}

// dS^T = P^T (dP^T - D), in place of P^T.
template <class Scores, int kTileM>
CUTLASS_DEVICE void score_gradients(Scores& probabilities, Scores const& dprobabilities,
                                    QueryVector<kTileM> const& dsum) {
  auto p = rows_and_columns(probabilities);
  auto dp = rows_and_columns(dprobabilities);
  CUTLASS_PRAGMA_UNROLL
  for (int c = 0; c < decltype(cute::size<1>(p))::value; ++c) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsPerThread; ++i) {
      p(i, c) *= dp(i, c) - dsum(c);
    }
  }
}

// The causal mask and the end of the keys, for 64 keys from `first_key` on.
class KeyMask {
 public:
  CUTLASS_DEVICE KeyMask(BwdKernelParams const& params, int first_key)
      : params_(params), first_key_(first_key), unmasked_from_(first_query_of(first_key + kRowsPerWarpgroup - 1)) {}

  // Scores of the step whose first query is `first_row`.
  template <class Scores>
  CUTLASS_DEVICE void apply(Scores& scores, int first_row) const {
    if (first_row < unmasked_from_) {
      int const from[kRowsPerThread] = {first_query_of(first_key_ + accumulator_row(0)) - first_row,
                                        first_query_of(first_key_ + accumulator_row(1)) - first_row};
      mask_columns_before(scores, from);
    }
  }

 private:
  CUTLASS_DEVICE int first_query_of(int key) const {
    return first_query(key, params_.seqlen_q, params_.seqlen_k, params_.causal);
  }

  BwdKernelParams const& params_;
  int first_key_;
  int unmasked_from_;
};

}  // namespace fa3
