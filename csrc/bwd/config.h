// Everything that is fixed when a backward kernel is compiled: tile shape, stages, layouts, shared memory.
#pragma once

#include <numeric>

#include <cute/tensor.hpp>

#include <cutlass/cutlass.h>

#include "bwd/tiles.h"
#include "common/accumulator.cuh"
#include "common/head_dims.h"
#include "common/hopper.h"
#include "common/named_barriers.cuh"
#include "common/pipeline.cuh"
#include "common/tile_scheduler.h"
#include "common/tma.cuh"

namespace fa3::bwd {

struct KernelParams {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap dout;
  CUtensorMap dk;
  CUtensorMap dv;
  float const* lse_log2;  // (batch, num_heads_q, num_m_blocks, tile_m)
  float const* dsum;      // the same
  float* dq_accum;        // (batch, num_heads_q, num_m_blocks, tile): dq.cuh
  int* dq_semaphore;  // (batch, num_heads_q, num_m_blocks, warpgroup), or nullptr: how many n_blocks have been added
  SeqlenParams seqlen;
  MaskParams mask;
  ScoreParams scores;
  int num_m_blocks;  // of the longest sequence
  int num_heads_q;
  int group_size;  // num_heads_q / num_heads_kv
  TileSchedulerParams scheduler;
};

// Two consumer warpgroups. With head_dim up to 128 each has 64 keys of the CTA's tile, whose dK and dV it keeps in
// registers (consumer.cuh). With wider heads those do not fit: one warpgroup has dV, the other dK, of the same 64 keys
// (consumer_split.cuh).
template <class Element_, class HeadDims_, BwdTile kTile>
struct Config {
  using Element = Element_;
  static constexpr int kHeadDim = HeadDims_::kHeadDim;
  static constexpr int kHeadDimV = HeadDims_::kHeadDimV;
  static constexpr int kTileM = kTile.tile_m;
  static constexpr int kTileN = kTile.tile_n;
  static constexpr int kConsumerWarpgroups = 2;
  static constexpr bool kSplitRoles = kHeadDim > 128;
  static constexpr int kStagesQ = kTile.stages_q;
  static constexpr int kStagesDout = kTile.stages_dout;
  static constexpr int kStagesDs = kTile.stages_ds;
  static constexpr bool kVFromRegisters = kTile.v_in_dp == OperandSource::kRegisters;
  static constexpr bool kDsFromRegisters = kTile.ds_in_dk == OperandSource::kRegisters;
  // P goes from one warpgroup to the other with its rounding residual.
  static constexpr bool kSendResidual = kSplitRoles && std::is_same_v<Element, cutlass::half_t>;
  static constexpr int kDqColumns = kTile.dq_columns;
  static constexpr int kDqSlices = kHeadDim / kConsumerWarpgroups / kDqColumns;  // per warpgroup and step
  static_assert(kDqSlices * kDqColumns * kConsumerWarpgroups == kHeadDim);
  static_assert(kTileM == kRowsPerWarpgroup, "dQ's tile is one m64 of WGMMA");
  static_assert(kTileN == (kSplitRoles ? 1 : kConsumerWarpgroups) * kRowsPerWarpgroup);
  static_assert(kSplitRoles ? kStagesQ >= 2 && kDqSlices > 1
                            : kStagesQ >= 3 && kStagesDs == kStagesQ && kDqSlices == 1);

  static constexpr int kDqWriters = 3;  // warps; the dQ of a step is written by warp (steps before it) % 3
  static_assert(kSplitRoles || kStagesQ == kDqWriters, "the stage of Q selects the dq_writer warp");

  static constexpr int kConsumerWarps = kConsumerWarpgroups * cutlass::NumWarpsPerWarpGroup;
  static constexpr int kConsumerThreads = kConsumerWarpgroups * cutlass::NumThreadsPerWarpGroup;
  static constexpr int kNumThreads = cutlass::NumThreadsPerWarpGroup + kConsumerThreads;

  using Registers = RegisterSplit<kConsumerWarpgroups, 24, 240>;

