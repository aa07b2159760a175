// The steps of a CTA's tile: every (query head of the group, m_block) that sees a key of its n_block.
#pragma once

#include "bwd/config.h"
#include "common/block_range.h"

namespace fa3 {

// The scheduler gives "m_blocks" out from the last to the first, the longest of the forward; here the first n_blocks are
// the longest.
CUTLASS_DEVICE int tile_n_block(BwdKernelParams const& params, Tile const& tile) {
  return params.num_n_blocks - 1 - tile.m_block;
}

// dK and dV of a group's query heads are summed in registers: the heads are just more steps. All roles of a CTA walk
// the same steps.
class Steps {
 public:
  CUTLASS_DEVICE Steps(BwdKernelParams const& params, int n_block, int kv_head_idx, int tile_m, int tile_n)
      : first_m_block_(first_query(n_block * tile_n, params.seqlen_q, params.seqlen_k, params.causal) / tile_m),
        end_m_block_(params.num_m_blocks),
        m_block(first_m_block_),
        head_idx(kv_head_idx * params.group_size),
        num_steps((end_m_block_ - first_m_block_) * params.group_size) {}

  // Number of the step's tile of queries among all: below 2^30 (bwd/launch.cuh).
  CUTLASS_DEVICE int q_tile(BwdKernelParams const& params, Tile const& tile) const {
    return (tile.batch_idx * params.num_heads_q + head_idx) * params.num_m_blocks + m_block;
  }

  CUTLASS_DEVICE void advance() {
    if (++m_block == end_m_block_) {
      m_block = first_m_block_;
      ++head_idx;
    }
  }

 private:
  int first_m_block_;
  int end_m_block_;

 public:
  int m_block;
  int head_idx;
  int num_steps;
};

}  // namespace fa3
