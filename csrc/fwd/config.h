// Everything that is fixed when a forward kernel is compiled: tile shape, stages, layouts, shared memory.
#pragma once

#include <cute/tensor.hpp>

#include <cutlass/cutlass.h>

#include "common/accumulator.cuh"
#include "common/head_dims.h"
#include "common/hopper.h"
#include "common/named_barriers.cuh"
#include "common/pipeline.cuh"
#include "common/tile_scheduler.h"
#include "common/tma.cuh"
#include "fwd/tiles.h"

namespace fa3::fwd {

struct KernelParams {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap out;
  float* lse;  // (batch, num_heads_q, seqlen_q)
  SeqlenParams seqlen;
  MaskParams mask;
  ScoreParams scores;
  int num_heads_q;
  int group_size;  // num_heads_q / num_heads_kv
  TileSchedulerParams scheduler;
};

struct Fp8KernelParams : KernelParams {
  Fp8Params fp8;
  bool causal;  // instead of the mask: see CausalMask
};

// Element is cutlass::half_t, bfloat16_t or float_e4m3_t.
//
// WGMMA takes FP8 operands only with the dimension that a product sums over contiguous, and P V sums over keys: the B
// operand of P V is then V transposed (kTile.v_layout), with its keys in the order of common/fp8_format.h.
template <class Element_, class HeadDims_, FwdTile kTile>
struct Config {
  using Element = Element_;
  static constexpr bool kFp8 = std::is_same_v<Element, cutlass::float_e4m3_t>;
  // FP8: or float16, as the parameters say; 16 bits in any case.
  using OutElement = std::conditional_t<kFp8, cutlass::bfloat16_t, Element>;
  using Params = std::conditional_t<kFp8, Fp8KernelParams, KernelParams>;
  static constexpr int kHeadDim = HeadDims_::kHeadDim;
  static constexpr int kHeadDimV = HeadDims_::kHeadDimV;
  static constexpr int kConsumerWarpgroups = kTile.consumer_warpgroups;
  static constexpr int kTileM = kConsumerWarpgroups * kRowsPerWarpgroup;
  static constexpr int kTileN = kTile.tile_n;
  static constexpr Schedule kSchedule = kTile.schedule;
  static constexpr VLayout kVLayout = kTile.v_layout;
  static constexpr bool kConvertsV = kVLayout == VLayout::kConverted;
  static_assert(kFp8 == (kVLayout != VLayout::kRows));
  static_assert(!kFp8 || kTileN == kFp8ScaleRows, "a block of keys has one scale");

  static constexpr int kSlabColumns = slab_columns(kHeadDim, sizeof(Element));
  static constexpr int kSlabColumnsV = slab_columns(kHeadDimV, sizeof(Element));
  static constexpr int kSlabColumnsOut = slab_columns(kHeadDimV);
  static constexpr int kStagesQ = kTile.stages_q;
  static constexpr int kStagesKV = kTile.stages_kv;
  static constexpr int kStagesVRows = kTile.stages_v_rows;
  static constexpr bool kOutAliasesQ = kTile.out_buffer == OutBuffer::kAliasesQ;
  static constexpr int kOutSlabs = kOutAliasesQ ? kHeadDimV / kSlabColumnsOut : kTile.out_slabs;
  static_assert(!kOutAliasesQ || (kStagesQ == 1 && kHeadDimV <= kHeadDim),
                "a turn of ping-pong lies between a warpgroup's last read of Q and the O that takes its place");

  // FP8: P V is computed in slices of its columns, into registers of their own, which are then added to O. The sums of
  // P's rows come from the tensor cores too: after V's channels there are rows of ones, as many as the smallest N of
  // WGMMA, which belong to the last slice.
  static constexpr int kSumColumns = kFp8 ? 8 : 0;
  static constexpr int kVtRows = kHeadDimV + kSumColumns;
  static constexpr int kPvSliceColumns = kTile.pv_slice_columns > 0 ? kTile.pv_slice_columns : kHeadDimV;
  static constexpr int kPvSlices = kHeadDimV / kPvSliceColumns;
  // Slices in flight together. Serial: as many as fit into the registers of S.
  static constexpr int kPvBuffers = kSchedule == Schedule::kSerial ? kTileN / kPvSliceColumns : 1;
  static_assert(kHeadDimV % kPvSliceColumns == 0 && kPvBuffers <= kPvSlices);
  static_assert(kSchedule == Schedule::kSerial || kPvSlices == 1);
  static_assert(kSchedule == Schedule::kOverlapped || kFp8);

  static constexpr int kConsumerWarps = kConsumerWarpgroups * cutlass::NumWarpsPerWarpGroup;
  static constexpr int kConverterWarps = kConvertsV ? cutlass::NumWarpsPerWarpGroup - 1 : 0;
  static constexpr int kNumThreads = (1 + kConsumerWarpgroups) * cutlass::NumThreadsPerWarpGroup;

  // FP8: with more than 224 ptxas does not keep scales in uniform registers, which costs 1 to 4 %.
  using Registers = std::conditional_t<kConsumerWarpgroups == 3, RegisterSplit<3, 32, 160>,
                                       std::conditional_t<kFp8, RegisterSplit<2, 56, 224>, RegisterSplit<2, 24, 240>>>;

