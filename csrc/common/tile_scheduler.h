// Persistent, static tile scheduler: (CTA, round) -> (block, head_idx, batch_idx), where a block is a tile of queries
// in the forward, of keys in the backward. Integers only, so that the tests can run it on the host. No counter in
// global memory: nothing to reset between launches or graph replays.
#pragma once

#include "common/host_device.h"

namespace fa3 {

struct Tile {
  int block;
  int head_idx;
  int batch_idx;
};

// What goes fastest from tile to tile, and which way the blocks of a head go.
enum class TileOrder {
  kBlocksFirst,  // block by block through one head after the other: few heads are at work
  kAscending,    // a block of all heads of a section, then the next block
  kDescending,
};

struct TileSchedulerParams {
  int num_blocks;
  int num_heads;
  int num_head_batches;  // heads x batch; neighbours share K and V where GQA lets them
  int num_ctas;
  TileOrder order;
  int section_heads;  // kAscending, kDescending: head_batches that are worked on together
  int rounds_per_section;
  int num_rounds;
};

// Builds the parameters. `l2_heads` is the number of head_batches whose tensors fit the L2 together.
FA3_HOST_DEVICE TileSchedulerParams make_tile_scheduler(int num_blocks, int num_heads, int batch, int num_sms,
                                                        TileOrder order, int l2_heads) {
  int const num_head_batches = num_heads * batch;
  int const num_tiles = num_blocks * num_head_batches;
  int const num_ctas = num_tiles < num_sms ? num_tiles : num_sms;
  int section_heads = num_head_batches;
  if (order != TileOrder::kBlocksFirst) {
    int const one_round = (num_ctas + num_blocks - 1) / num_blocks;  // fewer heads would leave CTAs without work
    int const most = l2_heads > one_round ? l2_heads : one_round;
    if (most < num_head_batches) {
      int const num_sections = (num_head_batches + most - 1) / most;
      section_heads = (num_head_batches + num_sections - 1) / num_sections;  // sections of nearly equal size
      // Better, where some number of heads allows it: sections that fill a whole, even number of rounds.
      for (int heads = 1; heads <= most + most / 16; ++heads) {
        if (heads * num_blocks % (2 * num_ctas) == 0) {
          section_heads = heads;
          break;
        }
      }
    }
  }
  int const num_sections = (num_head_batches + section_heads - 1) / section_heads;
  int const rounds_per_section = (section_heads * num_blocks + num_ctas - 1) / num_ctas;
  return {num_blocks, num_heads,     num_head_batches,   num_ctas,
          order,      section_heads, rounds_per_section, rounds_per_section * num_sections};
}

// Sections of at least `l2_heads` head_batches, and up to twice as many: the size that leaves the fewest CTAs without a
// tile in a section's last round. Where tiles are few and long a round is a large part of all the work.
FA3_HOST_DEVICE int heads_that_fill_rounds(int num_blocks, int num_head_batches, int num_ctas, int l2_heads) {
  constexpr int kMostTried = 256;  // sections of more have rounds enough
  int best_heads = l2_heads < num_head_batches ? l2_heads : num_head_batches;
  int fewest_rounds = 0;
  for (int heads = l2_heads; heads <= 2 * l2_heads && heads <= num_head_batches && heads <= kMostTried; ++heads) {
    int const num_sections = (num_head_batches + heads - 1) / heads;
    int const section_heads = (num_head_batches + num_sections - 1) / num_sections;
    int const num_rounds = num_sections * ((section_heads * num_blocks + num_ctas - 1) / num_ctas);
    if (fewest_rounds == 0 || num_rounds < fewest_rounds) {
      fewest_rounds = num_rounds;
      best_heads = section_heads;
    }
  }
  return best_heads;
}

// Walks the tiles of one CTA.
//
// kBlocksFirst: tile number = round * num_ctas + cta, blocks fastest, so that the CTAs at work share few heads.
//
// kAscending and kDescending, for causal masks: head_batches are cut into sections that fit the L2. Within a section
// tiles go from block to block, heads fastest; odd rounds run over the CTAs backwards. Work falls (or rises) linearly
// from round to round, so a forward and a backward round add up to the same work for every CTA:
//
//   round 0   CTA 0 1 2 3   work 12 11 10  9
//   round 1   CTA 3 2 1 0   work  8  7  6  5     -> CTA 0: 12 + 5, CTA 1: 11 + 6, ...
class TileScheduler {
 public:
  FA3_HOST_DEVICE TileScheduler(TileSchedulerParams const& params, int cta) : params_(params), cta_(cta), round_(0) {}

  // Sets `tile` to this CTA's next tile; false, leaving it as it was, when there is none left.
  FA3_HOST_DEVICE bool next(Tile& tile) {
    while (round_ < params_.num_rounds) {
      if (tile_of_round(round_++, tile)) {
        return true;
      }
    }
    return false;
  }

 private:
  // Unsigned arithmetic: the GPU divides it in fewer instructions.
  FA3_HOST_DEVICE bool tile_of_round(unsigned round, Tile& tile) const {
    unsigned const num_ctas = params_.num_ctas;
    unsigned const num_blocks = params_.num_blocks;
    unsigned head_batch;
    if (params_.order != TileOrder::kBlocksFirst) {
      unsigned const section = round / unsigned(params_.rounds_per_section);
      unsigned const round_in_section = round - section * params_.rounds_per_section;
      unsigned const position = round_in_section * num_ctas + (round % 2 == 0 ? cta_ : num_ctas - 1 - cta_);
      unsigned const first_head = section * params_.section_heads;
      unsigned const heads_left = params_.num_head_batches - first_head;
      unsigned const heads =
          heads_left < unsigned(params_.section_heads) ? heads_left : unsigned(params_.section_heads);
      unsigned const row = position / heads;
      if (row >= num_blocks) {
        return false;  // the section does not fill its last round
      }
      tile.block = params_.order == TileOrder::kAscending ? row : num_blocks - 1 - row;
      head_batch = first_head + position - row * heads;
    } else {
      unsigned const number = round * num_ctas + cta_;
      head_batch = number / num_blocks;
      if (head_batch >= unsigned(params_.num_head_batches)) {
        return false;
      }
      tile.block = number - head_batch * num_blocks;
    }
    unsigned const batch_idx = head_batch / unsigned(params_.num_heads);
    tile.batch_idx = batch_idx;
    tile.head_idx = head_batch - batch_idx * params_.num_heads;
    return true;
  }

  TileSchedulerParams const& params_;
  unsigned const cta_;
  unsigned round_;
};

}  // namespace fa3
