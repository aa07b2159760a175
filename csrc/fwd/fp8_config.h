// What is fixed when an FP8 forward kernel is compiled. The 16-bit kernels' are in fwd/config.h.
//
// WGMMA takes FP8 operands only with the dimension that a product sums over contiguous, and P V sums over keys: V is
// transposed in shared memory, tile by tile, by warps of the producer's warpgroup (fwd/transpose_v.cuh), or comes so
// from the quantiser (kVTransposed).
#pragma once

#include "fwd/config.h"

namespace fa3 {

struct FwdFp8KernelParams : FwdKernelParams {
  BlockScales q_scales;
  BlockScales k_scales;
  BlockScales v_scales;
  int q_scales_group;  // query heads that share a scale of q
  bool out_fp16;       // else bfloat16
};

// `first` if kFirst, else `second`.
template <bool kFirst, class First, class Second>
CUTLASS_DEVICE auto& either(First& first, Second& second) {
  if constexpr (kFirst) {
    return first;
  } else {
    return second;
  }
}

template <int kHeadDim_, FwdFp8Tile kTile>
struct FwdFp8Config {
  using Element = cutlass::float_e4m3_t;
  using OutElement = cutlass::bfloat16_t;  // or float16, as params say: 16 bits in any case
  using Params = FwdFp8KernelParams;
  static constexpr bool kFp8 = true;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kConsumerWarpgroups = kTile.consumer_warpgroups;
  static constexpr int kTileM = kConsumerWarpgroups * kRowsPerWarpgroup;
  static constexpr int kTileN = kFp8BlockRows;  // so that a tile of keys has one scale
  static constexpr int kSlabColumns = slab_columns(kHeadDim, sizeof(Element));
  static constexpr int kOutSlabColumns = slab_columns(kHeadDim);
  static constexpr int kStagesQ = 1;
  static constexpr int kStagesKV = kTile.stages_kv;  // of K, and of V as P V reads it
  static constexpr bool kVTransposed = kTile.stages_v_rows == 0;
  static constexpr int kStagesK = kStagesKV;
  static constexpr int kStagesV = kVTransposed ? kStagesKV : kTile.stages_v_rows;
  static constexpr int kStagesVt = kVTransposed ? 0 : kStagesKV;
  static constexpr bool kOutReplacesQ = false;
  static constexpr int kOutSlabs = kTile.out_slabs;
  static constexpr bool kOverlaps = kTile.overlaps;
  static constexpr bool kVBehindK = kOverlaps;  // see fwd/producer.cuh
  static constexpr int kPvColumns = kTile.pv_columns;
  static constexpr int kPvParts = kHeadDim / kPvColumns;
  // The sums of P's rows come from the tensor cores too: after V's channels there are rows of ones, as many as WGMMA's
  // least step, which the last part of P V includes.
  static constexpr int kSumColumns = 8;
  static constexpr int kPvRows = kHeadDim + kSumColumns;
  // Parts of P V that are under way together, in the place of S.
  static constexpr int kPvBuffers = kOverlaps ? 1 : kTileN / kPvColumns;
  // What is faster with the one loop and not with the other (docs/design/fp8.md): K and V asked for before they are
  // needed (Pipeline::landed), scores compared as integers.
  static constexpr bool kAsksEarly = !kOverlaps;
  static constexpr bool kMaxOfIntegers = !kOverlaps;
  // Whether the next tile's first Q K^T runs while O is written. (With three warpgroups: slower from 1k keys on.)
  static constexpr bool kOverlapsTiles = !kOverlaps && kConsumerWarpgroups == 2;
  // Whether a register holds whose turn is next, or that is computed where the turn is passed: done one way for all,
  // ptxas spills in some kernels or gives up their pipeline of WGMMAs (docs/design/fp8.md).
  static constexpr bool kKeepsTurns = kHeadDim == 256 && !kVTransposed;
  static_assert(kHeadDim % kPvColumns == 0 && kPvBuffers <= kPvParts && (!kOverlaps || kPvParts == 1));