  static_assert(kHeadDim % kSlabColumns == 0 && kHeadDimV / kSlabColumnsOut % kOutSlabs == 0);
  static_assert(kTileN % 16 == 0, "P V takes keys 16 at a time");
  static_assert((kConsumerWarpgroups - 1) * kRowsPerWarpgroup <= kTileN,
                "a sliding window gives each warpgroup all but one of the key blocks of its CTA");

  // FP8 kernels serve causal masks and none.
  static constexpr bool kAnyMask = !kFp8;
  static CUTLASS_DEVICE auto mask(Params const& params, SeqlenInfo const& seqlen) {
    if constexpr (kAnyMask) {
      return Mask(params.mask, seqlen);
    } else {
      return CausalMask(params.causal, seqlen);
    }
  }

  using Turns = PingPong<kConsumerWarpgroups>;
  // Keep the barrier id of the next warpgroup in a register, or compute it at each pass_turn: with one choice for all
  // kernels ptxas spills in some (docs/design/fp8.md).
  static constexpr bool kNextTurnInRegister = !kFp8 || (kHeadDim == 256 && kConvertsV);

  // Shared-memory layouts, as TMA writes them (common/tma.cuh).
  template <int kColumns>
  using KMajorAtom = std::conditional_t<kColumns * sizeof(Element) == 128, cute::GMMA::Layout_K_SW128_Atom<Element>,
                                        cute::GMMA::Layout_K_SW64_Atom<Element>>;
  template <int kColumns>
  using MnMajorAtom = std::conditional_t<kColumns * sizeof(Element) == 128, cute::GMMA::Layout_MN_SW128_Atom<Element>,
                                         cute::GMMA::Layout_MN_SW64_Atom<Element>>;
  using TileN = cute::Int<kTileN>;
  using HeadDim = cute::Int<kHeadDim>;
  using HeadDimV = cute::Int<kHeadDimV>;
  using StagesKV = cute::Int<kStagesKV>;
  // (64, kHeadDim, kStagesQ): each consumer warpgroup has Q tiles of its own.
  using LayoutQ =
      decltype(cute::tile_to_shape(KMajorAtom<kSlabColumns>{}, cute::Shape<cute::_64, HeadDim, cute::Int<kStagesQ>>{}));
  // (kTileN, kHeadDim, kStagesKV)
  using LayoutK = decltype(cute::tile_to_shape(KMajorAtom<kSlabColumns>{}, cute::Shape<TileN, HeadDim, StagesKV>{}));
  // (kVtRows, kTileN, kStagesKV): V as the B operand of P V, whose "N" are channels. In 16 bits these are the bytes of
  // a tile of rows, seen the other way; in FP8 a line of 128 bytes per channel.
  static constexpr auto layout_vt() {
    using namespace cute;
    if constexpr (kFp8) {
      return tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, Shape<Int<kVtRows>, TileN, StagesKV>{});
    } else {
      return tile_to_shape(MnMajorAtom<kSlabColumnsV>{}, Shape<HeadDimV, TileN, StagesKV>{}, Step<_2, _1, _3>{});
    }
  }
  using LayoutVt = decltype(layout_vt());

  // S (64, kTileN) = Q K^T, both operands from shared memory.
  using MmaQK = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, TileN, HeadDim>>()));
  // (64, columns) = P V, P from registers.
  template <int kColumns>
  using MmaPV = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<kColumns>, TileN>,
                                 cute::GMMA::Major::K, kFp8 ? cute::GMMA::Major::K : cute::GMMA::Major::MN>()));

  static constexpr int kBytesQ = kRowsPerWarpgroup * kHeadDim * sizeof(Element);
  static constexpr int kBytesK = kTileN * kHeadDim * sizeof(Element);
  static constexpr int kBytesV = kTileN * kHeadDimV * sizeof(Element);

  struct OutStorage {
    // (warpgroup, slab, 64 rows, kSlabColumnsOut) of O
    alignas(1024) OutElement out[kConsumerWarpgroups][kOutSlabs][kRowsPerWarpgroup * kSlabColumnsOut];
  };
  struct ConverterStorage {
    alignas(1024) Element v_rows[kStagesVRows][kTileN * kHeadDimV];  // as TMA brings it
  };
  template <int>
  struct Nothing {};

  struct SharedStorage : std::conditional_t<kOutAliasesQ, Nothing<0>, OutStorage>,
                         std::conditional_t<kConvertsV, ConverterStorage, Nothing<1>> {
    alignas(1024) Element q[kConsumerWarpgroups][kStagesQ][kRowsPerWarpgroup * kHeadDim];
    alignas(1024) Element k[kStagesKV][kTileN * kHeadDim];
    alignas(1024) Element v[kStagesKV][kTileN * kVtRows];  // as P V reads it
    Pipeline<kStagesQ> pipeline_q[kConsumerWarpgroups];
    Pipeline<kStagesKV> pipeline_k;
    Pipeline<kStagesKV> pipeline_v;
    std::conditional_t<kConvertsV, Pipeline<kStagesVRows>, Nothing<2>> pipeline_v_rows;
  };
  // The dynamic shared memory of a CTA starts 1024-byte aligned when there is no static shared memory.
  static constexpr int kSmemBytes = sizeof(SharedStorage);
  static_assert(kSmemBytes <= kMaxSmemBytes);
};

}  // namespace fa3::fwd
