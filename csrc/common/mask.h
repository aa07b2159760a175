// Which keys a query sees, and which blocks of keys or queries a tile therefore visits. Integers only, so that the
// tests can run it on the host. A new mask is a new line in `window_of`; nothing else in the kernels knows masks.
#pragma once

#include <limits>

#include "common/host_device.h"
#include "common/seqlen_info.h"

namespace fa3 {

constexpr int kUnlimited = std::numeric_limits<int>::max();

// The mask of a call. The key at position p = query + seqlen_k - seqlen_q is the query's own: masks are aligned to the
// bottom right. A query sees the keys from p - window_left to p + window_right; causal is window_right = 0.
struct MaskParams {
  int window_left;
  int window_right;
  int chunk;  // 0: none. Otherwise keys are cut into chunks of so many, and a query sees only keys of its own's chunk

  FA3_HOST_DEVICE bool limits_left() const { return window_left != kUnlimited || chunk > 0; }
  FA3_HOST_DEVICE bool limits_right() const { return window_right != kUnlimited || chunk > 0; }

  FA3_HOST_DEVICE bool is_causal_or_none() const {
    return !limits_left() && (window_right == 0 || window_right == kUnlimited);
  }

  // The most keys of a sequence of `seqlen_k` that a query sees.
  FA3_HOST_DEVICE int most_keys(int seqlen_k) const {
    int const in_chunk = chunk > 0 && chunk < seqlen_k ? chunk : seqlen_k;
    bool const is_window = window_left < in_chunk && window_right < in_chunk - 1 - window_left;
    return is_window ? window_left + 1 + window_right : in_chunk;
  }
};

// How the work of blocks of queries goes from the first to the last. That of blocks of keys goes the other way.
enum class WorkTrend { kEven, kRising, kFalling };

FA3_HOST_DEVICE WorkTrend trend_of_queries(MaskParams const& mask) {
  return mask.limits_left() == mask.limits_right() ? WorkTrend::kEven
         : mask.limits_right()                     ? WorkTrend::kRising
                                                   : WorkTrend::kFalling;
}

// Blocks [begin, end) hold something that some row of the tile sees. Of these, blocks [unmasked_begin, unmasked_end)
// hold only what all of its rows see.
struct BlockRange {
  int begin;
  int end;
  int unmasked_begin;
  int unmasked_end;

  FA3_HOST_DEVICE bool empty() const { return begin >= end; }
  FA3_HOST_DEVICE bool needs_mask(int block) const { return block < unmasked_begin || block >= unmasked_end; }
};

// The mask of one sequence.
class Mask {
 public:
  struct Range {  // [begin, end), empty if end <= begin
    int begin;
    int end;
  };

  FA3_HOST_DEVICE Mask(MaskParams const& params, SeqlenInfo const& seqlen)
      : params_(params), seqlen_q_(seqlen.seqlen_q), seqlen_k_(seqlen.seqlen_k) {}

  // The keys that a query sees.
  //
  //   causal, seqlen_q = 2, seqlen_k = 5      causal, seqlen_q = 5, seqlen_k = 2
  //     row 0   1 1 1 1 0   [0, 4)              rows 0-2   0 0   empty
  //     row 1   1 1 1 1 1   [0, 5)              row  3     1 0   [0, 1)
  //                                             row  4     1 1   [0, 2)
  //
  // A row past the last query sees what its place on the diagonal gives it; nothing is stored for it.
  FA3_HOST_DEVICE Range keys_of(int query) const {
    int const position = query + (seqlen_k_ - seqlen_q_);
    Window const window = window_of(position, params_.window_left, params_.window_right);
    return band(position, window, seqlen_q_ - 1 - query, seqlen_k_);
  }

  // The queries that see a key: the inverse. No query sees a key past the end.
  FA3_HOST_DEVICE Range queries_of(int key) const {
    if (key >= seqlen_k_) {
      return {seqlen_q_, seqlen_q_};
    }
    Window const window = window_of(key, params_.window_right, params_.window_left);
    return band(key + (seqlen_q_ - seqlen_k_), window, seqlen_k_ - 1 - key, seqlen_q_);
  }

  // Forward: the key blocks of queries [query, query + num_queries). There is at least one, so that the ordinary path
  // writes out = 0 and lse = -inf for rows without keys: where they see nothing it is fully masked.
  FA3_HOST_DEVICE BlockRange key_blocks(int query, int num_queries, int tile_n) const {
    Range const first = keys_of(query), last = keys_of(query + num_queries - 1);
    int const end = last.end > tile_n ? ceil_div(last.end, tile_n) : 1;
    int const begin = floor_div(first.begin, tile_n);
    return {begin < end ? begin : end - 1, end, ceil_div(last.begin, tile_n),
            first.end > 0 ? floor_div(first.end, tile_n) : 0};
  }

