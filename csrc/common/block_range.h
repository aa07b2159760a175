// Which key blocks a tile of query rows visits. Integers only, so that the tests can run it on the host.
#pragma once

#include "common/host_device.h"

namespace fa3 {

// Number of leading keys that query `row` sees: 0 or less for a row without keys, all of them for a row past the end.
//
//   causal, seqlen_q = 2, seqlen_k = 5      causal, seqlen_q = 5, seqlen_k = 2
//     row 0   1 1 1 1 0   -> 4                rows 0-2   0 0   -> <= 0
//     row 1   1 1 1 1 1   -> 5                row  3     1 0   -> 1
//                                             row  4     1 1   -> 2
FA3_HOST_DEVICE int visible_keys(int row, int seqlen_q, int seqlen_k, bool causal) {
  int const rows_below = seqlen_q - 1 - row;
  return causal && rows_below > 0 ? seqlen_k - rows_below : seqlen_k;
}

// Key blocks [0, end) hold every key that some row of the tile sees; blocks [0, unmasked_end) hold only keys that all
// of its rows see, so that they need no mask. `end` is at least 1: a tile whose rows see nothing visits one fully
// masked block, which leaves out = 0 and lse = -inf through the ordinary path.
struct BlockRange {
  int end;
  int unmasked_end;
};

FA3_HOST_DEVICE BlockRange block_range(int row_begin, int num_rows, int tile_n, int seqlen_q, int seqlen_k,
                                       bool causal) {
  int const most = visible_keys(row_begin + num_rows - 1, seqlen_q, seqlen_k, causal);
  int const fewest = visible_keys(row_begin, seqlen_q, seqlen_k, causal);
  return {most > tile_n ? (most + tile_n - 1) / tile_n : 1, fewest > 0 ? fewest / tile_n : 0};
}

// First query that sees `key`: the inverse of visible_keys. Past the end for a key past the end.
FA3_HOST_DEVICE int first_query(int key, int seqlen_q, int seqlen_k, bool causal) {
  if (key >= seqlen_k) {
    return seqlen_q;
  }
  int const first = causal ? key - (seqlen_k - seqlen_q) : 0;
  return first > 0 ? first : 0;
}

// The last key block that some of the rows [row_begin, row_begin + num_rows) sees, under a causal mask.
FA3_HOST_DEVICE int last_key_block(int row_begin, int num_rows, int tile_n, int seqlen_q, int seqlen_k) {
  return block_range(row_begin, num_rows, tile_n, seqlen_q, seqlen_k, /*causal=*/true).end - 1;
}

}  // namespace fa3