  // A warpgroup's columns of dQ start at a slab of K: WGMMA cannot begin a transposed operand inside of one.
  static constexpr int kSlabColumns = slab_columns(kHeadDim);
  static constexpr int kSlabColumnsV = slab_columns(kHeadDimV);
  static constexpr int kSlabColumnsK = std::gcd(kDqColumns, kSlabColumns);  // 64, 32 or 16
  static_assert(kHeadDim % kSlabColumns == 0 && kHeadDimV % kSlabColumnsV == 0 && kDqColumns % kSlabColumnsK == 0);

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
  template <int kRows, int kStages, int kWidth, int kColumns>
  using LayoutRows = decltype(cute::tile_to_shape(
      KMajorAtom<kColumns>{}, cute::Shape<cute::Int<kRows>, cute::Int<kWidth>, cute::Int<kStages>>{}));
  template <int kRows, int kStages, int kWidth, int kColumns>
  using LayoutTransposed = decltype(cute::tile_to_shape(
      MnMajorAtom<kColumns>{}, cute::Shape<cute::Int<kWidth>, cute::Int<kRows>, cute::Int<kStages>>{},
      cute::Step<cute::_2, cute::_1, cute::_3>{}));
  using TileM = cute::Int<kTileM>;
  using TileN = cute::Int<kTileN>;
  using HeadDim = cute::Int<kHeadDim>;
  using HeadDimV = cute::Int<kHeadDimV>;
  using DqColumns = cute::Int<kDqColumns>;
  using LayoutQ = LayoutRows<kTileM, kStagesQ, kHeadDim, kSlabColumns>;
  using LayoutQt = LayoutTransposed<kTileM, kStagesQ, kHeadDim, kSlabColumns>;
  using LayoutDout = LayoutRows<kTileM, kStagesDout, kHeadDimV, kSlabColumnsV>;
  using LayoutDoutt = LayoutTransposed<kTileM, kStagesDout, kHeadDimV, kSlabColumnsV>;
  using LayoutK = decltype(cute::take<0, 2>(LayoutRows<kTileN, 1, kHeadDim, kSlabColumnsK>{}));
  using LayoutKt = decltype(cute::take<0, 2>(LayoutTransposed<kTileN, 1, kHeadDim, kSlabColumnsK>{}));
  using LayoutV = decltype(cute::take<0, 2>(LayoutRows<kTileN, 1, kHeadDimV, kSlabColumnsV>{}));
  // (kTileM, kTileN, kStagesDs): dS with the queries contiguous, 128 bytes per key; and the same bytes by key.
  using LayoutDs = decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Element>{},
                                                cute::Shape<TileM, TileN, cute::Int<kStagesDs>>{}));
  using LayoutDst = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{},
                                                 cute::Shape<TileN, TileM, cute::Int<kStagesDs>>{}));

  // S^T = K Q^T and dP^T = V dO^T, (64 keys, kTileM queries): transposed, so that they become A operands in registers.
  using MmaS = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, TileM, HeadDim>>()));
  using MmaDpShared = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, TileM, HeadDimV>>()));
  using MmaDpRegisters = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, cute::Shape<cute::_64, TileM, HeadDimV>>()));
  using MmaDp = std::conditional_t<kVFromRegisters, MmaDpRegisters, MmaDpShared>;
  // dV += P^T dO, P from registers, (64 keys, kHeadDimV), and dK += dS^T Q, (64 keys, kHeadDim).
  template <class Columns>
  using MmaRegisters = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, cute::Shape<cute::_64, Columns, TileM>, cute::GMMA::Major::K,
                                 cute::GMMA::Major::MN>()));
  using MmaDv = MmaRegisters<HeadDimV>;
  using MmaDkShared = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, HeadDim, TileM>, cute::GMMA::Major::K,
                                 cute::GMMA::Major::MN>()));
  using MmaDk = std::conditional_t<kDsFromRegisters, MmaRegisters<HeadDim>, MmaDkShared>;
  // dQ = dS K, (kTileM queries, kDqColumns).
  using MmaDq = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<TileM, DqColumns, TileN>, cute::GMMA::Major::MN,
                                 cute::GMMA::Major::MN>()));

  static constexpr int kBytesQ = kTileM * kHeadDim * sizeof(Element);
  static constexpr int kBytesDout = kTileM * kHeadDimV * sizeof(Element);
  static constexpr int kBytesK = kTileN * kHeadDim * sizeof(Element);
  static constexpr int kBytesV = kTileN * kHeadDimV * sizeof(Element);
  static constexpr int kBytesVector = kTileM * sizeof(float);  // lse or D of a step
  static constexpr int kDqPart = kTileM * kDqColumns;          // floats of dQ that are published at a time

  struct ResidualStorage {
    alignas(128) Element p_residual[kStagesDs][kTileN * kTileM];
  };
  struct Nothing {};

  struct SharedStorage : std::conditional_t<kSendResidual, ResidualStorage, Nothing> {
    alignas(1024) Element k[kTileN * kHeadDim];
    alignas(1024) Element v[kTileN * kHeadDimV];
    alignas(1024) Element q[kStagesQ][kTileM * kHeadDim];
    alignas(1024) Element dout[kStagesDout][kTileM * kHeadDimV];
    alignas(1024) Element ds[kStagesDs][kTileN * kTileM];
    alignas(128) float dq[kConsumerWarpgroups][kDqPart];
    alignas(128) float lse_log2[kStagesQ][kTileM];
    alignas(128) float dsum[kStagesDout][kTileM];
    Pipeline<1> pipeline_k;
    Pipeline<1> pipeline_v;
    Pipeline<kStagesQ> pipeline_q;
    Pipeline<kStagesDout> pipeline_dout;
    Pipeline<kStagesDs> pipeline_ds;
    cutlass::arch::ClusterBarrier p_full[kStagesDs];  // consumer_split.cuh: P is there, for dS to take its place
    SingleBufferPipeline<kDqWriters> pipeline_dq[kConsumerWarpgroups];
  };
  // The dynamic shared memory of a CTA starts 1024-byte aligned when there is no static shared memory.
  static constexpr int kSmemBytes = sizeof(SharedStorage);
  static_assert(kSmemBytes <= kMaxSmemBytes);
};

}  // namespace fa3::bwd
