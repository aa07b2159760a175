// The one place that issues WGMMA.
#pragma once

#include <cute/tensor.hpp>

namespace fa3 {

// Issues C = A B, or C += A B if `accumulate`, for one warpgroup and commits it as one group. It is asynchronous: C,
// and A if it is in registers, belong to the tensor cores until warpgroup_wait.
template <class TiledMma, class TensorA, class TensorB, class TensorC>
CUTLASS_DEVICE void gemm(TiledMma& mma, TensorA&& tA, TensorB const& tB, TensorC& tC, bool accumulate) {
  constexpr bool kAInRegisters = !cute::is_base_of<cute::GMMA::DescriptorIterator, typename TiledMma::FrgTypeA>::value;
  if constexpr (kAInRegisters) {
    cute::warpgroup_fence_operand(tA);
  }
  cute::warpgroup_fence_operand(tC);
  cute::warpgroup_arrive();
  mma.accumulate_ = accumulate ? cute::GMMA::ScaleOut::One : cute::GMMA::ScaleOut::Zero;
  CUTLASS_PRAGMA_UNROLL
  for (int k = 0; k < cute::size<2>(tA); ++k) {
    cute::gemm(mma, tA(cute::_, cute::_, k), tB(cute::_, cute::_, k), tC);
    mma.accumulate_ = cute::GMMA::ScaleOut::One;
  }
  cute::warpgroup_commit_batch();
  cute::warpgroup_fence_operand(tC);
  if constexpr (kAInRegisters) {
    cute::warpgroup_fence_operand(tA);
  }
}

// The same descriptors, computed where they are used. The compiler would compute those of an operand that does not move
// (K in the backward) once, before the loop, and hold each in two registers; computed anew each costs an addition.
template <class Descriptors>
CUTLASS_DEVICE auto not_hoisted(Descriptors const& descriptors) {
  auto iterator = descriptors.data();
  asm volatile("" : "+r"(iterator.desc_.reg32_[0]));
  return cute::make_tensor(iterator, descriptors.layout());
}

// Loads an A operand (64, K) from shared memory to registers, with ldmatrix. All threads of the warpgroup call it.
template <class TiledMma, class TensorS, class TensorR>
CUTLASS_DEVICE void load_a_operand(TiledMma const& mma, TensorS const& sA, TensorR& rA) {
  using Element = typename TensorR::value_type;
  auto const copy = cute::make_tiled_copy_A(cute::Copy_Atom<cute::SM75_U32x4_LDSM_N, Element>{}, mma);
  auto const thread_copy = copy.get_slice(threadIdx.x % cutlass::NumThreadsPerWarpGroup);
  cute::copy(copy, thread_copy.partition_S(cute::as_position_independent_swizzle_tensor(sA)), thread_copy.retile_D(rA));
}

}  // namespace fa3
