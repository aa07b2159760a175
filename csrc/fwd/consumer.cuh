// A consumer warpgroup: 64 rows of O = softmax(Q K^T) V, tile after tile. This is what the two schedules share:
// operands and accumulators, the key blocks that the warpgroup visits, and the steps that a schedule puts in order.
#pragma once

#include "common/mask.cuh"
#include "common/scores.cuh"
#include "common/softmax.cuh"
#include "common/wgmma.cuh"
#include "fwd/config.h"
#include "fwd/epilogue.cuh"
#include "fwd/fp8_softmax.cuh"

namespace fa3::fwd {

// FP8: writes the rows behind V's channels that sum up P, once for all tiles. The whole CTA calls it, before its first
// barrier.
template <class Config>
CUTLASS_DEVICE void write_ones(typename Config::SharedStorage& smem) {
  constexpr uint32_t kOnes = 0x38383838;  // e4m3
  for (auto& stage : smem.v) {
    if (threadIdx.x < Config::kSumColumns * Config::kTileN / 16) {
      reinterpret_cast<uint4*>(stage + Config::kHeadDimV * Config::kTileN)[threadIdx.x] = {kOnes, kOnes, kOnes, kOnes};
    }
  }
  cutlass::arch::fence_view_async_shared();  // WGMMA reads them
}

template <class Config>
struct Consumer {
  using Element = typename Config::Element;
  using TileN = typename Config::TileN;
  using Turns = typename Config::Turns;
  using Softmax = std::conditional_t<Config::kFp8, BlockScaledSoftmax, OnlineSoftmax>;
  using TileScores = std::conditional_t<Config::kFp8, BlockScaledScores, Scores>;
  using MmaQK = typename Config::MmaQK;
  using MmaPV = typename Config::template MmaPV<Config::kPvSliceColumns>;
  // The last slice of P V, with the sums of P's rows (FP8).
  using MmaLastPV = typename Config::template MmaPV<Config::kPvSliceColumns + Config::kSumColumns>;
  template <class Mma, int kColumns>
  using Accumulator = decltype(cute::partition_fragment_C(Mma{}, cute::Shape<cute::_64, cute::Int<kColumns>>{}));
  using AccumulatorPV = Accumulator<MmaPV, Config::kPvSliceColumns>;
  using AccumulatorLastPV = Accumulator<MmaLastPV, Config::kPvSliceColumns + Config::kSumColumns>;
  // Keys that one WGMMA sums over are four registers of the A operand.
  using LayoutP = std::conditional_t<
      Config::kFp8,
      cute::Layout<cute::Shape<cute::Shape<cute::_4, cute::_2, cute::_2>, cute::_1, cute::Int<Config::kTileN / 32>>>,
      cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::Int<Config::kTileN / 16>>>>;
  using LayoutO =
      cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::Int<Config::kHeadDimV / 8>>, cute::_1, cute::_1>>;

  typename Config::Params const& params;
  typename Config::SharedStorage& smem;
  int const warpgroup_idx;

  Accumulator<MmaQK, Config::kTileN> tSrS;
  decltype(cute::make_tensor<Element>(LayoutP{})) tOrP;
  decltype(cute::make_tensor<float>(LayoutO{})) tOrO;
  AccumulatorLastPV tOrPV[Config::kPvBuffers];  // FP8: P V of one block; 16 bits: O itself is the accumulator

  Softmax softmax;
  float correction[kRowsPerThread];  // of O and row_sum, to the maximum of the newest block

  StaticScheduler scheduler;
  Tile tile;
  BlockRange range;    // the key blocks of the tile that this warpgroup visits, from the last to the first
  int skipped_after;   // blocks of the CTA's that it steps over, first of all
  int skipped_before;  // and last of all
  TileScores scores;
  float scale_log2;  // of the scores of the newest block

  PipelineState<Config::kStagesQ> q_state;

  CUTLASS_DEVICE Consumer(typename Config::Params const& params, typename Config::SharedStorage& smem,
                          int warpgroup_idx)
      : params(params), smem(smem), warpgroup_idx(warpgroup_idx), scheduler(params.scheduler, blockIdx.x) {}

