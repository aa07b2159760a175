// Everything that is fixed when a forward kernel is compiled: tile shape, stages, layouts, shared memory.
#pragma once

#include <cute/tensor.hpp>

#include <cutlass/cutlass.h>

#include "common/layout.cuh"
#include "common/named_barriers.cuh"
#include "common/pipeline.cuh"
#include "common/tile_scheduler.h"
#include "common/tma.cuh"
#include "fwd/tiles.h"

namespace fa3 {

struct FwdKernelParams {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap out;
  float* lse;  // (batch, num_heads_q, seqlen_q)
  int seqlen_q;
  int seqlen_k;
  int num_heads_q;
  int group_size;  // num_heads_q / num_heads_kv
  float softmax_scale;
  float softmax_scale_log2;  // softmax_scale * log2(e)
  bool causal;
  TileSchedulerParams scheduler;
};

template <class Element_, int kHeadDim_, FwdTile kTile>
struct FwdConfig {
  using Element = Element_;
  using OutElement = Element;
  using Params = FwdKernelParams;
  static constexpr bool kFp8 = false;
  static constexpr bool kVTransposed = false;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kConsumerWarpgroups = kTile.consumer_warpgroups;
  static constexpr int kTileM = kConsumerWarpgroups * kRowsPerWarpgroup;
  static constexpr int kTileN = kTile.tile_n;
  static constexpr int kSlabColumns = slab_columns(kHeadDim);
  static constexpr int kOutSlabColumns = kSlabColumns;
  static constexpr int kStagesQ = kTile.stages_q;
  static constexpr int kStagesK = kTile.stages_kv;
  static constexpr int kStagesV = kTile.stages_kv;
  static constexpr bool kVBehindK = true;  // see fwd/producer.cuh
  static constexpr bool kOutReplacesQ = kTile.out_slabs == 0;
  static constexpr int kOutSlabs = kOutReplacesQ ? kHeadDim / kSlabColumns : kTile.out_slabs;
  static_assert(!kOutReplacesQ || kStagesQ == 1,
                "a turn of ping-pong lies between a warpgroup's last read of Q and the O that replaces it");

  static constexpr int kConsumerWarps = kConsumerWarpgroups * cutlass::NumWarpsPerWarpGroup;
  static constexpr int kVReaderWarps = kConsumerWarps;
  static constexpr int kNumThreads = (1 + kConsumerWarpgroups) * cutlass::NumThreadsPerWarpGroup;

  // Registers per thread. At entry every warpgroup has the same share of the 64 K; the producer gives most of its own
  // away.
  static constexpr int kEntryRegisters = 65536 / kNumThreads / 8 * 8;
  static constexpr int kProducerRegisters = kConsumerWarpgroups == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumerWarpgroups == 2 ? 240 : 160;
  static_assert(kProducerRegisters + kConsumerWarpgroups * kConsumerRegisters <=
                    (1 + kConsumerWarpgroups) * kEntryRegisters,
                "setmaxnreg would wait for ever for registers that the CTA does not have");

  static_assert(kHeadDim % kSlabColumns == 0 && kHeadDim / kSlabColumns % kOutSlabs == 0);
  static_assert(kTileN % 16 == 0, "P V takes keys 16 at a time");
  static_assert((kConsumerWarpgroups - 1) * kRowsPerWarpgroup <= kTileN,
                "a warpgroup may skip at most one key block that the last one sees");

  using Schedule = PingPong<kConsumerWarpgroups>;

  // Shared-memory layouts, as TMA writes them (common/tma.cuh).
  using KMajorAtom = std::conditional_t<kSlabColumns == 64, cute::GMMA::Layout_K_SW128_Atom<Element>,
                                        cute::GMMA::Layout_K_SW64_Atom<Element>>;
  using MnMajorAtom = std::conditional_t<kSlabColumns == 64, cute::GMMA::Layout_MN_SW128_Atom<Element>,
                                         cute::GMMA::Layout_MN_SW64_Atom<Element>>;
  using TileN = cute::Int<kTileN>;
  using HeadDim = cute::Int<kHeadDim>;
  using StagesQ = cute::Int<kStagesQ>;
  using StagesKV = cute::Int<kTile.stages_kv>;
  // (64, kHeadDim, kStagesQ): each consumer warpgroup has Q tiles of its own.
  using LayoutQ = decltype(cute::tile_to_shape(KMajorAtom{}, cute::Shape<cute::_64, HeadDim, StagesQ>{}));
  // (kTileN, kHeadDim, kStagesKV)
  using LayoutK = decltype(cute::tile_to_shape(KMajorAtom{}, cute::Shape<TileN, HeadDim, StagesKV>{}));
  // (kHeadDim, kTileN, kStagesKV): V as the B operand of P V, the same bytes as a K tile seen with head_dim as "N".
  using LayoutVt = decltype(cute::tile_to_shape(MnMajorAtom{}, cute::Shape<HeadDim, TileN, StagesKV>{},
                                                cute::Step<cute::_2, cute::_1, cute::_3>{}));

  // S (64, kTileN) = Q K^T, both operands from shared memory.
  using MmaQK = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, TileN, HeadDim>>()));
  // O (64, kHeadDim) += P V, P from registers.
  using MmaPV = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, cute::Shape<cute::_64, HeadDim, TileN>, cute::GMMA::Major::K,
                                 cute::GMMA::Major::MN>()));

  static constexpr int kBytesQ = kRowsPerWarpgroup * kHeadDim * sizeof(Element);
  static constexpr int kBytesKV = kTileN * kHeadDim * sizeof(Element);

  using PipelineQ = Pipeline<kStagesQ>;
  using PipelineKV = Pipeline<kTile.stages_kv>;

  struct SharedStorage {
    alignas(1024) Element q[kConsumerWarpgroups][kStagesQ][kRowsPerWarpgroup * kHeadDim];
    alignas(1024) Element k[kStagesK][kTileN * kHeadDim];
    alignas(1024) Element v[kStagesV][kTileN * kHeadDim];
    // (warpgroup, slab, 64 rows, kSlabColumns) of O
    alignas(1024) Element out[kOutReplacesQ ? 0 : kConsumerWarpgroups][kOutSlabs][kRowsPerWarpgroup * kSlabColumns];
    PipelineQ pipeline_q[kConsumerWarpgroups];
    PipelineKV pipeline_k;
    PipelineKV pipeline_v;
  };
  // The dynamic shared memory of a CTA starts 1024-byte aligned when there is no static shared memory.
  static constexpr int kSmemBytes = sizeof(SharedStorage);
  static_assert(kSmemBytes <= 232448, "a CTA can have 227 KB of shared memory");
};

}  // namespace fa3
