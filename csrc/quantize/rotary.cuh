// Rotary embedding of a thread's columns: a pair (a, b) becomes (a cos - b sin, b cos + a sin).
#pragma once

#include "quantize/hadamard.cuh"
#include "quantize/rows.cuh"

namespace fa3::quantize {

CUTLASS_DEVICE float4 read_angles(uint8_t const* table, int offset) {
  return *reinterpret_cast<float4 const*>(table + offset);
}

// Rotates the pair (a, b) in place.
CUTLASS_DEVICE void rotate_pair(float& a, float& b, float cos, float sin) {
  float const a_sin = a * sin, b_sin = b * sin;
  a = fmaf(a, cos, -b_sin);
  b = fmaf(b, cos, a_sin);
}

// Calls op(a, b, cos, sin) for each pair (c, c + kWidth / 2) of the thread's columns.
template <class Config, class Op>
CUTLASS_DEVICE void for_each_pair(ThreadRow<Config> const& thread, typename Config::WarpSmem const& smem, Fragment& x,
                                  Op&& op) {
  int const offset = swizzled_offset<Config>(thread.row, thread.part * 128 + thread.vector_xor * 32);
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 32; i += 4) {
    float4 const cos = read_angles(smem.cosines, offset ^ (i * 4));
    float4 const sin = read_angles(smem.sines, offset ^ (i * 4));
    op(element(x, i), element(x, i + 32), cos.x, sin.x);
    op(element(x, i + 1), element(x, i + 33), cos.y, sin.y);
    op(element(x, i + 2), element(x, i + 34), cos.z, sin.z);
    op(element(x, i + 3), element(x, i + 35), cos.w, sin.w);
  }
}

template <class Config>
CUTLASS_DEVICE void apply_rotary(RotaryArg const& rotary, ThreadRow<Config> const& thread,
                                 typename Config::WarpSmem const& smem, Fragment& x) {
  if (rotary.interleaved) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (thread.column(i) < rotary.dim) {
        float4 const cos = read_angles(smem.cosines, thread.x_offset(i));
        float4 const sin = read_angles(smem.sines, thread.x_offset(i));
        rotate_pair(x[i][0], x[i][1], cos.x, sin.x);
        rotate_pair(x[i][2], x[i][3], cos.y, sin.y);
        rotate_pair(x[i][4], x[i][5], cos.z, sin.z);
        rotate_pair(x[i][6], x[i][7], cos.w, sin.w);
      }
    }
  } else if (rotary.dim == Config::kWidth) {  // both columns of a pair are in one thread
    for_each_pair(thread, smem, x, rotate_pair);
  } else {  // the partner columns are read again from shared memory
    int const half = rotary.dim / 2;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) {
      __syncwarp();  // otherwise the compiler hoists the loads of all vectors, and spills
      int const column = thread.column(i);
      if (column < rotary.dim) {
        bool const is_first = column < half;
        int const pair = is_first ? column : column - half;
        F32x8 partner = to_float<Config>(*reinterpret_cast<uint4 const*>(
            smem.x + swizzled_offset<Config>(thread.row, (is_first ? column + half : pair) * 2)));
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 8; j += 4) {
          float4 const cos = read_angles(smem.cosines, swizzled_offset<Config>(thread.row, (pair + j) * 4));
          float4 const sin = read_angles(smem.sines, swizzled_offset<Config>(thread.row, (pair + j) * 4));
          float const sign = is_first ? 1.f : -1.f;  // x is b of its pair: rotate (b, a) by the negative angle
          rotate_pair(x[i][j], partner[j], cos.x, sign * sin.x);
          rotate_pair(x[i][j + 1], partner[j + 1], cos.y, sign * sin.y);
          rotate_pair(x[i][j + 2], partner[j + 2], cos.z, sign * sin.z);
          rotate_pair(x[i][j + 3], partner[j + 3], cos.w, sign * sin.w);
        }
      }
    }
  }
}

// Fuses the rotary embedding with the signs and the first butterfly stage of the Hadamard transform, if the embedding
// is over all columns and not interleaved. Let s and t be the signs of a pair's columns. Then (a, b) becomes
//
//   s (a cos - b sin) + t (b cos + a sin) = a p + (s t b) q      with  p = s cos + t sin
//   s (a cos - b sin) - t (b cos + a sin) = a q - (s t b) p            q = s cos - t sin
//
// which costs no more than a rotation. This function replaces cos and sin in shared memory by p and q, once for all
// heads; each thread does so for its own pairs. The sign s t is applied where b is read (read_row).
template <class Config>
CUTLASS_DEVICE void fuse_tables(ThreadRow<Config> const& thread, uint8_t const* signs,
                                typename Config::WarpSmem& smem) {
  int const offset = swizzled_offset<Config>(thread.row, thread.part * 128 + thread.vector_xor * 32);
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 32; i += 4) {
    auto& cos = *reinterpret_cast<float4*>(smem.cosines + (offset ^ (i * 4)));
    auto& sin = *reinterpret_cast<float4*>(smem.sines + (offset ^ (i * 4)));
    uint32_t const bytes_a = *reinterpret_cast<uint32_t const*>(signs + thread.column(i / 8) + i % 8);
    uint32_t const bytes_b = *reinterpret_cast<uint32_t const*>(signs + thread.column(i / 8 + 4) + i % 8);
    auto const fuse = [&](float& cos, float& sin, int j) {
      float const s_cos = cos * read_sign(bytes_a, j), t_sin = sin * read_sign(bytes_b, j);
      cos = s_cos + t_sin;
      sin = s_cos - t_sin;
    };
    float4 p = cos, q = sin;
    fuse(p.x, q.x, 0);
    fuse(p.y, q.y, 1);
    fuse(p.z, q.z, 2);
    fuse(p.w, q.w, 3);
    cos = p;
    sin = q;
  }
  cute::tma_store_fence();  // orders these writes before TMA's, which load the next rows' tables
}

template <class Config>
CUTLASS_DEVICE void apply_fused_rotary(ThreadRow<Config> const& thread, typename Config::WarpSmem const& smem,
                                       Fragment& x) {
  for_each_pair(thread, smem, x, [](float& a, float& b, float p, float q) {
    float const a_q = a * q, b_q = b * q;
    a = fmaf(a, p, b_q);
    b = fmaf(b, -p, a_q);
  });
}

}  // namespace fa3::quantize