  // --- tiles

  CUTLASS_DEVICE int first_row() const { return tile.block * Config::kTileM + warpgroup_idx * kRowsPerWarpgroup; }

  // Sets `tile`, and what its rows see.
  CUTLASS_DEVICE void begin_tile(Tile const& new_tile) {
    tile = new_tile;
    SeqlenInfo const seqlen(params.seqlen, tile.batch_idx);
    Mask const mask = Config::mask(params, seqlen);
    BlockRange const cta = mask.key_blocks(tile.block * Config::kTileM, Config::kTileM, Config::kTileN);
    range = visited_blocks(cta, mask.key_blocks(first_row(), kRowsPerWarpgroup, Config::kTileN));
    skipped_after = cta.end - range.end;
    skipped_before = range.begin - cta.begin;
  }

  // --- turns

  CUTLASS_DEVICE void wait_turn() { Turns::wait_turn(warpgroup_idx); }
  CUTLASS_DEVICE void pass_turn() {
    int idx = warpgroup_idx;
    if constexpr (!Config::kNextTurnInRegister) {
      asm volatile("" : "+r"(idx));  // what follows from it is computed here
    }
    Turns::pass_turn(idx);
  }

  // --- Q K^T

  CUTLASS_DEVICE void issue_qk(int k_stage) {
    using namespace cute;
    MmaQK mma;
    Tensor sQ = make_tensor(make_smem_ptr(smem.q[warpgroup_idx][0]), typename Config::LayoutQ{});
    Tensor sK = make_tensor(make_smem_ptr(smem.k[0]), typename Config::LayoutK{});
    Tensor tSrQ = mma.get_slice(0).partition_fragment_A(sQ);
    Tensor tSrK = mma.get_slice(0).partition_fragment_B(sK);
    gemm(mma, tSrQ(_, _, _, q_state.stage), tSrK(_, _, _, k_stage), tSrS, /*accumulate=*/false);
  }
  CUTLASS_DEVICE void wait_q() { smem.pipeline_q[warpgroup_idx].wait(q_state); }
  CUTLASS_DEVICE void release_q() {
    smem.pipeline_q[warpgroup_idx].release(q_state);
    q_state.advance();
  }

  // --- softmax

  CUTLASS_DEVICE void begin_softmax() {
    softmax.reset();
    if constexpr (Config::kFp8) {
      scores = BlockScaledScores(params.scores, params.fp8, tile.batch_idx, tile.head_idx,
                                 tile.head_idx / params.group_size, first_row(), params.seqlen.seqlen_q);
      cute::clear(tOrO);
    } else {
      scores = Scores(params.scores);
    }
  }

  // Hides what rows do not see. S has arrived.
  CUTLASS_DEVICE void mask_scores(int n_block) {
    if (!range.needs_mask(n_block)) {
      return;
    }
    SeqlenInfo const seqlen(params.seqlen, tile.batch_idx);
    Mask const mask = Config::mask(params, seqlen);
    int begin[kRowsPerThread], end[kRowsPerThread];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsPerThread; ++i) {
      auto const keys = mask.keys_of(first_row() + accumulator_row(i));
      begin[i] = keys.begin - n_block * Config::kTileN;
      end[i] = keys.end - n_block * Config::kTileN;
    }
    if constexpr (Config::kLeftLimits) {
      mask_outside(tSrS, begin, end);
    } else {
      mask_from(tSrS, end);
    }
  }

  // Masks S and takes it into the running maximum.
  template <bool kAsIntegers = false>
  CUTLASS_DEVICE void update_max(int n_block) {
    if constexpr (kAsIntegers) {
      cute::warpgroup_fence_operand(tSrS);  // otherwise NVVM compares before the wait
    }
    mask_scores(n_block);
    if constexpr (Config::kFp8) {
      softmax.template update_max<kAsIntegers>(tSrS, scale_log2, correction);
    } else {
      softmax.update_max(tSrS, scale_log2, correction);
    }
  }

