// A consumer warpgroup: 64 rows of O = softmax(Q K^T) V, tile after tile. This is what the two overlapped schedules
// share, 16-bit and FP8: operands and accumulators, the key blocks that the warpgroup visits, and the steps that a
// schedule puts in order.
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
  using MmaPV = typename Config::template MmaPV<Config::kVtRows>;
  template <class Mma, int kColumns>
  using Accumulator = decltype(cute::partition_fragment_C(Mma{}, cute::Shape<cute::_64, cute::Int<kColumns>>{}));
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
  Accumulator<MmaPV, Config::kVtRows> tOrPV;  // FP8: P V of one block; in 16 bits O itself is the accumulator

  Softmax softmax;
  float correction[kRowsPerThread];  // of O and row_sum, to the maximum of the newest block

  StaticScheduler scheduler;
  Tile tile;
  BlockRange range;    // the key blocks of the tile that this warpgroup visits, from the last to the first
  int skipped_after;   // blocks of the CTA's that it steps over, first of all
  int skipped_before;  // and last of all
  TileScores scores;
  float scale_log2;  // FP8: of the scores of the newest block

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
    auto const mask = Config::mask(params, seqlen);
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
    auto const mask = Config::mask(params, seqlen);
    int const first_key = n_block * Config::kTileN;
    int begin[kRowsPerThread], end[kRowsPerThread];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsPerThread; ++i) {
      int const query = first_row() + accumulator_row(i);
      if constexpr (Config::kAnyMask) {
        auto const keys = mask.keys_of(query);
        begin[i] = keys.begin - first_key;
        end[i] = keys.end - first_key;
      } else {
        end[i] = mask.end_of_keys(query) - first_key;
      }
    }
    if constexpr (Config::kAnyMask) {
      mask_outside(tSrS, begin, end);
    } else {
      mask_from(tSrS, end);
    }
  }

  // Masks S and takes it into the running maximum.
  CUTLASS_DEVICE void update_max(int n_block) {
    mask_scores(n_block);
    if constexpr (Config::kFp8) {
      softmax.template update_max</*kAsIntegers=*/false>(tSrS, scale_log2, correction);
    } else {
      softmax.update_max(tSrS, scores.scale_log2(n_block), correction);
    }
  }

  // P of the newest block: in FP8 as the operand of P V; in 16 bits still in place of S.
  CUTLASS_DEVICE void exponentiate() {
    if constexpr (Config::kFp8) {
      softmax.exponentiate(tSrS, scale_log2, tOrP);
    } else {
      softmax.exponentiate(tSrS, params.scores.softmax_scale_log2, correction);
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

  // 16 bits: O = P V, or O += P V if `accumulate`. FP8: P V alone, with the sums of P's rows in the columns behind it.
  CUTLASS_DEVICE void issue_pv(int v_stage, bool accumulate = false) {
    using namespace cute;
    MmaPV mma;
    Tensor sVt = make_tensor(make_smem_ptr(smem.v[0]), typename Config::LayoutVt{});
    Tensor tOrV = mma.get_slice(0).partition_fragment_B(sVt);
    if constexpr (Config::kFp8) {
      gemm(mma, tOrP, tOrV(_, _, _, v_stage), tOrPV, /*accumulate=*/false);
    } else {
      gemm(mma, tOrP, tOrV(_, _, _, v_stage), tOrO, accumulate);
    }
  }

  // FP8: O += scale * (P V). Four registers hold the sums: two columns, both the sum, of each row.
  CUTLASS_DEVICE void add_pv(float scale) {
    add_scaled<Config::kHeadDimV / 2>(tOrO, 0, tOrPV, scale);
    softmax.row_sum[0] += tOrPV(Config::kHeadDimV / 2);
    softmax.row_sum[1] += tOrPV(Config::kHeadDimV / 2 + 2);
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
