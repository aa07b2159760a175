// The mask of a call, as the ops and the exports of the kernel table take it. Plain host code without torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "check.h"
#include "common/mask.h"

namespace fa3 {

// Makes the mask of the arguments window_left, window_right (-1: unlimited) and attention_chunk (0: none). A limit that
// hides no key is none. So such a window takes the same kernel as no window, and gives the same bits.
inline MaskParams make_mask(ArgumentCheck const& check, int64_t window_left, int64_t window_right,
                            int64_t attention_chunk, int64_t seqlen_q, int64_t seqlen_k) {
  check(window_left >= -1, "window_left", "be -1 (unlimited) or at least 0", std::to_string(window_left));
  check(window_right >= -1, "window_right", "be -1 (unlimited) or at least 0", std::to_string(window_right));
  check(attention_chunk >= 0, "attention_chunk", "be 0 (none) or above", std::to_string(attention_chunk));
  bool const unlimited_left = window_left == -1 || window_left >= seqlen_k - 1;
  bool const unlimited_right = window_right == -1 || window_right >= seqlen_q - 1;
  bool const one_chunk = attention_chunk >= seqlen_k && seqlen_k >= seqlen_q;
  return {
      .window_left = unlimited_left ? kUnlimited : static_cast<int>(window_left),
      .window_right = unlimited_right ? kUnlimited : static_cast<int>(window_right),
      .chunk = one_chunk ? 0 : static_cast<int>(std::min<int64_t>(attention_chunk, kUnlimited)),
  };
}

}  // namespace fa3
