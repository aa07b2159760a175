// A warp's walk through the tiles of its CTA, with its loads one tile ahead:
//
//   for (tiles.begin(); tiles.is_valid(); tiles.advance()) {
//     tiles.wait();        // the warp's rows of tiles.tile are in shared memory
//     ...                  // read them into registers
//     tiles.load_next(..); // the next tile's rows overwrite them
//     ...                  // work in registers
//   }
#pragma once

#include "quantize/rows.cuh"

namespace fa3::quantize {

template <class Config>
struct TileWalk {
  QuantizeKernelParams const& params;
  TileOrder const& order;
  typename Config::Smem& smem;
  int const warp_idx = cutlass::canonical_warp_idx_sync();
  int const slot = warp_idx / Config::kWarpsPerTile;  // which of the CTA's kNumTiles tiles in flight
  bool const rotates = params.rotary.dim > 0;
  int tile_idx;
  int end;
  int parity = 0;   // alternates from tile to tile
  bool new_tables;  // the walk rotates, and this tile's rows differ from the previous tile's
  Tile tile;
  int first_row;  // of the warp's rows in `tile`
  Tile next;

  CUTLASS_DEVICE TileWalk(QuantizeKernelParams const& params, TileOrder const& order, typename Config::Smem& smem)
      : params(params),
        order(order),
        smem(smem),
        tile_idx(order.first_tile_of(blockIdx.x) + slot),
        end(order.first_tile_of(blockIdx.x + 1)),
        new_tables(rotates) {}

  // By each warp for itself. The caller synchronizes the CTA afterwards.
  CUTLASS_DEVICE void init_barrier() {
    if (threadIdx.x % 32 == 0) {
      smem.full[warp_idx].init(1);
      cutlass::arch::fence_barrier_init();
    }
  }

  CUTLASS_DEVICE typename Config::WarpSmem& warp_smem() const { return smem.warps[warp_idx]; }
  CUTLASS_DEVICE bool is_valid() const { return tile_idx < end; }
  CUTLASS_DEVICE bool has_next() const { return tile_idx + Config::kNumTiles < end; }

  // First of the warp's rows in a tile.
  CUTLASS_DEVICE int first_row_of(Tile const& tile) const {
    return tile.block * kFp8ScaleRows + warp_idx % Config::kWarpsPerTile * Config::kRowsPerWarp;
  }

  CUTLASS_DEVICE void begin() {
    if (is_valid()) {
      tile = order[tile_idx];
      load(tile);
    }
  }

  // Waits for the rows of `tile`.
  CUTLASS_DEVICE void wait() {
    first_row = first_row_of(tile);  // if set along with `tile`, ptxas keeps less in uniform registers
    smem.full[warp_idx].wait(parity);
  }

  // Starts the loads of the next tile, if there is one, after calling `before_loads` with it.
  template <class BeforeLoads>
  CUTLASS_DEVICE void load_next(BeforeLoads&& before_loads) {
    __syncwarp();  // all lanes have read this tile's rows
    if (has_next()) {
      next = order[tile_idx + Config::kNumTiles];
      new_tables = rotates && next.block != tile.block;
      before_loads(next);
      load(next);
    }
  }

  CUTLASS_DEVICE void advance() {
    tile = next;
    tile_idx += Config::kNumTiles;
    parity ^= 1;
  }

  // Waits for the warps that work on the same tile.
  CUTLASS_DEVICE void sync_tile() const { cutlass::arch::NamedBarrier::sync(Config::kWarpsPerTile * 32, slot); }

 private:
  CUTLASS_DEVICE void load(Tile const& tile) const {
    issue_loads<Config>(params, tile, first_row_of(tile), new_tables, smem.full[warp_idx], warp_smem());
  }
};

}  // namespace fa3::quantize
