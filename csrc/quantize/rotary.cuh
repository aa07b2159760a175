// Rotary embedding of a thread's columns: a pair (a, b) becomes (a cos - b sin, b cos + a sin).
#pragma once

#include "quantize/hadamard.cuh"
#include "quantize/rows.cuh"

namespace fa3 {

CUTLASS_DEVICE float4 read_angles(uint8_t const* table, int offset) {
  return *reinterpret_cast<float4 const*>(table + offset);
}

// (a, b) is turned, each in its register.
CUTLASS_DEVICE void turn(float& a, float& b, float cos, float sin) {
  float const a_sin = a * sin, b_sin = b * sin;
  a = fmaf(a, cos, -b_sin);
  b = fmaf(b, cos, a_sin);
}

// op(a, b, cos, sin) for each pair (c, c + kWidth / 2) of the thread's columns.
template <class Config, class Op>
CUTLASS_DEVICE void with_tables(ThreadRow<Config> const& thread, typename Config::WarpSmem const& smem, Vector (&x)[8],
                                Op&& op) {
  int const offset = place<Config>(thread.row, thread.part * 128 + thread.swap * 32);
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 32; i += 4) {
    float4 const cos = read_angles(smem.cosines, offset ^ (i * 4));
    float4 const sin = read_angles(smem.sines, offset ^ (i * 4));
    op(value(x, i), value(x, i + 32), cos.x, sin.x);
    op(value(x, i + 1), value(x, i + 33), cos.y, sin.y);
    op(value(x, i + 2), value(x, i + 34), cos.z, sin.z);
    op(value(x, i + 3), value(x, i + 35), cos.w, sin.w);
  }
}

template <class Config>
CUTLASS_DEVICE void rotate(RotaryArg const& rotary, ThreadRow<Config> const& thread,
                           typename Config::WarpSmem const& smem, Vector (&x)[8]) {
  if (rotary.interleaved) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (thread.column(i) < rotary.dim) {
        float4 const cos = read_angles(smem.cosines, thread.offset(i));
        float4 const sin = read_angles(smem.sines, thread.offset(i));
        turn(x[i][0], x[i][1], cos.x, sin.x);
        turn(x[i][2], x[i][3], cos.y, sin.y);
        turn(x[i][4], x[i][5], cos.z, sin.z);
        turn(x[i][6], x[i][7], cos.w, sin.w);
      }
    }
  } else if (rotary.dim == Config::kWidth) {  // pairs are a thread's own
    with_tables(thread, smem, x, turn);
  } else {  // the partners come from the staged rows
    int const half = rotary.dim / 2;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) {
      __syncwarp();  // else the loads of all vectors would come first, and spill
      int const column = thread.column(i);
      if (column < rotary.dim) {
        bool const is_first = column < half;
        int const pair = is_first ? column : column - half;
        Vector partner = unpack<Config>(
            *reinterpret_cast<uint4 const*>(smem.x + place<Config>(thread.row, (is_first ? column + half : pair) * 2)));
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 8; j += 4) {
          float4 const cos = read_angles(smem.cosines, place<Config>(thread.row, (pair + j) * 4));
          float4 const sin = read_angles(smem.sines, place<Config>(thread.row, (pair + j) * 4));
          float const sign = is_first ? 1.f : -1.f;  // as b, x is turned the other way
          turn(x[i][j], partner[j], cos.x, sign * sin.x);
          turn(x[i][j + 1], partner[j + 1], cos.y, sign * sin.y);
          turn(x[i][j + 2], partner[j + 2], cos.z, sign * sin.z);
          turn(x[i][j + 3], partner[j + 3], cos.w, sign * sin.w);
        }
      }
    }
  }
}

// Where all columns are turned, in halves, and then transformed, the signs s and t of a pair's columns and the first
// stage of the Hadamard transform cost nothing more: what is to become of (a, b) is
//
//   s (a cos - b sin) + t (b cos + a sin) = a p + (s t b) q      with  p = s cos + t sin
//   s (a cos - b sin) - t (b cos + a sin) = a q - (s t b) p            q = s cos - t sin
//
// p and q replace cos and sin in shared memory, once for all heads: each thread those of its own pairs.
template <class Config>
CUTLASS_DEVICE void combine_tables(ThreadRow<Config> const& thread, uint8_t const* signs,
                                   typename Config::WarpSmem& smem) {
  int const offset = place<Config>(thread.row, thread.part * 128 + thread.swap * 32);
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 32; i += 4) {
    auto& cos = *reinterpret_cast<float4*>(smem.cosines + (offset ^ (i * 4)));
    auto& sin = *reinterpret_cast<float4*>(smem.sines + (offset ^ (i * 4)));
    uint32_t const bytes_a = *reinterpret_cast<uint32_t const*>(signs + thread.column(i / 8) + i % 8);
    uint32_t const bytes_b = *reinterpret_cast<uint32_t const*>(signs + thread.column(i / 8 + 4) + i % 8);
    auto const combine = [&](float& cos, float& sin, int j) {
      float const s_cos = cos * read_sign(bytes_a, j), t_sin = sin * read_sign(bytes_b, j);
      cos = s_cos + t_sin;
      sin = s_cos - t_sin;
    };
    float4 p = cos, q = sin;
    combine(p.x, q.x, 0);
    combine(p.y, q.y, 1);
    combine(p.z, q.z, 2);
    combine(p.w, q.w, 3);
    cos = p;
    sin = q;
  }
  cute::tma_store_fence();  // the next rows' come by TMA
}

template <class Config>
CUTLASS_DEVICE void rotate_combined(ThreadRow<Config> const& thread, typename Config::WarpSmem const& smem,
                                    Vector (&x)[8]) {
  with_tables(thread, smem, x, [](float& a, float& b, float p, float q) {
    float const a_q = a * q, b_q = b * q;
    a = fmaf(a, p, b_q);
    b = fmaf(b, -p, a_q);
  });
}

}  // namespace fa3
