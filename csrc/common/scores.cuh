// What makes exponents of 2 of the raw scores of a tile: the scale and, for FP8, the scales of Q and of each block of
// K. A function of scores that comes before the mask (soft-capping) belongs here too.
#pragma once

#include <cutlass/cutlass.h>

#include "common/fp8_format.h"
#include "params.h"

namespace fa3 {

// Of 16-bit inputs: one factor for all blocks.
class Scores {
 public:
  Scores() = default;
  CUTLASS_DEVICE explicit Scores(ScoreParams const& params) : params_(&params) {}

  CUTLASS_DEVICE float scale_log2(int /*n_block*/) const { return params_->softmax_scale_log2; }

 private:
  ScoreParams const* params_;
};

// Of FP8 inputs: the factor differs from block to block, and P V has one too.
class BlockScaledScores {
 public:
  BlockScaledScores() = default;

  // For the rows from `first_row` on, at most kFp8ScaleRows of them, of one query head.
  CUTLASS_DEVICE BlockScaledScores(ScoreParams const& params, Fp8Params const& fp8, int batch_idx, int head_idx,
                                   int kv_head_idx, int first_row, int seqlen_q)
      : fp8_(&fp8),
        k_offset_(offset_of_head(fp8.k_descale, batch_idx, kv_head_idx)),
        v_offset_(offset_of_head(fp8.v_descale, batch_idx, kv_head_idx)) {
    int const q_offset = offset_of_head(fp8.q_descale, batch_idx, head_idx / fp8.q_descale_group);
    // Rows past the last query have no scale, and need none.
    q_scale_log2_ = first_row < seqlen_q
                        ? scale_of(fp8.q_descale, q_offset, first_row / kFp8ScaleRows) * params.softmax_scale_log2
                        : 1.f;
  }

  CUTLASS_DEVICE float scale_log2(int n_block) const {
    float const scale = scale_of(fp8_->k_descale, k_offset_, n_block) * q_scale_log2_;
    return scale == 0.f ? kSmallestScale : scale;
  }

  CUTLASS_DEVICE float v_scale(int n_block) const { return scale_of(fp8_->v_descale, v_offset_, n_block); }

 private:
  // In place of a scale of 0, which would make NaN of a masked score's -inf.
  static constexpr float kSmallestScale = 1e-37f;

  // Where the scales of a head begin, and the scale of one of its blocks. (The host checks that 32 bits are enough.)
  CUTLASS_DEVICE static int offset_of_head(BlockScales const& scales, int batch_idx, int head_idx) {
    return batch_idx * scales.batch_stride + head_idx * scales.head_stride;
  }
  CUTLASS_DEVICE static float scale_of(BlockScales const& scales, int offset, int block) {
    return scales.data[offset + block * scales.block_stride];
  }

  Fp8Params const* fp8_;
  int k_offset_;
  int v_offset_;
  float q_scale_log2_;
};

}  // namespace fa3
