// Everything that is fixed when a backward kernel is compiled: tile shape, stages, layouts, shared memory.
#pragma once

#include <numeric>

#include <cute/tensor.hpp>

#include <cutlass/cutlass.h>

#include "bwd/tiles.h"
#include "common/layout.cuh"
#include "common/named_barriers.cuh"
#include "common/pipeline.cuh"
#include "common/tile_scheduler.h"
#include "common/tma.cuh"

namespace fa3 {

// Two consumer warpgroups. With head_dim up to 128 each has 64 keys of the CTA's tile, whose dK and dV it keeps in
// registers (bwd/consumer.cuh). With wider heads those do not fit: one warpgroup has dV, the other dK, of the same 64
// keys (bwd/consumer_wide.cuh).
template <class Element_, int kHeadDim_, BwdTile kTile>
struct BwdConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kTileM = kTile.tile_m;
  static constexpr int kTileN = kTile.tile_n;
  static constexpr int kConsumerWarpgroups = 2;
  static constexpr bool kWide = kHeadDim > 128;
  static constexpr int kStagesQ = kTile.stages_q;
  static constexpr int kStagesDout = kTile.stages_dout;
  static constexpr int kStagesDs = kTile.stages_ds;
  static constexpr bool kVFromRegisters = kTile.v_from_registers;
  static constexpr bool kDsFromRegisters = kTile.ds_from_registers;
  // Wide heads: P goes from one warpgroup to the other with what its rounding left.
  static constexpr bool kSendRest = kWide && std::is_same_v<Element, cutlass::half_t>;
  static constexpr int kDqColumns = kTile.dq_columns;
  static constexpr int kDqSlices = kHeadDim / kConsumerWarpgroups / kDqColumns;  // per warpgroup and step
  static_assert(kDqSlices * kDqColumns * kConsumerWarpgroups == kHeadDim);
  static_assert(kTileM == kRowsPerWarpgroup, "dQ's tile is one m64 of WGMMA");
  static_assert(kTileN == (kWide ? 1 : kConsumerWarpgroups) * kRowsPerWarpgroup);
  static_assert(kWide ? kStagesQ >= 2 && kDqSlices > 1 : kStagesQ >= 3 && kStagesDs == kStagesQ && kDqSlices == 1);

  static constexpr int kDqWriters = 3;  // warps; a step's dQ is written by number (steps before it) % 3
  static_assert(kWide || kStagesQ == kDqWriters, "the stage of Q tells the writer");

  static constexpr int kConsumerWarps = kConsumerWarpgroups * cutlass::NumWarpsPerWarpGroup;
  static constexpr int kConsumerThreads = kConsumerWarpgroups * cutlass::NumThreadsPerWarpGroup;
  static constexpr int kNumThreads = cutlass::NumThreadsPerWarpGroup + kConsumerThreads;

  // Registers per thread. At entry every warpgroup has the same share of the 64 K; the producer gives most of its own
  // away.
  static constexpr int kEntryRegisters = 65536 / kNumThreads / 8 * 8;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;
  static_assert(kProducerRegisters + kConsumerWarpgroups * kConsumerRegisters <=
                    (1 + kConsumerWarpgroups) * kEntryRegisters,
                "setmaxnreg would wait for ever for registers that the CTA does not have");

  // A warpgroup's columns of dQ start at a slab of K: WGMMA cannot begin a transposed operand inside of one.
  static constexpr int kSlabColumns = slab_columns(kHeadDim);
  static constexpr int kSlabColumnsK = std::gcd(kDqColumns, kSlabColumns);  // 64, 32 or 16
  static_assert(kHeadDim % kSlabColumns == 0 && kDqColumns % kSlabColumnsK == 0);

