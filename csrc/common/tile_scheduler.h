// The static tile scheduler: (CTA, wave) -> tile. CTAs are persistent, one per SM; a wave gives each of them one tile.
// Integers only, so that the tests can run it on the host. There is no counter in global memory, so nothing to reset
// between launches or graph replays.
#pragma once

#include "common/host_device.h"

namespace fa3 {

// A unit of work.
struct Tile {
  int block;  // of queries in the forward, of keys in the backward
  int head_idx;
  int batch_idx;
};

// In every order the (batch, head) pairs are cut into L2 groups, whose K and V the L2 holds together; within a group, a
// block of all its heads comes before the next block.
enum class TileOrder {
  kEqual,       // tiles of equal work, blocks ascending
  kAscending,   // the work of a head's blocks falls linearly, blocks ascending; or
  kDescending,  // rises, descending: those of most work come first
};

struct TileSchedulerParams {
  int num_blocks;
  int num_heads;
  int num_batch_heads;  // heads x batch; neighbours share K and V where GQA lets them
  int num_ctas;
  TileOrder order;
  int heads_per_l2_group;  // (batch, head) pairs whose tiles are worked on together
  int waves_per_l2_group;
  int num_waves;
};

// Builds the parameters. kEqual takes L2 groups of `heads_per_l2_group`; the other orders of nearly as many, so that
// the last group is not much smaller and a group gives every CTA work.
FA3_HOST_DEVICE TileSchedulerParams make_tile_scheduler(int num_blocks, int num_heads, int batch, int num_sms,
                                                        TileOrder order, int heads_per_l2_group) {
  int const num_batch_heads = num_heads * batch;
  int const num_tiles = num_blocks * num_batch_heads;
  int const num_ctas = num_tiles < num_sms ? num_tiles : num_sms;
  if (order == TileOrder::kEqual) {
    int const num_waves = (num_tiles + num_ctas - 1) / num_ctas;
    return {num_blocks, num_heads, num_batch_heads, num_ctas, order, heads_per_l2_group, num_waves, num_waves};
  }
  int const one_wave = (num_ctas + num_blocks - 1) / num_blocks;  // fewer heads would leave CTAs without work
  int const most = heads_per_l2_group > one_wave ? heads_per_l2_group : one_wave;
  heads_per_l2_group = num_batch_heads;
  if (most < num_batch_heads) {
    int const num_l2_groups = (num_batch_heads + most - 1) / most;
    heads_per_l2_group = (num_batch_heads + num_l2_groups - 1) / num_l2_groups;  // L2 groups of nearly equal size
    // Better, where some number of heads allows it: L2 groups that fill a whole, even number of waves, unless what the
    // last one lacks is a tenth of all work.
    for (int heads = 1; heads <= most + most / 16; ++heads) {
      int const last = num_batch_heads % heads;
      int const lacks = last == 0 ? 0 : heads - last;
      if (heads * num_blocks % (2 * num_ctas) == 0 && lacks * 10 < num_batch_heads) {
        heads_per_l2_group = heads;
        break;
      }
    }
  }
  int const num_l2_groups = (num_batch_heads + heads_per_l2_group - 1) / heads_per_l2_group;
  int const waves_per_l2_group = (heads_per_l2_group * num_blocks + num_ctas - 1) / num_ctas;
  return {num_blocks, num_heads,          num_batch_heads,    num_ctas,
          order,      heads_per_l2_group, waves_per_l2_group, waves_per_l2_group * num_l2_groups};
}

// L2 groups of at least `l2_heads` (batch, head) pairs, and up to twice as many: the size that leaves the fewest CTAs
// without a tile in a group's last wave. Where tiles are few and long a wave is a large part of all the work.
FA3_HOST_DEVICE int heads_that_fill_waves(int num_blocks, int num_batch_heads, int num_ctas, int l2_heads) {
  constexpr int kMostTried = 256;  // L2 groups of more have waves enough
  int best_heads = l2_heads < num_batch_heads ? l2_heads : num_batch_heads;
  int fewest_waves = 0;
  for (int heads = l2_heads; heads <= 2 * l2_heads && heads <= num_batch_heads && heads <= kMostTried; ++heads) {
    int const num_l2_groups = (num_batch_heads + heads - 1) / heads;
    int const heads_per_l2_group = (num_batch_heads + num_l2_groups - 1) / num_l2_groups;
    int const num_waves = num_l2_groups * ((heads_per_l2_group * num_blocks + num_ctas - 1) / num_ctas);
    if (fewest_waves == 0 || num_waves < fewest_waves) {
      fewest_waves = num_waves;
      best_heads = heads_per_l2_group;
    }
  }
  return best_heads;
}

// Walks the tiles of one CTA.
//
// kEqual: tile number = wave * num_ctas + cta, through one group after the other. L2 groups of one head: block by
// block through it, so that the CTAs at work share few heads.
//
// kAscending and kDescending: each group begins with a wave of its own, and odd waves run over the CTAs backwards.
// Work falls (or rises) linearly from wave to wave, so a forward and a backward wave add up to the same work for
// every CTA:
//
//   wave 0   CTA 0 1 2 3   work 12 11 10  9
//   wave 1   CTA 3 2 1 0   work  8  7  6  5     -> CTA 0: 12 + 5, CTA 1: 11 + 6, ...
class StaticScheduler {
 public:
  FA3_HOST_DEVICE StaticScheduler(TileSchedulerParams const& params, int cta) : params_(params), cta_(cta), wave_(0) {}

