"""The kernels' integer logic, compiled for the host: which blocks a tile visits, and who works on which tile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from host.build import load
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiles import (
    BWD_TILES,
    FWD_FP8_TILES,
    HEAD_DIMS,
    ROWS_PER_WARPGROUP,
    BwdTile,
    FwdTile,
    tile_for,
)

from fa3.fp8_format import FP8_SCALE_ROWS
from fa3.mask import Mask

LARGEST = 2**31 - 1025  # the largest size that csrc/ops/torch_op.h lets through
L2_BUDGET_BYTES = 32 << 20  # csrc/fwd/launch.cuh
BWD_L2_BUDGET_BYTES = 40 << 20  # csrc/bwd/launch.cuh


@pytest.fixture(scope="module")
def host():
    return load()


# --- masks


@dataclass(frozen=True)
class MaskCase:
    """A mask as the ops take it: -1 is unlimited, chunk 0 is none."""

    left: int = -1
    right: int = -1
    chunk: int = 0

    def params(self, host):
        left, right = (host.kUnlimited if side == -1 else side for side in (self.left, self.right))
        return host.MaskParams(left, right, self.chunk)

    def visible(self, seqlen_q: int, seqlen_k: int) -> np.ndarray:
        """As flash_attn_func defines it: [i, j] is whether query i sees key j."""
        i, j = np.ogrid[:seqlen_q, :seqlen_k]
        position = i + seqlen_k - seqlen_q
        mask = np.ones((seqlen_q, seqlen_k), bool)
        if self.left != -1:
            mask &= j >= position - self.left
        if self.right != -1:
            mask &= j <= position + self.right
        if self.chunk:
            mask &= j // self.chunk == position // self.chunk
        return mask


MASKS = [
    MaskCase(),
    MaskCase(right=0),
    MaskCase(left=0),
    MaskCase(left=0, right=0),
    MaskCase(left=20, right=0),
    MaskCase(left=3, right=70),
    MaskCase(left=64, right=0),
    MaskCase(right=17),
    MaskCase(left=47),
    MaskCase(chunk=16),
    MaskCase(chunk=50),
    MaskCase(right=0, chunk=37),
    MaskCase(left=8, right=5, chunk=20),
    MaskCase(right=0, chunk=1),
]
each_mask = pytest.mark.parametrize("case", MASKS, ids=str)
LENGTHS = [(1, 1), (1, 150), (2, 5), (5, 2), (31, 48), (64, 64), (65, 49), (130, 47), (130, 150), (150, 130)]
each_length = pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)


@each_mask
@each_length
def test_keys_of_a_query_and_queries_of_a_key(host, case, seqlen_q, seqlen_k):
    mask = host.Mask(case.params(host), seqlen_q, seqlen_k)
    visible = case.visible(seqlen_q, seqlen_k)
    for query in range(seqlen_q):
        begin, end = mask.keys_of(query)
        assert visible[query, max(0, begin) : max(0, end)].all()
        assert max(0, end - begin) == visible[query].sum()
    for key in range(seqlen_k):
        begin, end = mask.queries_of(key)
        assert visible[max(0, begin) : max(0, end), key].all()
        assert max(0, end - begin) == visible[:, key].sum()
    for key in (seqlen_k, seqlen_k + 127):
        assert mask.queries_of(key) == (seqlen_q, seqlen_q)


@each_mask
def test_work_of_queries(host, case):
    """The most keys that a query sees, and whether the last queries see more than the first, or fewer."""
    params, visible = case.params(host), case.visible(400, 400).sum(axis=1)
    assert params.most_keys(400) == visible.max()
    assert params.is_causal_or_none() == (case in (MaskCase(), MaskCase(right=0)))
    rise = visible[200:].mean() - visible[:200].mean()
    # Both ends of the sequence cut a window: that is no trend.
    trend = host.WorkTrend
    assert host.trend_of_queries(params) == (
        trend.kRising if rise > 60 else trend.kFalling if rise < -60 else trend.kEven
    )


@each_mask
@each_length
@pytest.mark.parametrize(("tile_m", "tile_n"), [(16, 48), (64, 16), (128, 128)])
def test_key_blocks_are_the_masks(host, case, seqlen_q, seqlen_k, tile_m, tile_n):
    """Every block that a row of the tile sees is visited, none that needs a mask goes without, and one at least."""
    mask = host.Mask(case.params(host), seqlen_q, seqlen_k)
    visible = case.visible(seqlen_q, seqlen_k)
    # A warpgroup of the last tile may have all its rows past seqlen_q.
    for query in range(0, seqlen_q + tile_m, tile_m):
        blocks = mask.key_blocks(query, tile_m, tile_n)
        assert 0 <= blocks.begin < blocks.end <= max(1, -(-seqlen_k // tile_n))
        rows = visible[query : query + tile_m]
        if rows.size == 0:
            continue
        seen = [rows[:, j : j + tile_n].any() for j in range(0, seqlen_k, tile_n)]
        if any(seen):
            assert (blocks.begin, blocks.end) == (seen.index(True), len(seen) - seen[::-1].index(True))
        for block in range(blocks.begin, blocks.end):
            tile = rows[:, block * tile_n : (block + 1) * tile_n]
            if not blocks.needs_mask(block):
                assert tile.shape[1] == tile_n
                assert tile.all()
            elif len(rows) == tile_m and tile.shape[1] == tile_n:
                assert not tile.all()


@each_mask
@each_length
@pytest.mark.parametrize(("tile_m", "tile_n"), [(16, 48), (64, 64), (64, 128)])
def test_query_blocks_are_the_masks(host, case, seqlen_q, seqlen_k, tile_m, tile_n):
    """The same from the side of the keys; a tile may see nothing. Queries past the end need no mask."""
    mask = host.Mask(case.params(host), seqlen_q, seqlen_k)
    visible = case.visible(seqlen_q, seqlen_k)
    for key in range(0, seqlen_k, tile_n):
        blocks = mask.query_blocks(key, tile_n, tile_m)
        columns = visible[:, key : key + tile_n]
        seen = [columns[i : i + tile_m].any() for i in range(0, seqlen_q, tile_m)]
        assert blocks.empty() == (not any(seen))
        if not any(seen):
            continue
        assert (blocks.begin, blocks.end) == (seen.index(True), len(seen) - seen[::-1].index(True))
        for block in range(blocks.begin, blocks.end):
            tile = columns[block * tile_m : (block + 1) * tile_m]
            if not blocks.needs_mask(block):
                assert tile.shape[1] == tile_n
                assert tile.all()


@each_mask
@each_length
@pytest.mark.parametrize("tile_n", [64, 96, 128, 176])
def test_a_warpgroup_visits_what_its_rows_see(host, case, seqlen_q, seqlen_k, tile_n):
    """Of the blocks of its CTA, which it leaves out at most one of at either end."""
    mask = host.Mask(case.params(host), seqlen_q, seqlen_k)
    for tile_begin in range(0, seqlen_q, 128):
        cta = mask.key_blocks(tile_begin, 128, tile_n)
        for query in (tile_begin, tile_begin + ROWS_PER_WARPGROUP):
            own = mask.key_blocks(query, ROWS_PER_WARPGROUP, tile_n)
            visited = host.visited_blocks(cta, own)
            assert cta.begin <= visited.begin <= own.begin < own.end <= visited.end <= cta.end
            assert visited.begin <= cta.begin + 1
            assert visited.end >= cta.end - 1
            assert all(
                visited.needs_mask(block)
                for block in {*range(visited.begin, visited.end)}
                if not (own.begin <= block < own.end)
            )


@pytest.mark.parametrize("causal", [False, True])
@each_length
def test_causal_mask_is_the_mask(host, causal, seqlen_q, seqlen_k):
    """What FP8 kernels take in place of Mask."""
    mask = host.Mask(MaskCase(right=0 if causal else -1).params(host), seqlen_q, seqlen_k)
    short = host.CausalMask(causal, seqlen_q, seqlen_k)
    for query in range(seqlen_q + 64):
        assert mask.keys_of(query)[0] == 0
        # A row past the end sees every key in either; how Mask writes that differs.
        assert min(mask.keys_of(query)[1], seqlen_k) == short.end_of_keys(query)
    for query in range(0, seqlen_q, 64):
        blocks, expected = short.key_blocks(query, 64, 128), mask.key_blocks(query, 64, 128)
        for field in ("begin", "end", "unmasked_begin", "unmasked_end"):
            assert getattr(blocks, field) == getattr(expected, field)


@each_mask
@each_length
def test_masks_of_both_languages_agree(host, case, seqlen_q, seqlen_k):
    """fa3/mask.py, which the portable path and the FLOP formulas take."""
    mask = host.Mask(case.params(host), seqlen_q, seqlen_k)
    python_mask = Mask(case.left, case.right, case.chunk)
    for query in range(seqlen_q):
        keys, expected = (
            range(max(0, begin), max(0, end))
            for begin, end in (mask.keys_of(query), python_mask.keys_of(query, seqlen_q, seqlen_k))
        )
        assert keys == expected
    assert host.queries_with_keys(case.params(host), seqlen_q, seqlen_k)[0] == python_mask.first_query(
        seqlen_q, seqlen_k
    )


def test_constants_of_both_languages_agree(host):
    assert host.kFp8ScaleRows == FP8_SCALE_ROWS


@each_mask
@each_length
def test_queries_without_keys_are_left_out(host, case, seqlen_q, seqlen_k):
    """They come first; each of the others sees a key, and the mask of what is left is the same."""
    params = case.params(host)
    first, left = host.queries_with_keys(params, seqlen_q, seqlen_k)
    has_key = case.visible(seqlen_q, seqlen_k).any(1)
    assert first + left == seqlen_q
    assert not has_key[:first].any()
    assert has_key[first:].all()
    if left > 0:
        whole, rest = (host.Mask(params, n, seqlen_k) for n in (seqlen_q, left))
        assert all(whole.keys_of(first + i) == rest.keys_of(i) for i in range(left))


def test_no_query_is_left_without_keys(host):
    assert host.queries_with_keys(MaskCase().params(host), 7, 0) == (7, 0)


@each_mask
@each_length
@pytest.mark.parametrize("tile_n", [64, 128])
def test_ranks_of_the_deterministic_backward(host, case, seqlen_q, seqlen_k, tile_n):
    """csrc/bwd/dq_writer.cuh: the n_blocks that add to an m_block are those that it sees, without a gap."""
    _, left = host.queries_with_keys(case.params(host), seqlen_q, seqlen_k)
    mask = host.Mask(case.params(host), left, seqlen_k)
    adds_to = {m: [] for m in range(-(-left // 64))}
    for n_block in range(-(-seqlen_k // tile_n)):
        blocks = mask.query_blocks(n_block * tile_n, tile_n, 64)
        for m_block in range(blocks.begin, blocks.end):
            adds_to[m_block].append(n_block)
    for m_block, n_blocks in adds_to.items():
        blocks = mask.key_blocks(m_block * 64, 64, tile_n)
        assert n_blocks == list(range(blocks.begin, blocks.end))


sizes = st.one_of(st.integers(1, 600), st.integers(LARGEST - 2000, LARGEST), st.integers(1, LARGEST))
sides = st.one_of(st.just(-1), st.integers(0, 300), st.integers(0, LARGEST))


@given(
    seqlen_q=sizes,
    seqlen_k=sizes,
    left=sides,
    right=sides,
    chunk=st.one_of(st.just(0), st.just(0), st.integers(1, 300), st.integers(1, LARGEST)),
    index=st.integers(0, LARGEST),
    tile=st.sampled_from([64, 80, 96, 128, 176]),
)
@example(LARGEST, LARGEST, -1, 0, 0, LARGEST, 176)
@example(LARGEST, 1, -1, 0, 0, 0, 64)
@example(1, LARGEST, -1, 0, 0, 0, 176)
@example(LARGEST, 1, 0, LARGEST, 0, 0, 64)
@example(1, LARGEST, LARGEST, 0, LARGEST, LARGEST, 64)
@settings(max_examples=3000, deadline=None)
def test_masks_near_the_largest_sizes(seqlen_q, seqlen_k, left, right, chunk, index, tile):
    """Against the same arithmetic in Python's integers, which do not overflow."""
    host = load()
    mask = host.Mask(MaskCase(left, right, chunk).params(host), seqlen_q, seqlen_k)

    def band(diagonal: int, position: int, length: int, before: int, after: int) -> tuple[int, int]:
        """Of [0, length), what lies at most so far from the diagonal, and in the chunk of the position."""
        begin = 0 if before == -1 else max(0, diagonal - before)
        end = length if after == -1 else min(length, diagonal + after + 1)
        if chunk:
            first = diagonal - position % chunk
            begin, end = max(begin, first), min(end, first + chunk)
        return begin, end

    query, key = min(index, seqlen_q - 1), min(index, seqlen_k - 1)
    position = query + seqlen_k - seqlen_q
    begin, end = band(position, position, seqlen_k, left, right)
    assert mask.keys_of(query) == (begin, end)
    assert mask.queries_of(key) == band(key + seqlen_q - seqlen_k, key, seqlen_q, right, left)
    for row in (seqlen_q, seqlen_q + 191):  # past the end: no overflow
        mask.keys_of(row)
    blocks = mask.key_blocks(query, 1, tile)
    if begin < end:
        assert (blocks.begin, blocks.end) == (begin // tile, -(-end // tile))
    else:
        assert blocks.end == blocks.begin + 1


# --- packed sequences


@given(first=st.integers(0, LARGEST), length=st.integers(0, 2**30), row=st.integers(0, 2**30))
def test_a_packed_sequence_is_found_by_wrapping_around(first, length, row):
    """The address that TMA computes for a row is that of the sequence, and a row past its end is out of bounds."""
    origin, wrap, outer = load().packed_sequence(first % (LARGEST - length), length)
    row_stride = 2048  # bytes
    address = (origin + row) * row_stride + wrap * (2**34 - row_stride) + outer * row_stride
    assert address % 2**64 == (first % (LARGEST - length) + row) * row_stride
    assert (origin + row < 2**30) == (row < length)


# --- StaticScheduler

orders = st.sampled_from(["kEqual", "kAscending", "kDescending"])


def check_covers_all(host, num_blocks, num_heads, batch, params) -> np.ndarray:
    """Asserts that every tile is visited exactly once, and returns the tiles in the order of each CTA's work."""
    tiles = host.all_tiles(params)
    cta, block, head, batch_idx = tiles.T
    assert len(tiles) == num_blocks * num_heads * batch
    for index, size in ((cta, params.num_ctas), (block, num_blocks), (head, num_heads), (batch_idx, batch)):
        assert index.min() == 0
        assert index.max() == size - 1  # so every CTA has work, which the kernel relies on
    number = (batch_idx.astype(np.int64) * num_heads + head) * num_blocks + block
    assert len(np.unique(number)) == len(number)
    return tiles


@given(
    num_blocks=st.integers(1, 40),
    num_heads=st.integers(1, 24),
    batch=st.integers(1, 12),
    num_sms=st.sampled_from([1, 2, 7, 78, 114, 132]),
    order=orders,
    l2_heads=st.integers(1, 300),
)
@example(num_blocks=1, num_heads=65, batch=1009, num_sms=132, order="kDescending", l2_heads=1)
@example(num_blocks=1, num_heads=65, batch=1009, num_sms=132, order="kEqual", l2_heads=1)
@example(num_blocks=3, num_heads=7, batch=9500, num_sms=132, order="kDescending", l2_heads=66500)
@example(num_blocks=2, num_heads=71, batch=1, num_sms=132, order="kDescending", l2_heads=71)
@example(num_blocks=5000, num_heads=3, batch=1, num_sms=132, order="kDescending", l2_heads=2)
@settings(max_examples=300, deadline=None)
def test_every_tile_is_visited_once(num_blocks, num_heads, batch, num_sms, order, l2_heads):
    host = load()
    l2_heads = min(l2_heads, num_heads * batch)  # as the launch does
    params = host.make_tile_scheduler(num_blocks, num_heads, batch, num_sms, getattr(host.TileOrder, order), l2_heads)
    assert params.num_ctas == min(num_sms, num_blocks * num_heads * batch)
    check_covers_all(host, num_blocks, num_heads, batch, params)


@pytest.mark.parametrize(("num_blocks", "heads", "num_sms"), [(8, 66, 132), (16, 33, 132), (3, 5, 4), (1, 300, 132)])
@pytest.mark.parametrize("heads_per_l2_group", [1, 3, 33])
def test_equal(host, num_blocks, heads, num_sms, heads_per_l2_group):
    """Group after group, block after block of all its heads: tile n goes to CTA n % num_ctas."""
    params = host.make_tile_scheduler(num_blocks, heads, 1, num_sms, host.TileOrder.kEqual, heads_per_l2_group)
    tiles = check_covers_all(host, num_blocks, heads, 1, params)
    in_order = [
        (block, head)
        for first in range(0, heads, heads_per_l2_group)
        for block in range(num_blocks)
        for head in range(first, min(first + heads_per_l2_group, heads))
    ]
    for cta in range(params.num_ctas):
        assert [(m, h) for c, m, h, _ in tiles.tolist() if c == cta] == in_order[cta :: params.num_ctas]


@pytest.mark.parametrize(
    ("num_blocks", "heads", "num_sms", "l2_heads"),
    [(64, 16, 132, 8), (33, 16, 132, 4), (8, 33, 132, 33), (6, 40, 12, 4), (16, 50, 8, 7)],
)
@pytest.mark.parametrize("ascending", [False, True])
def test_ascending_and_descending(host, num_blocks, heads, num_sms, l2_heads, ascending):
    """Heads fastest, odd waves backwards, group after group."""
    order = host.TileOrder.kAscending if ascending else host.TileOrder.kDescending
    params = host.make_tile_scheduler(num_blocks, heads, 1, num_sms, order, l2_heads)
    a_wave = -(-params.num_ctas // num_blocks)  # heads that give every CTA a tile
    assert params.heads_per_l2_group <= max(l2_heads * 17 // 16, 2 * a_wave)
    tiles = check_covers_all(host, num_blocks, heads, 1, params)
    expected = [[] for _ in range(params.num_ctas)]
    wave_idx = 0
    for first in range(0, heads, params.heads_per_l2_group):
        group = range(first, min(first + params.heads_per_l2_group, heads))
        in_order = [(block, head) for block in range(num_blocks)[:: 1 if ascending else -1] for head in group]
        for r in range(params.waves_per_l2_group):
            for position, tile in enumerate(in_order[r * params.num_ctas : (r + 1) * params.num_ctas]):
                backwards = wave_idx % 2 == 1
                expected[params.num_ctas - 1 - position if backwards else position].append(tile)
            wave_idx += 1
    assert wave_idx == params.num_waves
    for cta, wanted in enumerate(expected):
        assert [(m, h) for c, m, h, _ in tiles.tolist() if c == cta] == wanted


@given(
    num_n_blocks=st.integers(1, 40),
    num_heads=st.integers(1, 24),
    batch=st.integers(1, 8),
    num_sms=st.sampled_from([1, 2, 7, 78, 132]),
    causal=st.booleans(),
    l2_heads=st.integers(1, 300),
)
@settings(max_examples=200, deadline=None)
def test_turns_of_the_deterministic_backward_end(num_n_blocks, num_heads, batch, num_sms, causal, l2_heads):
    """Each CTA does its tiles in order, and a tile of keys only after the one before it of the same head."""
    host = load()
    l2_heads = min(l2_heads, num_heads * batch)
    order = host.TileOrder.kDescending if causal else host.TileOrder.kEqual
    params = host.make_tile_scheduler(num_n_blocks, num_heads, batch, num_sms, order, l2_heads)
    work = [[] for _ in range(params.num_ctas)]  # per CTA, the last first
    for cta, n_block, head, batch_idx in reversed(host.all_tiles(params).tolist()):
        work[cta].append(((batch_idx, head), num_n_blocks - 1 - n_block if causal else n_block))
    turn = {(batch_idx, head): 0 for batch_idx in range(batch) for head in range(num_heads)}
    went_on = True
    while went_on:
        went_on = False
        for tiles in work:
            while tiles and turn[tiles[-1][0]] == tiles[-1][1]:
                turn[tiles.pop()[0]] += 1
                went_on = True
    assert not any(work)


def causal_imbalance(
    host,
    tile: FwdTile,
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    num_heads: int,
    group_size: int = 1,
    num_sms: int = 132,
    element_bytes: int = 2,
) -> float:
    """Key blocks of the busiest CTA over the mean, counting one more per tile for its start and end."""
    num_m_blocks = -(-seqlen_q // tile.tile_m)
    heads_per_l2_group = max(L2_BUDGET_BYTES // (seqlen_k * tile.head_dim * 2 * element_bytes), 1) * group_size
    heads_per_l2_group = min(heads_per_l2_group, num_heads * batch)
    params = host.make_tile_scheduler(
        num_m_blocks, num_heads, batch, num_sms, host.TileOrder.kDescending, heads_per_l2_group
    )
    cta, m_block, _, _ = host.all_tiles(params).T
    mask = host.Mask(MaskCase(right=0).params(host), seqlen_q, seqlen_k)
    blocks = [1 + mask.key_blocks(m * tile.tile_m, tile.tile_m, tile.tile_n).end for m in range(num_m_blocks)]
    work = np.bincount(cta, weights=np.array(blocks)[m_block], minlength=params.num_ctas)
    return work.max() / work.mean()


@pytest.mark.parametrize("seqlen", [512, 1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_causal_balance(host, head_dim, seqlen):
    """16,384 tokens and hidden size 2048, as in the benchmarks: no CTA of 132 has much more work than the mean."""
    tile = tile_for(head_dim, seqlen, causal=True)
    imbalance = causal_imbalance(host, tile, 16384 // seqlen, seqlen, seqlen, 2048 // head_dim)
    assert imbalance < (1.04 if head_dim in (64, 128, 256) else 1.1)


@pytest.mark.parametrize("seqlen", [512, 1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("tile", FWD_FP8_TILES.values(), ids=FWD_FP8_TILES.keys())
def test_causal_balance_of_fp8(host, tile, seqlen):
    imbalance = causal_imbalance(host, tile, 16384 // seqlen, seqlen, seqlen, 2048 // tile.head_dim, element_bytes=1)
    assert imbalance < 1.06


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "batch", "num_heads", "group_size"),
    [(1, 131072, 4, 32, 4), (128, 131072, 8, 16, 1), (512, 16384, 4, 16, 1), (512, 65536, 4, 32, 4)],
)
def test_causal_balance_of_few_queries_over_many_keys(host, seqlen_q, seqlen_k, batch, num_heads, group_size):
    """Where the K and V of few heads fill the L2, a group of those heads must still give every CTA work."""
    tile = tile_for(128, seqlen_k, causal=True)
    assert causal_imbalance(host, tile, batch, seqlen_q, seqlen_k, num_heads, group_size) < 1.1


def backward_imbalance(host, tile: BwdTile, batch: int, seqlen: int, num_heads_kv: int, group_size: int) -> float:
    """Steps of the busiest CTA over the mean, causal, counting two more per tile for its start and end."""
    num_n_blocks, num_m_blocks = -(-seqlen // tile.tile_n), -(-seqlen // tile.tile_m)
    num_ctas = min(132, num_n_blocks * num_heads_kv * batch)
    l2_heads = max(
        BWD_L2_BUDGET_BYTES // (seqlen * tile.head_dim * 8 * group_size), -(-num_ctas // num_n_blocks)
    )  # as csrc/bwd/launch.cuh
    heads_per_l2_group = host.heads_that_fill_waves(
        num_n_blocks, num_heads_kv * batch, num_ctas, min(l2_heads, num_heads_kv * batch)
    )
    order = host.TileOrder.kAscending
    params = host.make_tile_scheduler(num_n_blocks, num_heads_kv, batch, 132, order, heads_per_l2_group)
    cta, n_block, _, _ = host.all_tiles(params).T
    steps = 2 + group_size * (num_m_blocks - np.arange(num_n_blocks) * tile.tile_n // tile.tile_m)
    work = np.bincount(cta, weights=steps[n_block], minlength=params.num_ctas)
    return work.max() / (work.sum() / 132)


@pytest.mark.parametrize("seqlen", [512, 1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("name", ["hdim64", "hdim128", "hdim256"])
def test_causal_balance_of_the_backward(host, name, seqlen):
    tile = BWD_TILES[name]
    assert backward_imbalance(host, tile, 16384 // seqlen, seqlen, 2048 // tile.head_dim, 1) < 1.025


@pytest.mark.parametrize(("batch", "seqlen"), [(8, 4096), (4, 8192), (1, 8192), (1, 32768)])
@pytest.mark.parametrize("group_size", [4, 8])
def test_causal_balance_of_the_backward_with_groups(host, batch, seqlen, group_size):
    """Where a group's queries are many for the L2, its tiles are few and long."""
    assert backward_imbalance(host, BWD_TILES["hdim128"], batch, seqlen, 8, group_size) < 1.03


@given(
    num_blocks=st.integers(1, 300),
    num_batch_heads=st.integers(1, 3000),
    num_ctas=st.integers(1, 132),
    l2_heads=st.integers(1, 3000),
)
def test_heads_that_fill_waves_stay_near_the_l2(num_blocks, num_batch_heads, num_ctas, l2_heads):
    l2_heads = min(l2_heads, num_batch_heads)
    heads = load().heads_that_fill_waves(num_blocks, num_batch_heads, num_ctas, l2_heads)
    assert l2_heads // 2 < heads <= min(2 * l2_heads, num_batch_heads)
