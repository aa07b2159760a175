// Casts a tile's values and writes them to global memory: as rows, or transposed into the layout in which P V reads V.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cutlass/numeric_conversion.h>

#include "common/fp8_format.h"
#include "quantize/tile_walk.cuh"

namespace fa3::quantize {

CUTLASS_DEVICE uint2 to_e4m3(F32x8 const& x, float factor) {
  F32x8 scaled;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 8; ++i) {
    scaled[i] = x[i] * factor;
  }
  auto const x8 = cutlass::NumericArrayConverter<cutlass::float_e4m3_t, float, 8>::convert(scaled);
  return reinterpret_cast<uint2 const&>(x8);
}

// Waits until the warp's earlier bulk stores have read its shared memory.
CUTLASS_DEVICE void wait_for_stores() {
  if (threadIdx.x % 32 == 0) {
    cute::tma_store_wait<0>();
  }
  __syncwarp();
}

// Writes a warp's rows. TMA drops rows past seqlen and columns past those of x8.
template <class Config>
CUTLASS_DEVICE void store_rows(TileWalk<Config> const& tiles, ThreadRow<Config> const& thread, bool transformed,
                               uint2 const (&x8)[8]) {
  auto& smem = tiles.warp_smem();
  Tile const& tile = tiles.tile;
  wait_for_stores();
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 8; ++i) {
    *reinterpret_cast<uint2*>(smem.x8 + thread.x8_offset(i, transformed)) = x8[i];
  }
  cute::tma_store_fence();
  __syncwarp();
  if (thread.lane_idx == 0) {
    CUTLASS_PRAGMA_UNROLL
    for (int column = 0; column < Config::kWidth; column += Config::kX8SlabColumns) {
      store_box(tiles.params.x8_map, smem.x8 + column * Config::kRowsPerWarp, column, tile.rows(), tiles.first_row,
                tile.head_idx);
    }
    cute::tma_store_arrive();
  }
}

// Writes a tile of x8 (batch, num_heads, columns, whole blocks of rows), with the rows permuted. Each warp writes the
// lines of 16 columns. common/fp8_format.h draws how the bytes move. V has no rotary embedding, so the buffers of the
// tables are free: that of the cosines takes the tile's rows, that of the sines the transposed lines.
template <class Config>
CUTLASS_DEVICE void store_transposed(TileWalk<Config> const& tiles, ThreadRow<Config> const& thread,
                                     uint2 const (&x8)[8]) {
  static_assert(Config::kWidth == kTransposedChannels * Config::kWarpsPerTile);
  constexpr int kLoads = kFp8ScaleRows / kTransposedKeys;
  int const lane_idx = thread.lane_idx;
  auto const* tile_smem = &tiles.smem.warps[tiles.slot * Config::kWarpsPerTile];
  auto& own = tiles.warp_smem();
  int const first_column = tiles.warp_idx % Config::kWarpsPerTile * kTransposedChannels;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 8; ++i) {
    *reinterpret_cast<uint2*>(own.cosines + thread.x8_offset(i, false)) = x8[i];
  }
  tiles.sync_tile();
  uint32_t r[kLoads][4];
  CUTLASS_PRAGMA_UNROLL
  for (int load = 0; load < kLoads; ++load) {
    int const row = load * kTransposedKeys + lane_idx;
    auto const* source = tile_smem[row / Config::kRowsPerWarp].cosines +
                         swizzled_offset<Config, Config::kX8SlabColumns>(row % Config::kRowsPerWarp, first_column);
    cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<cute::uint128_t const*>(source), r[load][0], r[load][1], r[load][2],
                                  r[load][3]);
  }
  wait_for_stores();
  tiles.sync_tile();  // all warps have read the tile: the next one may overwrite `cosines`
  int const first = channel_bytes(lane_idx, 0), second = channel_bytes(lane_idx, 1);
  CUTLASS_PRAGMA_UNROLL
  for (int load = 0; load < kLoads; ++load) {
    auto const& [r0, r1, r2, r3] = r[load];
    cute::SM90_U32x4_STSM_N::copy(
        __byte_perm(r0, r1, first), __byte_perm(r0, r1, second), __byte_perm(r2, r3, first),
        __byte_perm(r2, r3, second),
        *reinterpret_cast<cute::uint128_t*>(own.sines + vt_store_offset(lane_idx, load * kTransposedKeys, 0)));
  }
  cute::tma_store_fence();
  __syncwarp();
  if (lane_idx == 0) {
    Tile const& tile = tiles.tile;
    store_box(tiles.params.x8_map, own.sines, tile.block * kFp8ScaleRows, tile.rows(), first_column, tile.head_idx);
    cute::tma_store_arrive();
  }
}

}  // namespace fa3::quantize
