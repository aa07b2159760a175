// Writes a warpgroup's dK or dV to global memory.
#pragma once

#include "bwd/config.h"
#include "common/stage.cuh"

namespace fa3 {

// Each warp works alone on its 16 rows, as the forward does with O: registers -> slabs of its own -> TMA store.
// `slab_rows(slab)` says where in shared memory the warp may put its rows of a slab; `row` is the first of them in the
// tensor. TMA leaves out rows past seqlen_k and columns past head_dim.
template <class Config, int kSlabColumns, class Accumulator, class SlabRows>
CUTLASS_DEVICE void store_gradient(CUtensorMap const& map, Accumulator& gradient, float factor,
                                   SlabRows const& slab_rows, int row, Tile const& tile) {
  constexpr int kNumSlabs = Config::kHeadDim / kSlabColumns;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < cute::size(gradient); ++i) {
    gradient(i) *= factor;
  }
  auto rGradient = cute::make_fragment_like<typename Config::Element>(gradient);
  convert(gradient, rGradient);
  auto const* packed = reinterpret_cast<uint32_t const*>(rGradient.data());
  CUTLASS_PRAGMA_UNROLL
  for (int slab = 0; slab < kNumSlabs; ++slab) {
    stage_rows<kSlabColumns>(packed + slab * kSlabColumns / 4, slab_rows(slab));
  }
  cute::tma_store_fence();  // stmatrix writes, then TMA reads
  __syncwarp();
  if (cutlass::canonical_lane_idx() == 0) {
    CUTLASS_PRAGMA_UNROLL
    for (int slab = 0; slab < kNumSlabs; ++slab) {
      cute::SM90_TMA_STORE_4D::copy(&map, slab_rows(slab), slab * kSlabColumns, row, tile.head_idx, tile.batch_idx);
    }
    cute::tma_store_arrive();
  }
}

}  // namespace fa3
