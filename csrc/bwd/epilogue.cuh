// Writes a warpgroup's dK or dV to global memory.
#pragma once

#include "bwd/config.h"
#include "common/smem_store.cuh"

namespace fa3::bwd {

template <class Accumulator>
CUTLASS_DEVICE void scale_gradient(Accumulator& gradient, float factor) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < cute::size(gradient); ++i) {
    gradient(i) *= factor;
  }
}

// Each warp works alone on its 16 rows, as the forward does with O: registers -> slabs of its own -> TMA store.
// `slab_rows(slab)` says where in shared memory the warp may put its rows of a slab; `warp_key` is the first of them
// among the tile's keys. TMA leaves out rows past the sequence and columns past head_dim.
template <class Config, int kSlabColumns, class Accumulator, class SlabRows>
CUTLASS_DEVICE void store_gradient(KernelParams const& params, CUtensorMap const& map, Accumulator const& gradient,
                                   SlabRows const& slab_rows, int warp_key, Tile const& tile) {
  constexpr int kNumSlabs = decltype(cute::size(gradient))::value * 2 / kSlabColumns;
  auto rGradient = cute::make_fragment_like<typename Config::Element>(gradient);
  convert(gradient, rGradient);
  auto const* packed = reinterpret_cast<uint32_t const*>(rGradient.data());
  CUTLASS_PRAGMA_UNROLL
  for (int slab = 0; slab < kNumSlabs; ++slab) {
    store_rows_to_smem<kSlabColumns>(packed + slab * kSlabColumns / 4, slab_rows(slab));
  }
  cute::tma_store_fence();  // stmatrix writes, then TMA reads
  __syncwarp();
  if (cutlass::canonical_lane_idx() == 0) {
    TmaRows const rows = SeqlenInfo(params.seqlen, tile.batch_idx).rows_k();
    CUTLASS_PRAGMA_UNROLL
    for (int slab = 0; slab < kNumSlabs; ++slab) {
      store_box(map, slab_rows(slab), slab * kSlabColumns, rows, tile.block * Config::kTileN + warp_key, tile.head_idx);
    }
    cute::tma_store_arrive();
  }
}

}  // namespace fa3::bwd
