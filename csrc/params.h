// Launch parameters. Plain structs: no torch, no CUTLASS.
// Strides are in elements; the last dimension of every tensor is contiguous.
#pragma once

#include <cstdint>

#include "common/mask.h"
#include "common/seqlen_info.h"

namespace fa3 {

// A (batch, seqlen, num_heads, head_dim) tensor in global memory.
struct TensorArg {
  void* data;
  int64_t batch_stride;
  int64_t row_stride;
  int64_t head_stride;
};

// How scores are made of Q K^T.
struct ScoreParams {
  float softmax_scale;
  float softmax_scale_log2;  // softmax_scale * log2(e): turns raw scores into exponents of 2

  explicit ScoreParams(float scale) : softmax_scale(scale), softmax_scale_log2(scale * 1.44269504088896340736f) {}
};

// FP8: the scales of one tensor, by (batch, head, block of rows). A true value is the FP8 value times its scale.
struct BlockScales {
  float const* data;
  int batch_stride;
  int head_stride;
  int block_stride;  // 0: one scale for all blocks
};

// What an FP8 forward is told besides.
struct Fp8Params {
  BlockScales q_descale;
  BlockScales k_descale;
  BlockScales v_descale;
  int q_descale_group;  // query heads that share a scale of q
  bool out_fp16;        // out is float16; otherwise bfloat16
};

struct FwdParams {
  TensorArg q;    // (batch, seqlen_q, num_heads_q, head_dim)
  TensorArg k;    // (batch, seqlen_k, num_heads_kv, head_dim)
  TensorArg v;    // (batch, seqlen_k, num_heads_kv, head_dim_v); transposed: (batch, head_dim_v, num_heads_kv, keys)
  TensorArg out;  // (batch, seqlen_q, num_heads_q, head_dim_v)
  float* lse;     // (batch, num_heads_q, seqlen_q), contiguous, natural log

  SeqlenParams seqlen;
  MaskParams mask;
  ScoreParams scores;
  int num_heads_q;
  int num_heads_kv;
  int head_dim;
  int head_dim_v;

  int num_sms;

  Fp8Params fp8;  // of FP8 inputs only
};

struct BwdParams {
  TensorArg q;     // (batch, seqlen_q, num_heads_q, head_dim), as is dq
  TensorArg k;     // (batch, seqlen_k, num_heads_kv, head_dim), as is dk
  TensorArg v;     // (batch, seqlen_k, num_heads_kv, head_dim_v), as is dv
  TensorArg out;   // (batch, seqlen_q, num_heads_q, head_dim_v)
  TensorArg dout;  // the same shape
  TensorArg dq;
  TensorArg dk;
  TensorArg dv;
  float const* lse;   // (batch, num_heads_q, seqlen_q), contiguous, natural log
  float const* dlse;  // the same shape; nullptr where lse has no gradient

  // Scratch, of any content. rows = seqlen_q rounded up to the kernel's tile_m.
  float*
      dq_accum;  // (batch, num_heads_q, rows, the kernel's head_dim): dQ / softmax_scale, laid out as bwd/dq.cuh says
  float* lse_log2;    // (batch, num_heads_q, rows): lse * log2(e)
  float* dsum;        // (batch, num_heads_q, rows): D = rowsum(dO * O) - dlse
  int* dq_semaphore;  // (batch, num_heads_q, rows / tile_m, consumer_warpgroups): deterministic only, else nullptr

  SeqlenParams seqlen;
  MaskParams mask;
  ScoreParams scores;
  int num_heads_q;
  int num_heads_kv;
  int head_dim;
  int head_dim_v;

  bool deterministic;  // dQ is summed in a fixed order

  int num_sms;
};

// Rotary embedding: row i is rotated by the angles of row i of the tables.
struct RotaryArg {
  void const* cos;  // (at least seqlen, dim / 2), contiguous
  void const* sin;
  bool is_float;     // the tables are float32; else of x's type
  bool interleaved;  // pairs of columns (0, 1), (2, 3), ...; else (0, dim / 2), (1, dim / 2 + 1), ...
  int dim;           // the first columns, which are rotated; 0: none
};

struct QuantizeParams {
  TensorArg x;  // (batch, seqlen, num_heads, head_dim)
  RotaryArg rotary;
  float* mean;         // (batch, num_heads, head_dim), written and subtracted; nullptr: nothing is subtracted
  float const* signs;  // (width), of the Hadamard transform; nullptr: none
  TensorArg x8;        // e4m3 (batch, seqlen, num_heads, columns)
  bool transpose;      // x8 is (batch, columns, num_heads, whole blocks of rows), as csrc/common/fp8_format.h has V
  float* descale;      // (batch, num_heads, num_blocks), or, where amax is given, (batch, num_heads)

  // Scratch, of any content.
  float* column_sums;  // (batch, num_heads, num_blocks, head_dim): where mean is given, else nullptr
  float* amax;         // (batch, num_heads): one scale for all rows of a head; nullptr: one per block

  int batch;
  int seqlen;
  int num_heads;
  int head_dim;
  int width;    // 64, 128 or 256: head_dim, padded with zeros
  int columns;  // of x8: width after a Hadamard transform, else head_dim

  int num_sms;
};

}  // namespace fa3
