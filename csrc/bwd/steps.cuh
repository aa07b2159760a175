// The steps of a CTA's tile: every (query head of the group, m_block) that sees a key of its n_block.
#pragma once

#include "bwd/config.h"
#include "common/block_range.h"

namespace fa3 {

// dK and dV of a group's query heads are summed in registers: the heads are just more steps. All roles of a CTA walk
// the same steps.
class Steps {
 public:
  int m_block;
  int head_idx;

  CUTLASS_DEVICE Steps(BwdKernelParams const& params, int n_block, int kv_head_idx, int tile_m, int tile_n)
      : m_block(first_query(n_block * tile_n, params.seqlen_q, params.seqlen_k, params.causal) / tile_m),
        head_idx(kv_head_idx * params.group_size),
        params_(params),
        first_m_block_(m_block),
        heads_left_(params.group_size) {}

  // Whether all steps have been walked. There is at least one: the last query sees every key.
  CUTLASS_DEVICE bool done() const { return heads_left_ == 0; }

  // Number of the step's tile of queries among all: below 2^30 (bwd/launch.cuh).
  CUTLASS_DEVICE int q_tile(int batch_idx) const {
    return (batch_idx * params_.num_heads_q + head_idx) * params_.num_m_blocks + m_block;
  }

  CUTLASS_DEVICE void advance() {
    if (++m_block == params_.num_m_blocks) {
      m_block = first_m_block_;
      ++head_idx;
      --heads_left_;
    }
  }

 private:
  BwdKernelParams const& params_;
  int first_m_block_;
  int heads_left_;
};

}  // namespace fa3