  // P of the newest block: in FP8 as the operand of P V; in 16 bits still in place of S.
  CUTLASS_DEVICE void exponentiate() {
    if constexpr (Config::kFp8) {
      softmax.exponentiate(tSrS, scale_log2, tOrP);
    } else {
      softmax.exponentiate(tSrS, scale_log2, correction);
    }
  }

  // 16 bits: P as the operand of P V, once that of the previous block is done with its own.
  CUTLASS_DEVICE void write_p() { convert(tSrS, tOrP); }

  // Brings O to the newest maximum. Most blocks of a long sequence raise no row's maximum.
  CUTLASS_DEVICE void rescale_o() {
    if (__any_sync(0xffffffff, correction[0] != 1.f || correction[1] != 1.f)) {
      rescale(tOrO, correction);
    }
    if constexpr (Config::kFp8) {
      softmax.rescale_sums(correction);
    }
  }

  // --- P V

  // O = P V, or O += P V if `accumulate`. FP8: P V anew.
  CUTLASS_DEVICE void issue_pv(int v_stage, bool accumulate) {
    using namespace cute;
    if constexpr (Config::kFp8) {
      issue_pv_slice<0>(v_stage);
    } else {
      MmaPV mma;
      Tensor sVt = make_tensor(make_smem_ptr(smem.v[0]), typename Config::LayoutVt{});
      Tensor tOrV = mma.get_slice(0).partition_fragment_B(sVt);
      gemm(mma, tOrP, tOrV(_, _, _, v_stage), tOrO, accumulate);
    }
  }

  // FP8: P V of some columns, anew.
  template <int kSlice>
  CUTLASS_DEVICE void issue_pv_slice(int v_stage) {
    using namespace cute;
    auto const issue = [&](auto mma, auto columns, auto&& accumulator) CUTLASS_LAMBDA_FUNC_INLINE {
      Tensor sVt = make_tensor(make_smem_ptr(smem.v[0]), typename Config::LayoutVt{});
      Tensor sSlice =
          local_tile(domain_offset(make_coord(Int<kSlice * Config::kPvSliceColumns>{}, _0{}, _0{}), sVt),
                     make_shape(columns, TileN{}, typename Config::StagesKV{}), make_coord(_0{}, _0{}, _0{}));
      Tensor tOrV = mma.get_slice(0).partition_fragment_B(sSlice);
      gemm(mma, tOrP, tOrV(_, _, _, v_stage), accumulator, /*accumulate=*/false);
    };
    auto& accumulator = tOrPV[kSlice % Config::kPvBuffers];
    if constexpr (kSlice == Config::kPvSlices - 1) {
      issue(MmaLastPV{}, Int<Config::kPvSliceColumns + Config::kSumColumns>{}, accumulator);
    } else {
      issue(MmaPV{}, Int<Config::kPvSliceColumns>{}, make_tensor(accumulator.data(), AccumulatorPV{}.layout()));
    }
  }

  // FP8: O += scale * (P V), for these columns; the last ones hold the sums of P's rows, twice each.
  template <int kSlice>
  CUTLASS_DEVICE void add_pv_slice(float scale) {
    constexpr int kCount = decltype(cute::size(AccumulatorPV{}))::value;
    auto const& pv = tOrPV[kSlice % Config::kPvBuffers];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      tOrO(kSlice * kCount + i) = fmaf(pv(i), scale, tOrO(kSlice * kCount + i));
    }
    if constexpr (kSlice == Config::kPvSlices - 1) {
      softmax.row_sum[0] += pv(kCount);
      softmax.row_sum[1] += pv(kCount + 2);
    }
  }

  // --- epilogue

  CUTLASS_DEVICE void store_tile(Tile const& done) {
    float inverse[kRowsPerThread], lse[kRowsPerThread];
    if constexpr (Config::kFp8) {
      softmax.finish(inverse, lse);
    } else {
      softmax.finish(params.scores.softmax_scale, inverse, lse);
    }
    store_out<Config>(params, smem, warpgroup_idx, done, inverse, lse, tOrO);
  }
};

}  // namespace fa3::fwd
