// The lengths of one sequence, and where its rows lie. Integers only, so that the tests can run it on the host.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace fa3 {

// The lengths of a call. Dense: every sequence of the batch has the same.
struct SeqlenParams {
  int batch;
  int seqlen_q;
  int seqlen_k;
};

// Where TMA finds the rows of a sequence: the last three coordinates in a tensor map (common/tma.cuh).
struct TmaRows {
  int row_origin;  // row r has coordinate row_origin + r
  int wrap;
  int outer;
};

constexpr int kPackedRows = 1 << 30;  // more than a packed sequence may have

// The sequence of `length` rows from row `first` on of a packed tensor.
FA3_HOST_DEVICE TmaRows packed_sequence(int first, int length) {
  return {kPackedRows - length, kPackedRows, first + length};
}

// One sequence of the batch. A role of a kernel makes it once per tile, and asks it and the mask (common/mask.h),
// nothing else, about lengths and rows. Packed sequences are another constructor.
struct SeqlenInfo {
  int batch_idx;
  int seqlen_q;
  int seqlen_k;
  int first_q = 0;  // queries of the sequence before this one are left out: query 0 is the one after them

  FA3_HOST_DEVICE SeqlenInfo(SeqlenParams const& params, int batch_idx)
      : batch_idx(batch_idx), seqlen_q(params.seqlen_q), seqlen_k(params.seqlen_k) {}

  FA3_HOST_DEVICE void leave_out_queries(int count) {
    first_q += count;
    seqlen_q -= count;
  }

  // Of q, out, dout and dq; and of k, v, dk and dv.
  FA3_HOST_DEVICE TmaRows rows_q() const { return {first_q, 0, batch_idx}; }
  FA3_HOST_DEVICE TmaRows rows_k() const { return {0, 0, batch_idx}; }

  // Where lse of query 0 lies, in (batch, num_heads_q, seqlen_q).
  FA3_HOST_DEVICE int64_t lse_offset(SeqlenParams const& params, int num_heads_q, int head_idx) const {
    return (int64_t(batch_idx) * num_heads_q + head_idx) * params.seqlen_q + first_q;
  }
};

}  // namespace fa3
