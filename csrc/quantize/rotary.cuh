// Rotary embedding of a thread's columns: a pair (a, b) becomes (a cos - b sin, b cos + a sin).
#pragma once

#include "quantize/rows.cuh"

namespace fa3 {

CUTLASS_DEVICE float4 read_angles(uint8_t const* table, int offset) {
  return *reinterpret_cast<float4 const*>(table + offset);
}

// (a, b) is turned.
CUTLASS_DEVICE void turn(float& a, float& b, float cos, float sin) {
  float const turned = a * cos - b * sin;
  b = b * cos + a * sin;
  a = turned;
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
    int const offset = swizzled_bytes<Config::kRowBytes>(thread.row, thread.part * 128);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 32; i += 4) {
      float4 const cos = read_angles(smem.cosines, offset ^ (i * 4));
      float4 const sin = read_angles(smem.sines, offset ^ (i * 4));
      turn(value(x, i), value(x, i + 32), cos.x, sin.x);
      turn(value(x, i + 1), value(x, i + 33), cos.y, sin.y);
      turn(value(x, i + 2), value(x, i + 34), cos.z, sin.z);
      turn(value(x, i + 3), value(x, i + 35), cos.w, sin.w);
    }
  } else {  // the partners come from the staged rows
    int const half = rotary.dim / 2;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) {
      __syncwarp();  // else the loads of all vectors would come first, and spill
      int const column = thread.column(i);
      if (column < rotary.dim) {
        bool const is_first = column < half;
        int const pair = is_first ? column : column - half;
        auto const place = [&](int byte) { return swizzled_bytes<Config::kRowBytes>(thread.row, byte); };
        Vector partner = read_x<Config>(smem, place((is_first ? column + half : pair) * 2));
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 8; j += 4) {
          float4 const cos = read_angles(smem.cosines, place((pair + j) * 4));
          float4 const sin = read_angles(smem.sines, place((pair + j) * 4));
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

}  // namespace fa3
