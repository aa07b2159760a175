"""Reads csrc/fwd/tiles.h and csrc/bwd/tiles.h: which kernels there are, and the forward's for which lengths."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent / "csrc"
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


@dataclass(frozen=True)
class FwdFp8Tile:
    """The struct of the same name, and the name as above."""

    name: str
    consumer_warpgroups: int
    stages_kv: int
    stages_v_rows: int
    out_slabs: int
    pv_columns: int
    overlaps: bool
    tile_n: int = 128  # kFp8BlockRows

    @property
    def head_dim(self) -> int:
        return int(re.match(r"hdim(\d+)", self.name)[1])

    @property
    def v_transposed(self) -> bool:
        return self.stages_v_rows == 0

    @property
    def tile_m(self) -> int:
        return self.consumer_warpgroups * ROWS_PER_WARPGROUP


@dataclass(frozen=True)
class BwdTile:
    """The struct of the same name, and the name as above."""

    name: str
    tile_m: int
    tile_n: int
    stages_q: int
    stages_dout: int
    stages_ds: int
    dq_columns: int
    v_from_registers: bool
    ds_from_registers: bool

    @property
    def head_dim(self) -> int:
        return int(self.name.removeprefix("hdim"))


def _read(struct: str) -> dict[str, list[int | bool]]:
    """Values of the constants of this type, by the name of what is built: kFwdHdim64Short is hdim64_short."""
    source = (CSRC / struct[:3].lower() / "tiles.h").read_text()
    tiles = {}
    constant = rf"^constexpr {struct} k{struct.removesuffix('Tile')}(\w+)\{{(.*)\}};"
    for variable, values in re.findall(constant, source, re.MULTILINE):
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", variable).lower()
        words = [value.strip() for value in values.split(",")]
        tiles[name] = [word == "true" if word in ("true", "false") else int(word) for word in words]
    return tiles


# By name, in the order of the file: a head_dim's kernel for short sequences comes before the one for long.
FWD_TILES = {name: FwdTile(name, *values) for name, values in _read("FwdTile").items()}
HEAD_DIMS = tuple(dict.fromkeys(tile.head_dim for tile in FWD_TILES.values()))
FWD_FP8_TILES = {name: FwdFp8Tile(name, *values) for name, values in _read("FwdFp8Tile").items()}
BWD_TILES = {name: BwdTile(name, *values) for name, values in _read("BwdTile").items()}
BWD_HEAD_DIMS = tuple(tile.head_dim for tile in BWD_TILES.values())


def tile_for(head_dim: int, seqlen_k: int, causal: bool) -> FwdTile:
    """The tile that csrc/fwd/kernels.cpp selects, where all are built."""
    built = next(d for d in sorted(HEAD_DIMS) if d >= head_dim)
    mine = [tile for tile in FWD_TILES.values() if tile.head_dim == built]
    return next((tile for tile in mine if seqlen_k <= tile.max_seqlen_k(causal)), mine[-1])
