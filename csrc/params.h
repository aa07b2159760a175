// What a kernel launch is told. Plain structs: no torch, no CUTLASS.
// Strides are in elements; the last dimension of every tensor is contiguous.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace fa3 {

// A (batch, seqlen, num_heads, head_dim) tensor in global memory.
struct TensorArg {
  void* data;
  int64_t batch_stride;
  int64_t row_stride;
  int64_t head_stride;
};

// The factor that turns raw scores into exponents of 2.
FA3_HOST_DEVICE float softmax_scale_log2(float softmax_scale) {
  return softmax_scale * 1.44269504088896340736f;  // log2(e)
}

// FP8: the scales of one tensor, by (batch, head, block of rows). A true value is the FP8 value times its scale.
struct BlockScales {
  float const* data;
  int batch_stride;
  int head_stride;
  int block_stride;  // 0: one scale for all blocks
};

struct FwdParams {
  TensorArg q;    // (batch, seqlen_q, num_heads_q, head_dim)
  TensorArg k;    // (batch, seqlen_k, num_heads_kv, head_dim)
  TensorArg v;    // (batch, seqlen_k, num_heads_kv, head_dim); transposed: (batch, head_dim, num_heads_kv, keys)
  TensorArg out;  // (batch, seqlen_q, num_heads_q, head_dim)
  float* lse;     // (batch, num_heads_q, seqlen_q), contiguous, natural log

  int batch;
  int seqlen_q;
  int seqlen_k;
  int num_heads_q;
  int num_heads_kv;
  int head_dim;

  float softmax_scale;
  bool causal;  // aligned to the bottom right: query i sees keys j <= i + seqlen_k - seqlen_q

  int num_sms;

  // FP8 only.
  BlockScales q_scales;
  BlockScales k_scales;
  BlockScales v_scales;
  int q_scales_group;  // query heads that share a scale of q
  bool out_fp16;       // else bfloat16
};

struct BwdParams {
  TensorArg q;  // (batch, seqlen_q, num_heads_q, head_dim), as are out, dout and dq
  TensorArg k;  // (batch, seqlen_k, num_heads_kv, head_dim), as are v, dk and dv
  TensorArg v;
  TensorArg out;
  TensorArg dout;
  TensorArg dq;
  TensorArg dk;
  TensorArg dv;
  float const* lse;   // (batch, num_heads_q, seqlen_q), contiguous, natural log
  float const* dlse;  // the same shape; nullptr where lse has no gradient

  // Scratch, of any content. rows = seqlen_q rounded up to the kernel's tile_m.
  float* dq_accum;  // (batch, num_heads_q, rows, the kernel's head_dim): dQ / softmax_scale, in the order of bwd/dq.cuh
  float* lse_log2;  // (batch, num_heads_q, rows): lse * log2(e)
  float* dsum;      // (batch, num_heads_q, rows): D = rowsum(dO * O) - dlse
  int* dq_turn;     // (batch, num_heads_q, rows / tile_m, consumer_warpgroups): deterministic only, else nullptr

  int batch;
  int seqlen_q;
  int seqlen_k;
  int num_heads_q;
  int num_heads_kv;
  int head_dim;

  float softmax_scale;
  bool causal;         // aligned to the bottom right: query i sees keys j <= i + seqlen_k - seqlen_q
  bool deterministic;  // dQ is summed in a fixed order

  int num_sms;
};

// Rotary embedding: row i is turned by the angles of row i of the tables.
struct RotaryArg {
  void const* cos;  // (at least seqlen, dim / 2), contiguous
  void const* sin;
  bool is_float;     // the tables are float32; else of x's type
  bool interleaved;  // pairs of columns (0, 1), (2, 3), ...; else (0, dim / 2), (1, dim / 2 + 1), ...
  int dim;           // columns that are turned, the first ones; 0: none
};

struct QuantizeParams {
  TensorArg x;  // (batch, seqlen, num_heads, head_dim)
  RotaryArg rotary;
  float* mean;         // (batch, num_heads, head_dim), written and subtracted; nullptr: nothing is subtracted
  float const* signs;  // (width), of the Hadamard transform; nullptr: none
  TensorArg x8;        // e4m3 (batch, seqlen, num_heads, columns)
  bool transpose;      // x8 is (batch, columns, num_heads, whole blocks of rows), as csrc/fwd/fp8_layout.h has V
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
