// Multiplies a row by random signs and transforms it by the Hadamard matrix in Sylvester's order. The result is
// sqrt(kWidth) * kSign times the orthogonal transform.
#pragma once

#include "quantize/config.h"

namespace fa3::quantize {

// A sign is 0.5 or -0.5. Only the highest byte of such a float32 is not 0, so one instruction expands it from a byte.
constexpr float kSign = 0.5f;

CUTLASS_DEVICE uint8_t sign_byte(float sign) { return __float_as_uint(copysignf(kSign, sign)) >> 24; }

// A mask for two packed 16-bit values: the sign bit of value i (0 or 1) is set if signs[i] and signs[i + distance]
// differ.
CUTLASS_DEVICE uint32_t sign_flips(float const* signs, int distance) {
  auto const flip = [&](int i) { return uint32_t(signs[i] * signs[i + distance] < 0); };
  return flip(0) << 15 | flip(1) << 31;
}

// The sign in byte i of four.
CUTLASS_DEVICE float read_sign(uint32_t bytes, int i) {
  return __uint_as_float(__byte_perm(bytes, 0, 0x0444 | i << 12));
}

// The transform has one butterfly stage per bit of the column index. A pair (a, b) whose columns differ in that bit
// becomes (a + b, a - b). The stages may run in any order.
//
// A stage within one vector.
template <int kStride>
CUTLASS_DEVICE void butterflies(F32x8& x) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 8; ++i) {
    if ((i & kStride) == 0) {
      float const a = x[i], b = x[i + kStride];
      x[i] = a + b;
      x[i + kStride] = a - b;
    }
  }
}

// A stage between two vectors, which first multiplies them by the signs of their columns.
CUTLASS_DEVICE void signed_butterflies(F32x8& a, F32x8& b, uint2 signs_a, uint2 signs_b) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 8; ++i) {
    float const sign_b = read_sign(i < 4 ? signs_b.x : signs_b.y, i % 4);
    float const signed_a = a[i] * read_sign(i < 4 ? signs_a.x : signs_a.y, i % 4);
    a[i] = fmaf(b[i], sign_b, signed_a);
    b[i] = fmaf(b[i], -sign_b, signed_a);
  }
}

// A stage between two vectors that lanes with sign -1 hold in swapped order, before and after.
CUTLASS_DEVICE void swapped_butterflies(F32x8& first, F32x8& second, float sign) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 8; ++i) {
    float const x = first[i], y = second[i];
    first[i] = fmaf(x, sign, y);
    second[i] = fmaf(y, -sign, x);
  }
}

// Two stages: first swapped_butterflies, then the stage between two lanes that differ in bit kLane, which is a bit of
// `part`. Each lane sends its second vector: lane a (sign 1) sends a1, and lane b (sign -1), whose vectors are swapped,
// sends b0. Then lane a has a0 and b0, and lane b has a1 and b1, which are the pairs of the second stage. Afterwards
// the two bits of the column index have changed places: first and second differ in the bit of `part`, the lanes in the
// bit of the vector.
//
//            lane of a   lane of b             lane of a   lane of b
//   first    a0          b1            ->      a0 + b0     a1 + b1
//   second   a1          b0                    a0 - b0     a1 - b1
template <int kLane>
CUTLASS_DEVICE void exchanged_butterflies(F32x8& first, F32x8& second, float sign) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 8; ++i) {
    float const x = first[i], y = second[i];
    float const kept = fmaf(x, sign, y);
    float const sent = fmaf(x, -sign, y);  // times the other lane's sign
    float const received = __shfl_xor_sync(0xffffffff, sent, kLane);
    first[i] = fmaf(received, sign, kept);
    second[i] = fmaf(kept, sign, -received);
  }
}

// The stages between vectors i and i + kLane / 8, and between lanes that differ in bit kLane if that is a bit of
// `part`. Otherwise the bit belongs to `row`, and there is one stage.
template <class Config, int kLane>
CUTLASS_DEVICE void lane_butterflies(F32x8& first, F32x8& second, float sign) {
  if constexpr (kLane >= Config::kRowsPerWarp) {
    exchanged_butterflies<kLane>(first, second, sign);
  } else {
    swapped_butterflies(first, second, sign);
  }
}

// Applies the signs, and the stage between the halves of a row.
template <class Config>
CUTLASS_DEVICE void hadamard_of_halves(ThreadRow<Config> const& thread, uint8_t const* signs, Fragment& x) {
  auto const signs_of = [&](int i) { return *reinterpret_cast<uint2 const*>(signs + thread.column(i)); };
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 4; ++i) {
    signed_butterflies(x[i], x[i + 4], signs_of(i), signs_of(i + 4));
  }
}

// The stages within halves. Returns the largest absolute value of the results, NaN left out. The last stage makes a + b
// and a - b, and the larger absolute value of the two is |a| + |b|, with the same rounding.
template <class Config>
CUTLASS_DEVICE float hadamard_in_halves(ThreadRow<Config> const& thread, Fragment& x) {
  float const sign8 = thread.vector_xor & 1 ? -1.f : 1.f;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 8; i += 2) {
    lane_butterflies<Config, 8>(x[i], x[i + 1], sign8);
    butterflies<1>(x[i]);
    butterflies<1>(x[i + 1]);
  }
  float const sign16 = thread.vector_xor & 2 ? -1.f : 1.f;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 8; i += i % 2 == 0 ? 1 : 3) {
    lane_butterflies<Config, 16>(x[i], x[i + 2], sign16);
  }
  float amax[4] = {};  // four independent chains of maxima
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 8; ++i) {
    butterflies<2>(x[i]);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 4; ++j) {
      amax[j] = fmaxf(amax[j], fabsf(x[i][j]) + fabsf(x[i][j + 4]));
    }
    butterflies<4>(x[i]);
  }
  return fmaxf(fmaxf(amax[0], amax[1]), fmaxf(amax[2], amax[3]));
}

}  // namespace fa3::quantize
