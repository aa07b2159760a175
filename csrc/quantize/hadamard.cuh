// Random signs and the Hadamard transform of a row in Sylvester's order, times sqrt(kWidth) * kSign.
#pragma once

#include "quantize/config.h"

namespace fa3 {

// A sign as 0.5 or -0.5: such a float32 is its highest byte and zeros, which one instruction can put together.
constexpr float kSign = 0.5f;

CUTLASS_DEVICE uint8_t sign_byte(float sign) { return __float_as_uint(copysignf(kSign, sign)) >> 24; }

// For two values in 16 bits: the sign bits that are set where columns 0 and 1 and those `distance` further differ in
// sign.
CUTLASS_DEVICE uint32_t sign_flips(float const* signs, int distance) {
  auto const flip = [&](int i) { return uint32_t(signs[i] * signs[i + distance] < 0); };
  return flip(0) << 15 | flip(1) << 31;
}

// The sign whose byte is number i of four.
CUTLASS_DEVICE float read_sign(uint32_t bytes, int i) {
  return __uint_as_float(__byte_perm(bytes, 0, 0x0444 | i << 12));
}

// One stage per bit of a column's number: (a, b), whose columns differ in that bit, becomes (a + b, a - b). The stages
// may come in any order.
//
// In this one the two are of the same vector.
template <int kStride>
CUTLASS_DEVICE void butterflies(Vector& x) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 8; ++i) {
    if ((i & kStride) == 0) {
      float const a = x[i], b = x[i + kStride];
      x[i] = a + b;
      x[i + kStride] = a - b;
    }
  }
}

// In this one of two vectors, after they are multiplied by their columns' signs.
CUTLASS_DEVICE void signed_butterflies(Vector& a, Vector& b, uint2 signs_a, uint2 signs_b) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 8; ++i) {
    float const sign_b = read_sign(i < 4 ? signs_b.x : signs_b.y, i % 4);
    float const signed_a = a[i] * read_sign(i < 4 ? signs_a.x : signs_a.y, i % 4);
    a[i] = fmaf(b[i], sign_b, signed_a);
    b[i] = fmaf(b[i], -sign_b, signed_a);
  }
}

// Of two vectors whose order, in lanes for which sign is -1, is swapped, and stays so.
CUTLASS_DEVICE void swapped_butterflies(Vector& first, Vector& second, float sign) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 8; ++i) {
    float const x = first[i], y = second[i];
    first[i] = fmaf(x, sign, y);
    second[i] = fmaf(y, -sign, x);
  }
}

// Two stages: that one, then the one between the lanes who differ in bit kLane, which is one of their part. Each gives
// away its second vector, which for the lane of b (sign -1) is of the columns that the lane of a (sign 1) has first:
// then each has both values of its columns. From there on the vector's bit is that of the part, the lane's that of the
// vector.
//
//            lane of a   lane of b             lane of a   lane of b
//   first    a0          b1            ->      a0 + b0     a1 + b1
//   second   a1          b0                    a0 - b0     a1 - b1
template <int kLane>
CUTLASS_DEVICE void exchanged_butterflies(Vector& first, Vector& second, float sign) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 8; ++i) {
    float const x = first[i], y = second[i];
    float const kept = fmaf(x, sign, y);
    float const given = fmaf(x, -sign, y);  // times the other lane's sign
    float const taken = __shfl_xor_sync(0xffffffff, given, kLane);
    first[i] = fmaf(taken, sign, kept);
    second[i] = fmaf(kept, sign, -taken);
  }
}

// The last two, of vectors i and i + kLane / 8: where bit kLane of a lane's number is not of its part, only one.
template <class Config, int kLane>
CUTLASS_DEVICE void lane_butterflies(Vector& first, Vector& second, float sign) {
  if constexpr (kLane >= Config::kRowsPerWarp) {
    exchanged_butterflies<kLane>(first, second, sign);
  } else {
    swapped_butterflies(first, second, sign);
  }
}

// The signs, and the stage between the halves of a row.
template <class Config>
CUTLASS_DEVICE void hadamard_of_halves(ThreadRow<Config> const& thread, uint8_t const* signs, Vector (&x)[8]) {
  auto const signs_of = [&](int i) { return *reinterpret_cast<uint2 const*>(signs + thread.column(i)); };
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 4; ++i) {
    signed_butterflies(x[i], x[i + 4], signs_of(i), signs_of(i + 4));
  }
}

// The stages within halves. Returns the largest absolute value of those that are not NaN: of a + b and a - b it is
// |a| + |b|, rounded as they are.
template <class Config>
CUTLASS_DEVICE float hadamard_in_halves(ThreadRow<Config> const& thread, Vector (&x)[8]) {
  float const sign8 = thread.swap & 1 ? -1.f : 1.f;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 8; i += 2) {
    lane_butterflies<Config, 8>(x[i], x[i + 1], sign8);
    butterflies<1>(x[i]);
    butterflies<1>(x[i + 1]);
  }
  float const sign16 = thread.swap & 2 ? -1.f : 1.f;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 8; i += i % 2 == 0 ? 1 : 3) {
    lane_butterflies<Config, 16>(x[i], x[i + 2], sign16);
  }
  float amax[4] = {};  // not one, whose steps would wait for each other
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

}  // namespace fa3
