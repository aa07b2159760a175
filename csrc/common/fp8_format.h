// The format of FP8 tensors: rows per scale, and V transposed, with its keys permuted. Integers only, so that the tests
// can run it on the host. V is transposed by fwd/converter.cuh or by quantize/store.cuh.
//
// P comes from an accumulator, whose thread (lane 4 g + q) holds of every 16 keys 2q, 2q+1, 8+2q and 8+2q+1. An FP8 A
// operand takes four consecutive keys from a thread. P stays where it is, and the keys of V are permuted instead:
//
//   position   0 1 2 3   4 5  6  7   8 9 10 11   12 13 14 15      4 q + b
//   key        0 1 8 9   2 3 10 11   4 5 12 13    6  7 14 15      8 (b / 2) + 2 q + b % 2
//
// That is also what a transposing load leaves in a thread. ldmatrix.trans moves 16 bits, two channels of a key, and
// after it lane 4 g + q holds, of 8 keys, 2q and 2q+1, of 16 channels, 2g and 2g+1:
//
//   r0   [key 2q    : channels 2g, 2g+1]  [key 2q+1  : channels 2g, 2g+1]
//   r1   [key 8+2q  : channels 2g, 2g+1]  [key 8+2q+1: channels 2g, 2g+1]
//
// so that the even bytes of r0 and r1 are positions 4q to 4q+3 of channel 2g, the odd ones of channel 2g+1, and
// stmatrix writes the 16 bytes that the four lanes of a quad hold of a channel.
#pragma once

#include "common/swizzle.h"

namespace fa3 {

// Rows of q, k or v that share a scale, and the keys of a step of the FP8 forward. FP8_SCALE_ROWS in Python.
constexpr int kFp8ScaleRows = 128;

// One ldmatrix and one stmatrix move so many keys of so many channels.
constexpr int kTransposedKeys = 32;
constexpr int kTransposedChannels = 16;

// V in slabs [tile_n keys][kSlabBytes]: the 16 bytes whose address lane `lane` gives ldmatrix, of the keys from `key`
// (a multiple of 32) and the channels from `channel` (of 16). Matrix lane / 8 has 8 keys. A channel's chunk of 16 bytes
// is exclusive-ored with the row's swizzle, so that one register per lane is all that a loop must keep; what is added
// to that, v_tile_offset, is the same for all lanes.
template <int kSlabBytes>
FA3_HOST_DEVICE constexpr int v_tile_offset(int key, int channel, int tile_n) {
  return (channel / kSlabBytes * tile_n + key) * kSlabBytes;
}
template <int kSlabBytes>
FA3_HOST_DEVICE int v_load_offset(int lane, int key, int channel, int tile_n) {
  int const swizzle = swizzled_chunk<kSlabBytes>(lane, 0) * 16;
  return ((lane * kSlabBytes + swizzle) ^ channel % kSlabBytes) + v_tile_offset<kSlabBytes>(key, channel, tile_n);
}

// For __byte_perm of r0 and r1, or of r2 and r3: the bytes of one of the lane's channels, and then of the other. The
// upper quads begin with the odd channel, so that the eight lines of a stored matrix lie in different banks.
FA3_HOST_DEVICE int channel_bytes(int lane, int which) { return (lane / 16 ^ which) == 0 ? 0x6420 : 0x7531; }

// The transposed tile, a line of 128 keys per channel: the 16 bytes whose address the lane gives stmatrix. Its matrices
// are keys 0 to 15 of eight channels, of the other eight, keys 16 to 31 of the first eight, of the others.
FA3_HOST_DEVICE int vt_store_offset(int lane, int key, int channel) {
  int const matrix = lane / 8, quad = lane % 8;
  int const line = 2 * quad + (matrix % 2 ^ quad / 4);  // of 16
  return ((channel + line) * 128 + swizzled_chunk<128>(line, matrix / 2) * 16) ^ key;
}

// P as an operand: the first of the accumulator's registers that register i is made of, with those 1, 4 and 5 after it.
//
//   key, mod 32     2q   2q+1 | 2q   2q+1 | 8+2q 8+2q+1 | 8+2q 8+2q+1 | 16+2q ...
//   row             g         | g+8       | g           | g+8         | g
//   accumulator     0    1    | 2    3    | 4    5      | 6    7      | 8
//   operand         reg 0     | reg 1     | reg 0       | reg 1       | reg 2
FA3_HOST_DEVICE int first_accumulator_register(int i) { return i / 2 * 8 + i % 2 * 2; }

}  // namespace fa3
