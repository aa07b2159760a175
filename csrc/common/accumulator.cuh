// How a WGMMA accumulator lies in registers (PTX ISA, "Matrix fragments for wgmma.mma_async.m64nNk16").
//
// Warp w of the warpgroup owns rows 16 w to 16 w + 15; lane l = 4 g + q owns rows g and g + 8 of them, and of every 8
// columns the two at 2 q:
//
//               columns  8j+0 8j+1 | 8j+2 8j+3 | 8j+4 8j+5 | 8j+6 8j+7
//   row 16w+g            q = 0     | q = 1     | q = 2     | q = 3          register 4j + c
//   row 16w+g+8          q = 0     | q = 1     | q = 2     | q = 3          register 4j + 2 + c
//
// so one row lies in the four lanes of a quad, and a row reduction ends with two xor-shuffles. The same registers, cast
// to 16 bits and taken eight at a time, are the A operand of m64nNk16: P needs no data movement.
//
// Names: m, g, s, r for a whole tensor, a CTA's tile, shared memory and registers; tSrQ is "Q as an operand of the
// product that makes S" (for WGMMA a descriptor of shared memory).
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/numeric_conversion.h>

namespace fa3 {

constexpr int kRowsPerThread = 2;
constexpr int kRowsPerWarp = 16;
constexpr int kRowsPerWarpgroup = 64;

// Which of the warpgroup's 64 rows this thread's accumulator row `i` is, and the first column that the thread owns.
CUTLASS_DEVICE int accumulator_row(int i) {
  int const thread_idx = threadIdx.x % cutlass::NumThreadsPerWarpGroup;
  return thread_idx / 32 * kRowsPerWarp + thread_idx % 32 / 4 + 8 * i;
}
CUTLASS_DEVICE int accumulator_first_column() { return threadIdx.x % 4 * 2; }

// ((2, 2, columns / 8), 1, 1) -> (row, column of this thread); column c of the thread is column c / 2 * 8 + c % 2 past
// its first.
template <class Tensor>
CUTLASS_DEVICE auto rows_and_columns(Tensor& accumulator) {
  using namespace cute;
  constexpr int kNumColumns = decltype(size(accumulator))::value / kRowsPerThread;
  return make_tensor(accumulator.data(),
                     Layout<Shape<_2, Shape<_2, Int<kNumColumns / 2>>>, Stride<_2, Stride<_1, _4>>>{});
}
constexpr int column_offset(int column) { return column / 2 * 8 + column % 2; }

// Casts an accumulator to 16 bits, in the same order of registers: that of an A operand, and of the stored output.
template <class Accumulator, class Operand>
CUTLASS_DEVICE void convert(Accumulator const& from, Operand& to) {
  using From = typename Accumulator::value_type;
  using To = typename Operand::value_type;
  constexpr int kSize = decltype(cute::size(to))::value;
  static_assert(kSize == decltype(cute::size(from))::value);
  auto const& source = reinterpret_cast<cutlass::Array<From, kSize> const&>(*from.data());
  reinterpret_cast<cutlass::Array<To, kSize>&>(*to.data()) =
      cutlass::NumericArrayConverter<To, From, kSize>::convert(source);
}

}  // namespace fa3