  // Sets `tile` to this CTA's next tile; false, leaving it as it was, when there is none left.
  FA3_HOST_DEVICE bool next(Tile& tile) {
    while (wave_ < params_.num_waves) {
      if (tile_of_wave(wave_++, tile)) {
        return true;
      }
    }
    return false;
  }

 private:
  // Unsigned arithmetic: the GPU divides it in fewer instructions.
  FA3_HOST_DEVICE bool tile_of_wave(unsigned wave, Tile& tile) const {
    unsigned const num_ctas = params_.num_ctas;
    unsigned const num_blocks = params_.num_blocks;
    unsigned l2_group, position;  // of the tile in its group
    if (params_.order == TileOrder::kEqual) {
      unsigned const number = wave * num_ctas + cta_;
      if (number >= num_blocks * params_.num_batch_heads) {
        return false;
      }
      unsigned const l2_group_tiles = params_.heads_per_l2_group * num_blocks;
      l2_group = number / l2_group_tiles;
      position = number - l2_group * l2_group_tiles;
    } else {
      l2_group = wave / unsigned(params_.waves_per_l2_group);
      unsigned const wave_in_l2_group = wave - l2_group * params_.waves_per_l2_group;
      position = wave_in_l2_group * num_ctas + (wave % 2 == 0 ? cta_ : num_ctas - 1 - cta_);
    }
    unsigned const first_head = l2_group * params_.heads_per_l2_group;
    unsigned const heads_left = params_.num_batch_heads - first_head;
    unsigned const heads =
        heads_left < unsigned(params_.heads_per_l2_group) ? heads_left : unsigned(params_.heads_per_l2_group);
    unsigned const row = position / heads;
    if (row >= num_blocks) {
      return false;  // past the group's end, in a last wave that it does not fill
    }
    tile.block = params_.order == TileOrder::kDescending ? num_blocks - 1 - row : row;
    unsigned const batch_head = first_head + position - row * heads;
    unsigned const batch_idx = batch_head / unsigned(params_.num_heads);
    tile.batch_idx = batch_idx;
    tile.head_idx = batch_head - batch_idx * params_.num_heads;
    return true;
  }

  TileSchedulerParams const& params_;
  unsigned const cta_;
  unsigned wave_;
};

}  // namespace fa3
