// The Hadamard transform of a row in Sylvester's order, without its factor 1 / sqrt(kWidth).
#pragma once

#include "quantize/config.h"

namespace fa3 {

// One stage per bit of a column's number: (a, b), whose columns differ in that bit, becomes (a + b, a - b). The stages
// may come in any order. Bits 0 to 4 and the highest one are in the number of a thread's register, the ones between in
// its part, which is the lane's highest bits.
template <class Config>
CUTLASS_DEVICE void hadamard(ThreadRow<Config> const& thread, Vector (&x)[8]) {
  CUTLASS_PRAGMA_UNROLL
  for (int stride = 1; stride < 64; stride *= 2) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 64; ++i) {
      if ((i & stride) == 0) {
        float const a = value(x, i), b = value(x, i + stride);
        value(x, i) = a + b;
        value(x, i + stride) = a - b;
      }
    }
  }
  CUTLASS_PRAGMA_UNROLL
  for (int bit = 1; bit < Config::kThreadsPerRow; bit *= 2) {
    float const sign = thread.part & bit ? -1.f : 1.f;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 64; ++i) {
      float const own = value(x, i);
      value(x, i) = fmaf(own, sign, __shfl_xor_sync(0xffffffff, own, bit * Config::kRowsPerWarp));
    }
  }
}

}  // namespace fa3
