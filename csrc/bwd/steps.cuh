// The steps of a CTA's tile: every (query head of the group, m_block) that sees a key of its n_block.
#pragma once

#include "bwd/config.h"
#include "common/mask.h"

namespace fa3::bwd {

// dK and dV of a group's query heads are summed in registers: the heads are just more steps. All roles of a CTA walk
// the same steps, of which there may be none.
template <class Config>
class QueryTileIterator {
 public:
  int m_block;
  int head_idx;

  CUTLASS_DEVICE QueryTileIterator(KernelParams const& params, Tile const& tile)
      : head_idx(tile.head_idx * params.group_size), params_(params), heads_left_(params.group_size) {
    SeqlenInfo const seqlen = queries_with_keys(params.seqlen, params.mask, tile.batch_idx);
    BlockRange const range =
        Mask(params.mask, seqlen).query_blocks(tile.block * Config::kTileN, Config::kTileN, Config::kTileM);
    m_block = first_m_block_ = range.begin;
    end_m_block_ = range.end;
    if (range.empty()) {
      heads_left_ = 0;
    }
  }

  CUTLASS_DEVICE bool done() const { return heads_left_ == 0; }

  // Number of the step's tile of queries among all: below 2^30 (launch.cuh).
  CUTLASS_DEVICE int q_tile(int batch_idx) const {
    return (batch_idx * params_.num_heads_q + head_idx) * params_.num_m_blocks + m_block;
  }

  CUTLASS_DEVICE void advance() {
    if (++m_block == end_m_block_) {
      m_block = first_m_block_;
      ++head_idx;
      --heads_left_;
    }
  }

 private:
  KernelParams const& params_;
  int first_m_block_;
  int end_m_block_;
  int heads_left_;
};

}  // namespace fa3::bwd
