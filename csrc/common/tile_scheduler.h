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

// In every order the head_batches are cut into sections; within one, a block of all its heads comes before the next
// block.
enum class TileOrder {
  kEqual,      // tiles of equal work, blocks ascending
  kAscending,  // causal: the work of a head's blocks rises or falls linearly; blocks ascending, or
  kDescending,
};

struct TileSchedulerParams {
  int num_blocks;
  int num_heads;
  int num_head_batches;  // heads x batch; neighbours share K and V where GQA lets them
  int num_ctas;
  TileOrder order;
  int section_heads;  // head_batches that are worked on together
  int rounds_per_section;
  int num_rounds;
};

// Builds the parameters. kEqual takes sections of `section_heads`; the other orders of nearly as many, so that the last
// section is not much smaller and a section gives every CTA work.
FA3_HOST_DEVICE TileSchedulerParams make_tile_scheduler(int num_blocks, int num_heads, int batch, int num_sms,
                                                        TileOrder order, int section_heads) {
  int const num_head_batches = num_heads * batch;
  int const num_tiles = num_blocks * num_head_batches;
  int const num_ctas = num_tiles < num_sms ? num_tiles : num_sms;
  if (order == TileOrder::kEqual) {
    int const num_rounds = (num_tiles + num_ctas - 1) / num_ctas;
    return {num_blocks, num_heads, num_head_batches, num_ctas, order, section_heads, num_rounds, num_rounds};
  }
  int const one_round = (num_ctas + num_blocks - 1) / num_blocks;  // fewer heads would leave CTAs without work
  int const most = section_heads > one_round ? section_heads : one_round;
  section_heads = num_head_batches;
  if (most < num_head_batches) {
    int const num_sections = (num_head_batches + most - 1) / most;
    section_heads = (num_head_batches + num_sections - 1) / num_sections;  // sections of nearly equal size
    // Better, where some number of heads allows it: sections that fill a whole, even number of rounds, unless what the
    // last one lacks is a tenth of all work.
    for (int heads = 1; heads <= most + most / 16; ++heads) {
      int const last = num_head_batches % heads;
      int const lacks = last == 0 ? 0 : heads - last;
      if (heads * num_blocks % (2 * num_ctas) == 0 && lacks * 10 < num_head_batches) {
        section_heads = heads;
        break;
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
// kEqual: tile number = round * num_ctas + cta, through one section after the other. Sections of one head: block by
// block through it, so that the CTAs at work share few heads.
//
// kAscending and kDescending: each section begins with a round of its own, and odd rounds run over the CTAs backwards.
// Work falls (or rises) linearly from round to round, so a forward and a backward round add up to the same work for
// every CTA:
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
    unsigned section, position;  // of the tile in its section
    if (params_.order == TileOrder::kEqual) {
      unsigned const number = round * num_ctas + cta_;
      if (number >= num_blocks * params_.num_head_batches) {
        return false;
      }
      unsigned const section_tiles = params_.section_heads * num_blocks;
      section = number / section_tiles;
      position = number - section * section_tiles;
    } else {
      section = round / unsigned(params_.rounds_per_section);
      unsigned const round_in_section = round - section * params_.rounds_per_section;
      position = round_in_section * num_ctas + (round % 2 == 0 ? cta_ : num_ctas - 1 - cta_);
    }
    unsigned const first_head = section * params_.section_heads;
    unsigned const heads_left = params_.num_head_batches - first_head;
    unsigned const heads = heads_left < unsigned(params_.section_heads) ? heads_left : unsigned(params_.section_heads);
    unsigned const row = position / heads;
    if (row >= num_blocks) {
      return false;  // past the section's end, in a last round that it does not fill
    }
    tile.block = params_.order == TileOrder::kDescending ? num_blocks - 1 - row : row;
    unsigned const head_batch = first_head + position - row * heads;
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
