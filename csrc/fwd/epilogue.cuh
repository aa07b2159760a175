// Normalizes one warpgroup's O and writes it and lse to global memory.
#pragma once

#include "common/smem_store.cuh"
#include "common/softmax.cuh"
#include "fwd/config.h"

namespace fa3::fwd {

// O in 16 bits, two columns per register. FP8 kernels have both types.
template <class Config, class TensorO>
CUTLASS_DEVICE auto output_registers(typename Config::Params const& params, TensorO const& tOrO) {
  using namespace cute;
  auto packed = make_tensor<uint32_t>(Int<decltype(size(tOrO))::value / 2>{});
  auto const convert_to = [&](auto element) CUTLASS_LAMBDA_FUNC_INLINE {
    auto rO = recast<decltype(element)>(packed);
    convert(tOrO, rO);
  };
  if constexpr (Config::kFp8) {
    if (params.fp8.out_fp16) {
      convert_to(cutlass::half_t{});
      return packed;
    }
  }
  convert_to(typename Config::OutElement{});
  return packed;
}

// Each warp works alone on its 16 rows: registers -> its own slabs of shared memory -> TMA store, so no barrier is
// needed and the store overlaps the next tile. TMA leaves out rows past the sequence and columns past head_dim_v. O of
// each row is multiplied by `inverse`.
template <class Config, class TensorO>
CUTLASS_DEVICE void store_out(typename Config::Params const& params, typename Config::SharedStorage& smem,
                              int warpgroup_idx, Tile const& tile, float const (&inverse)[kRowsPerThread],
                              float const (&lse)[kRowsPerThread], TensorO& tOrO) {
  using Element = typename Config::OutElement;
  constexpr int kSlabColumns = Config::kSlabColumnsOut;
  int const lane_idx = cutlass::canonical_lane_idx();
  int const warp_idx = cutlass::canonical_warp_idx_sync() % cutlass::NumWarpsPerWarpGroup;
  int const warpgroup_row = tile.block * Config::kTileM + warpgroup_idx * kRowsPerWarpgroup;
  SeqlenInfo const seqlen(params.seqlen, tile.batch_idx);

  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kRowsPerThread; ++i) {
    int const row = warpgroup_row + accumulator_row(i);
    if (lane_idx % 4 == 0 && row < seqlen.seqlen_q) {
      params.lse[seqlen.lse_offset(params.seqlen, params.num_heads_q, tile.head_idx) + row] = lse[i];
    }
  }
  rescale(tOrO, inverse);
  auto const rO = output_registers<Config>(params, tOrO);
  auto const* packed = rO.data();

  // Slab s of this warp: 16 rows of the warpgroup's [64 rows][kSlabColumns].
  auto const warp_slab = [&](int slab) {
    constexpr int kSlabElements = kRowsPerWarpgroup * kSlabColumns;
    Element* out;
    if constexpr (Config::kOutAliasesQ) {
      out = &smem.q[warpgroup_idx][0][slab * kSlabElements];
    } else {
      out = &smem.out[warpgroup_idx][slab][0];
    }
    return out + warp_idx * kRowsPerWarp * kSlabColumns;
  };
  constexpr int kPassColumns = Config::kOutSlabs * kSlabColumns;
  CUTLASS_PRAGMA_UNROLL
  for (int pass_column = 0; pass_column < Config::kHeadDimV; pass_column += kPassColumns) {
    if (lane_idx == 0) {
      cute::tma_store_wait<0>();  // the previous store has read the slabs
    }
    __syncwarp();
    CUTLASS_PRAGMA_UNROLL
    for (int slab = 0; slab < Config::kOutSlabs; ++slab) {
      store_rows_to_smem<kSlabColumns>(packed + (pass_column + slab * kSlabColumns) / 4, warp_slab(slab));
    }
    cute::tma_store_fence();  // stmatrix writes, then TMA reads
    __syncwarp();
    if (lane_idx == 0) {
      CUTLASS_PRAGMA_UNROLL
      for (int slab = 0; slab < Config::kOutSlabs; ++slab) {
        store_box(params.out, warp_slab(slab), pass_column + slab * kSlabColumns, seqlen.rows_q(),
                  warpgroup_row + warp_idx * kRowsPerWarp, tile.head_idx);
      }
      cute::tma_store_arrive();
    }
  }
}

}  // namespace fa3::fwd
