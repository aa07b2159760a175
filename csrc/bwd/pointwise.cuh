// What the backward computes between its GEMMs: P from S, dS from P and dP, on the transposed tiles (rows are keys).
#pragma once

#include "bwd/steps.cuh"
#include "common/mask.cuh"
#include "common/softmax.cuh"

namespace fa3::bwd {

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

// The mask of 64 keys from `first_key` on.
template <class Config>
class KeyMask {
 public:
  CUTLASS_DEVICE KeyMask(KernelParams const& params, int batch_idx, int first_key)
      : params_(params), batch_idx_(batch_idx), first_key_(first_key) {
    BlockRange const range = mask().query_blocks(first_key, kRowsPerWarpgroup, Config::kTileM);
    unmasked_begin_ = range.unmasked_begin;
    unmasked_end_ = range.unmasked_end;
  }

  // Hides the scores of the queries of a step that do not see a key.
  template <class Scores>
  CUTLASS_DEVICE void apply(Scores& scores, int m_block) const {
    if (unmasked_begin_ <= m_block && m_block < unmasked_end_) {
      return;
    }
    Mask const mask = this->mask();
    int begin[kRowsPerThread], end[kRowsPerThread];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsPerThread; ++i) {
      auto const queries = mask.queries_of(first_key_ + accumulator_row(i));
      begin[i] = queries.begin - m_block * Config::kTileM;
      end[i] = queries.end - m_block * Config::kTileM;
    }
    mask_outside(scores, begin, end);
  }

 private:
  CUTLASS_DEVICE Mask mask() const {
    return Mask(params_.mask, queries_with_keys(params_.seqlen, params_.mask, batch_idx_));
  }

  KernelParams const& params_;
  int batch_idx_;
  int first_key_;
  int unmasked_begin_;
  int unmasked_end_;
};

}  // namespace fa3::bwd