  // Backward: the query blocks of keys [key, key + num_keys), none where no query sees one of them. Queries past the
  // end need no mask: their lse is infinite, and P is 0.
  FA3_HOST_DEVICE BlockRange query_blocks(int key, int num_keys, int tile_m) const {
    int const last_key = key + num_keys - 1 < seqlen_k_ ? key + num_keys - 1 : seqlen_k_ - 1;
    Range const first = queries_of(key), all = queries_of(key + num_keys - 1);
    int const end = queries_of(last_key).end;
    return {floor_div(first.begin, tile_m), end > 0 ? ceil_div(end, tile_m) : 0, ceil_div(all.begin, tile_m),
            first.end < seqlen_q_ ? first.end / tile_m : ceil_div(seqlen_q_, tile_m)};
  }

 private:
  // How many indices a row sees before its place on the diagonal and after it.
  struct Window {
    int before;
    int after;
  };

  // A chunk narrows the window of a row to the rest of the chunk that the position lies in.
  FA3_HOST_DEVICE Window window_of(int position, int before, int after) const {
    if (params_.chunk > 0) {
      int const remainder = position % params_.chunk;
      int const in_chunk = remainder < 0 ? remainder + params_.chunk : remainder;
      int const rest = params_.chunk - 1 - in_chunk;
      return {before < in_chunk ? before : in_chunk, after < rest ? after : rest};
    }
    return {before, after};
  }

  // The indices from `diagonal` - before to `diagonal` + after of [0, length). `to_last` is length - 1 - diagonal. The
  // comparisons come first so that no result overflows. The sums are of unsigned numbers, whose overflow is defined:
  // nvcc makes max(diagonal - before, 0) of the first line if it may assume that the difference never overflows.
  FA3_HOST_DEVICE static Range band(int diagonal, Window window, int to_last, int length) {
    return {diagonal > window.before ? int(unsigned(diagonal) - unsigned(window.before)) : 0,
            to_last > window.after ? int(unsigned(diagonal) + unsigned(window.after) + 1) : length};
  }

  // Of numbers that are not negative: unsigned, they take fewer instructions.
  FA3_HOST_DEVICE static int floor_div(unsigned a, unsigned b) { return a / b; }
  FA3_HOST_DEVICE static int ceil_div(unsigned a, unsigned b) { return a / b + (a % b > 0); }

  MaskParams params_;
  int seqlen_q_;
  int seqlen_k_;
};

// Mask, where it is known to be causal or none. FP8 kernels have no registers for more: with Mask they spill, or ptxas
// gives up their pipeline of WGMMAs (docs/design/fp8.md).
class CausalMask {
 public:
  FA3_HOST_DEVICE CausalMask(bool causal, SeqlenInfo const& seqlen)
      : causal_(causal), seqlen_q_(seqlen.seqlen_q), seqlen_k_(seqlen.seqlen_k) {}

  // The number of keys that a query sees: none if it is below 0.
  FA3_HOST_DEVICE int end_of_keys(int query) const {
    int const queries_after = seqlen_q_ - 1 - query;
    return causal_ && queries_after > 0 ? seqlen_k_ - queries_after : seqlen_k_;
  }

  FA3_HOST_DEVICE BlockRange key_blocks(int query, int num_queries, int tile_n) const {
    int const most = end_of_keys(query + num_queries - 1), fewest = end_of_keys(query);
    return {0, most > tile_n ? (most + tile_n - 1) / tile_n : 1, 0, fewest > 0 ? fewest / tile_n : 0};
  }

 private:
  bool causal_;
  int seqlen_q_;
  int seqlen_k_;
};

// The sequence from the first query on that sees a key: the backward has nothing to do for those before it, and NaN in
// their rows must reach no gradient.
FA3_HOST_DEVICE SeqlenInfo queries_with_keys(SeqlenParams const& params, MaskParams const& mask, int batch_idx) {
  SeqlenInfo seqlen(params, batch_idx);
  seqlen.leave_out_queries(Mask(mask, seqlen).queries_of(0).begin);
  return seqlen;
}

// The key blocks that one warpgroup visits, when the rows of its CTA see `cta` and its own rows `own`. It steps over at
// most one block at either end: then no ring of two stages can block, although P V of the tile before is in flight.
// Whatever else its rows do not see it masks (rows of two chunks in one tile).
FA3_HOST_DEVICE BlockRange visited_blocks(BlockRange const& cta, BlockRange const& own) {
  BlockRange range = own;
  range.begin = own.begin > cta.begin + 1 ? cta.begin + 1 : own.begin;
  range.end = own.end < cta.end - 1 ? cta.end - 1 : own.end;
  return range;
}

}  // namespace fa3
