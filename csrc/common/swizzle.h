// The swizzle that TMA and WGMMA apply to a slab of shared memory. Integers only, so that the tests can run it.
#pragma once

#include "common/host_device.h"

namespace fa3 {

// Where the 16-byte chunk `chunk` of a slab's row `row` lies in that row.
template <int kSlabBytes>
FA3_HOST_DEVICE int swizzled_chunk(int row, int chunk) {
  return kSlabBytes == 128 ? chunk ^ (row % 8) : kSlabBytes == 64 ? chunk ^ (row / 2 % 4) : chunk ^ (row / 4 % 2);
}

}  // namespace fa3
