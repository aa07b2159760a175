// The tiles of query rows that pre- and postprocess work on, one per CTA.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "common/tile_scheduler.h"

namespace fa3::bwd {

// Tile number `index` of (batch, num_heads_q, num_m_blocks).
FA3_HOST_DEVICE Tile query_tile(int64_t index, int num_m_blocks, int num_heads_q) {
  int64_t const batch_head = index / num_m_blocks;
  int64_t const batch_idx = batch_head / num_heads_q;
  return {static_cast<int>(index - batch_head * num_m_blocks), static_cast<int>(batch_head - batch_idx * num_heads_q),
          static_cast<int>(batch_idx)};
}

}  // namespace fa3::bwd