  // Shared-memory layouts, as TMA writes them (common/tma.cuh): (rows, kHeadDim), and the same bytes seen as
  // (kHeadDim, rows) where the rows are what a product sums over.
  template <int kColumns>
  using KMajorAtom = std::conditional_t<kColumns == 64, cute::GMMA::Layout_K_SW128_Atom<Element>,
                                        std::conditional_t<kColumns == 32, cute::GMMA::Layout_K_SW64_Atom<Element>,
                                                           cute::GMMA::Layout_K_SW32_Atom<Element>>>;
  template <int kColumns>
  using MnMajorAtom = std::conditional_t<kColumns == 64, cute::GMMA::Layout_MN_SW128_Atom<Element>,
                                         std::conditional_t<kColumns == 32, cute::GMMA::Layout_MN_SW64_Atom<Element>,
                                                            cute::GMMA::Layout_MN_SW32_Atom<Element>>>;
  template <int kRows, int kStages, int kColumns = kSlabColumns>
  using LayoutRows = decltype(cute::tile_to_shape(
      KMajorAtom<kColumns>{}, cute::Shape<cute::Int<kRows>, cute::Int<kHeadDim>, cute::Int<kStages>>{}));
  template <int kRows, int kStages, int kColumns = kSlabColumns>
  using LayoutTransposed = decltype(cute::tile_to_shape(
      MnMajorAtom<kColumns>{}, cute::Shape<cute::Int<kHeadDim>, cute::Int<kRows>, cute::Int<kStages>>{},
      cute::Step<cute::_2, cute::_1, cute::_3>{}));
  using TileM = cute::Int<kTileM>;
  using TileN = cute::Int<kTileN>;
  using HeadDim = cute::Int<kHeadDim>;
  using DqColumns = cute::Int<kDqColumns>;
  using LayoutQ = LayoutRows<kTileM, kStagesQ>;
  using LayoutQt = LayoutTransposed<kTileM, kStagesQ>;
  using LayoutDout = LayoutRows<kTileM, kStagesDout>;
  using LayoutDoutt = LayoutTransposed<kTileM, kStagesDout>;
  using LayoutK = decltype(cute::take<0, 2>(LayoutRows<kTileN, 1, kSlabColumnsK>{}));
  using LayoutKt = decltype(cute::take<0, 2>(LayoutTransposed<kTileN, 1, kSlabColumnsK>{}));
  using LayoutV = decltype(cute::take<0, 2>(LayoutRows<kTileN, 1>{}));
  // (kTileM, kTileN, kStagesDs): dS with the queries contiguous, 128 bytes per key; and the same bytes by key.
  using LayoutDs = decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Element>{},
                                                cute::Shape<TileM, TileN, cute::Int<kStagesDs>>{}));
  using LayoutDst = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{},
                                                 cute::Shape<TileN, TileM, cute::Int<kStagesDs>>{}));

  // S^T = K Q^T and dP^T = V dO^T, (64 keys, kTileM queries): transposed, so that they become A operands in registers.
  using MmaS = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, TileM, HeadDim>>()));
  using MmaDpRegisters = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, cute::Shape<cute::_64, TileM, HeadDim>>()));
  using MmaDp = std::conditional_t<kVFromRegisters, MmaDpRegisters, MmaS>;
  // dV += P^T dO, P from registers, and dK += dS^T Q, (64 keys, kHeadDim).
  using MmaDv = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, cute::Shape<cute::_64, HeadDim, TileM>, cute::GMMA::Major::K,
                                 cute::GMMA::Major::MN>()));
  using MmaDkShared = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, HeadDim, TileM>, cute::GMMA::Major::K,
                                 cute::GMMA::Major::MN>()));
  using MmaDk = std::conditional_t<kDsFromRegisters, MmaDv, MmaDkShared>;
  // dQ = dS K, (kTileM queries, kDqColumns).
  using MmaDq = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<TileM, DqColumns, TileN>, cute::GMMA::Major::MN,
                                 cute::GMMA::Major::MN>()));

  static constexpr int kBytesQ = kTileM * kHeadDim * sizeof(Element);
  static constexpr int kBytesK = kTileN * kHeadDim * sizeof(Element);
  static constexpr int kBytesVector = kTileM * sizeof(float);  // lse or D of a step
  static constexpr int kDqPart = kTileM * kDqColumns;          // floats of dQ that are handed over at a time

  struct SharedStorage {
    alignas(1024) Element k[kTileN * kHeadDim];
    alignas(1024) Element v[kTileN * kHeadDim];
    alignas(1024) Element q[kStagesQ][kTileM * kHeadDim];
    alignas(1024) Element dout[kStagesDout][kTileM * kHeadDim];
    alignas(1024) Element ds[kStagesDs][kTileN * kTileM];
    alignas(128) Element p_rest[kSendRest ? kStagesDs : 0][kTileN * kTileM];
    alignas(128) float dq[kConsumerWarpgroups][kDqPart];
    alignas(128) float lse_log2[kStagesQ][kTileM];
    alignas(128) float dsum[kStagesDout][kTileM];
    Pipeline<1> pipeline_k;
    Pipeline<1> pipeline_v;
    Pipeline<kStagesQ> pipeline_q;
    Pipeline<kStagesDout> pipeline_dout;
    Pipeline<kStagesDs> pipeline_ds;
    cutlass::arch::ClusterBarrier p_full[kStagesDs];  // wide heads: P is there, for dS to take its place
    HandOver<kDqWriters> dq_staged[kConsumerWarpgroups];
  };
  // The dynamic shared memory of a CTA starts 1024-byte aligned when there is no static shared memory.
  static constexpr int kSmemBytes = sizeof(SharedStorage);
  static_assert(kSmemBytes <= 232448, "a CTA can have 227 KB of shared memory");
};

struct BwdKernelParams {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap dout;
  CUtensorMap dk;
  CUtensorMap dv;
  float const* lse_log2;  // (batch, num_heads_q, num_m_blocks, tile_m)
  float const* dsum;      // the same
  float* dq_accum;        // (batch, num_heads_q, num_m_blocks, tile): bwd/dq.cuh
  int* dq_turn;  // (batch, num_heads_q, num_m_blocks, warpgroup), or nullptr: how many n_blocks have been added
  int seqlen_q;
  int seqlen_k;
  int num_m_blocks;
  int num_heads_q;
  int group_size;  // num_heads_q / num_heads_kv
  float softmax_scale;
  float softmax_scale_log2;  // softmax_scale * log2(e)
  bool causal;
  TileSchedulerParams scheduler;
};

}  // namespace fa3