  static constexpr int kConsumerWarps = kConsumerWarpgroups * cutlass::NumWarpsPerWarpGroup;
  static constexpr int kNumThreads = (1 + kConsumerWarpgroups) * cutlass::NumThreadsPerWarpGroup;
  static constexpr int kTransposerWarps = cutlass::NumWarpsPerWarpGroup - 1;
  static constexpr int kVReaderWarps = kVTransposed ? kConsumerWarps : kTransposerWarps;
  static constexpr int kTransposesUnderWay = kConsumerWarpgroups == 2 ? 4 : 1;  // as their registers allow

  static constexpr int kEntryRegisters = 65536 / kNumThreads / 8 * 8;
  static constexpr int kProducerRegisters = kConsumerWarpgroups == 2 ? 56 : 32;
  // With more than 224 ptxas does not keep scales in uniform registers: 1 to 4 % slower.
  static constexpr int kConsumerRegisters = kConsumerWarpgroups == 2 ? 224 : 160;
  static_assert(kProducerRegisters + kConsumerWarpgroups * kConsumerRegisters <=
                    (1 + kConsumerWarpgroups) * kEntryRegisters,
                "setmaxnreg would wait for ever for registers that the CTA does not have");
  static_assert((kConsumerWarpgroups - 1) * kRowsPerWarpgroup <= kTileN,
                "a warpgroup may skip at most one key block that the last one sees");

  using Schedule = PingPong<kConsumerWarpgroups>;

  using Atom = std::conditional_t<kSlabColumns == 128, cute::GMMA::Layout_K_SW128_Atom<Element>,
                                  cute::GMMA::Layout_K_SW64_Atom<Element>>;
  using TileN = cute::Int<kTileN>;
  using HeadDim = cute::Int<kHeadDim>;
  using PvColumns = cute::Int<kPvColumns>;
  using PvColumnsAndSums = cute::Int<kPvColumns + kSumColumns>;
  using LayoutQ = decltype(cute::tile_to_shape(Atom{}, cute::Shape<cute::_64, HeadDim, cute::Int<kStagesQ>>{}));
  using LayoutK = decltype(cute::tile_to_shape(Atom{}, cute::Shape<TileN, HeadDim, cute::Int<kStagesK>>{}));
  // (kPvRows, kTileN, kStagesKV): a line of 128 bytes per channel, the keys permuted as P has them.
  using LayoutVt = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{},
                                                cute::Shape<cute::Int<kPvRows>, TileN, cute::Int<kStagesKV>>{}));

  // S (64, kTileN) = Q K^T, both operands from shared memory.
  using MmaQK = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, TileN, HeadDim>>()));
  // (64, kPvColumns) = P V of one tile, P from registers; the last part with the sums.
  using MmaPV = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, cute::Shape<cute::_64, PvColumns, TileN>>()));
  using MmaPVAndSums = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, cute::Shape<cute::_64, PvColumnsAndSums, TileN>>()));

  static constexpr int kBytesQ = kRowsPerWarpgroup * kHeadDim;
  static constexpr int kBytesKV = kTileN * kHeadDim;

  struct SharedStorage {
    alignas(1024) Element q[kConsumerWarpgroups][kStagesQ][kRowsPerWarpgroup * kHeadDim];
    alignas(1024) Element k[kStagesK][kTileN * kHeadDim];
    alignas(1024) Element v[kStagesV][kTileN * (kVTransposed ? kPvRows : kHeadDim)];
    alignas(1024) Element vt[kStagesVt][kPvRows * kTileN];
    alignas(1024) OutElement out[kConsumerWarpgroups][kOutSlabs][kRowsPerWarpgroup * kOutSlabColumns];
    Pipeline<kStagesQ> pipeline_q[kConsumerWarpgroups];
    Pipeline<kStagesK> pipeline_k;
    Pipeline<kStagesV> pipeline_v;
    Pipeline<kStagesVt> pipeline_vt;
  };
  static constexpr int kSmemBytes = sizeof(SharedStorage);
  static_assert(kSmemBytes <= 232448, "a CTA can have 227 KB of shared memory");
};

}  // namespace fa3
