"""The tables of tiles, csrc/fwd/tiles.h and csrc/bwd/tiles.h, through the host module."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from host.build import load

ROWS_PER_WARPGROUP = 64

_host = load()
UNLIMITED = _host.kUnlimited


@dataclass(frozen=True)
class NamedTile:
    """A row of a table, whose fields are also this object's, and the name under which it is built: that of the source
    file after the dtype."""

    name: str
    row: Any

    def __getattr__(self, field: str) -> Any:
        return getattr(self.row, field)

    @property
    def head_dim(self) -> int:
        return int(re.match(r"hdim(\d+)", self.name)[1])


class FwdTile(NamedTile):
    """csrc/fwd/tiles.h, 16-bit and FP8."""

    @property
    def tile_m(self) -> int:
        return self.consumer_warpgroups * ROWS_PER_WARPGROUP

    @property
    def v_transposed(self) -> bool:
        return self.v_layout == _host.VLayout.kTransposed

    @property
    def overlaps(self) -> bool:
        return self.schedule == _host.Schedule.kOverlapped

    @property
    def drains(self) -> bool:
        """Whether the pipeline drains between tiles, as csrc/fwd/schedule_overlapped.cuh says."""
        return self.out_buffer == _host.OutBuffer.kAliasesQ or self.v_layout != _host.VLayout.kRows

    @property
    def pv_columns(self) -> int:
        return self.pv_slice_columns or self.head_dim

    def max_seqlen_k(self, causal: bool) -> int:
        return self.max_seqlen_k_causal if causal else self.max_seqlen_k_full


class BwdTile(NamedTile):
    """csrc/bwd/tiles.h."""


# By name, in the order of rank: a head_dim's kernel for short sequences comes before the one for long.
FWD_TILES = {name: FwdTile(name, row) for name, row in _host.fwd_tiles().items()}
HEAD_DIMS = tuple(dict.fromkeys(tile.head_dim for tile in FWD_TILES.values()))
FWD_FP8_TILES = {name: FwdTile(name, row) for name, row in _host.fwd_e4m3_tiles().items()}
BWD_TILES = {name: BwdTile(name, row) for name, row in _host.bwd_tiles().items()}
BWD_HEAD_DIMS = tuple(tile.head_dim for tile in BWD_TILES.values())


def tile_for(head_dim: int, seqlen_k: int, causal: bool) -> FwdTile:
    """The tile that the forward selects, where all are built."""
    mine = [t for t in FWD_TILES.values() if t.head_dim >= head_dim and seqlen_k <= t.max_seqlen_k(causal)]
    return min(mine, key=lambda tile: tile.rank)
