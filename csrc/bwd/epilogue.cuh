// Writes a warpgroup's dK or dV to global memory.
#pragma once

#include "bwd/config.h"
#include "common/stage.cuh"

namespace fa3 {

// The rows of K (or V) that the gradient belongs to are its staging area: `staging` is the (kTileN, kHeadDim) tile that
// TMA brought, which nobody reads any more. Each warp works alone on its 16 rows, as the forward does with O.
template <class Config, int kSlabColumns, class Accumulator>
CUTLASS_DEVICE void store_gradient(CUtensorMap const& map, typename Config::Element* staging, Accumulator& gradient,
                                   float factor, int warpgroup_idx, int n_block, int head_idx, int batch_idx) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < cute::size(gradient); ++i) {
    gradient(i) *= factor;
  }
  int const warp_idx = cutlass::canonical_warp_idx_sync() % cutlass::NumWarpsPerWarpGroup;
  int const warp_row = warpgroup_idx * kRowsPerWarpgroup + warp_idx * kRowsPerWarp;
  auto rGradient = cute::make_fragment_like<typename Config::Element>(gradient);
  convert(gradient, rGradient);
  auto const* packed = reinterpret_cast<uint32_t const*>(rGradient.data());
  CUTLASS_PRAGMA_UNROLL
  for (int column = 0; column < Config::kHeadDim; column += kSlabColumns) {
    stage_rows<kSlabColumns>(packed + column / 4, staging + column * Config::kTileN + warp_row * kSlabColumns);
  }
  cute::tma_store_fence();  // stmatrix writes, then TMA reads
  __syncwarp();
  if (cutlass::canonical_lane_idx() == 0) {
    CUTLASS_PRAGMA_UNROLL
    for (int column = 0; column < Config::kHeadDim; column += kSlabColumns) {
      cute::SM90_TMA_STORE_4D::copy(&map, staging + column * Config::kTileN + warp_row * kSlabColumns, column,
                                    n_block * Config::kTileN + warp_row, head_idx, batch_idx);
    }
    cute::tma_store_arrive();
  }
}

}  // namespace fa3
