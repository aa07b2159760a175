"""Reads csrc/fwd/tiles.h: which forward kernels there are, and for which lengths."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "csrc" / "fwd" / "tiles.h"
UNLIMITED = 2**31 - 1
ROWS_PER_WARPGROUP = 64


@dataclass(frozen=True)
class FwdTile:
    """The struct of the same name, and the name under which it is built: that of the source file after the dtype."""

    name: str
    consumer_warpgroups: int
    tile_n: int
    stages_q: int
    stages_kv: int
    out_slabs: int
    ping_pong: bool
    max_seqlen_k_full: int = UNLIMITED
    max_seqlen_k_causal: int = UNLIMITED

    @property
    def head_dim(self) -> int:
        return int(re.match(r"hdim(\d+)", self.name)[1])

    @property
    def tile_m(self) -> int:
        return self.consumer_warpgroups * ROWS_PER_WARPGROUP

    def max_seqlen_k(self, causal: bool) -> int:
        return self.max_seqlen_k_causal if causal else self.max_seqlen_k_full


def _read() -> dict[str, FwdTile]:
    tiles = {}
    for variable, values in re.findall(r"^constexpr FwdTile kFwd(\w+)\{(.*)\};", SOURCE.read_text(), re.MULTILINE):
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", variable).lower()
        fields = [
            value.strip() == "true" if value.strip() in ("true", "false") else int(value) for value in values.split(",")
        ]
        tiles[name] = FwdTile(name, *fields)
    return tiles


# By name, in the order of the file: a head_dim's kernel for short sequences comes before the one for long.
FWD_TILES = _read()
HEAD_DIMS = tuple(dict.fromkeys(tile.head_dim for tile in FWD_TILES.values()))


def tile_for(head_dim: int, seqlen_k: int, causal: bool) -> FwdTile:
    """The tile that csrc/fwd/kernels.cpp selects, where all are built."""
    built = next(d for d in sorted(HEAD_DIMS) if d >= head_dim)
    mine = [tile for tile in FWD_TILES.values() if tile.head_dim == built]
    return next((tile for tile in mine if seqlen_k <= tile.max_seqlen_k(causal)), mine[-1])
