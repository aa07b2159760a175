"""The kernels' integer logic, compiled for the host: key blocks of a query tile, and who works on which tile."""

from __future__ import annotations

import math

import numpy as np
import pytest
from host.build import load
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiles import (
    BWD_TILES,
    FWD_FP8_TILES,
    FWD_TILES,
    HEAD_DIMS,
    ROWS_PER_WARPGROUP,
    BwdTile,
    FwdFp8Tile,
    FwdTile,
    tile_for,
)

LARGEST = 2**31 - 1025  # the largest size that csrc/torch_op.h lets through
L2_BUDGET_BYTES = 32 << 20  # csrc/fwd/launch.cuh
BWD_L2_BUDGET_BYTES = 40 << 20  # csrc/bwd/launch.cuh


@pytest.fixture(scope="module")
def host():
    return load()


# --- visible_keys and block_range


def visible(seqlen_q: int, seqlen_k: int, causal: bool) -> np.ndarray:
    """The mask as flash_attn_func defines it: [i, j] is whether query i sees key j."""
    i, j = np.ogrid[:seqlen_q, :seqlen_k]
    return j <= i + seqlen_k - seqlen_q if causal else np.ones((seqlen_q, seqlen_k), bool)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 2, 5, 31, 64, 65, 130])
@pytest.mark.parametrize("seqlen_k", [1, 2, 5, 16, 47, 48, 49, 150])
def test_block_range_is_the_masks(host, seqlen_q, seqlen_k, causal):
    mask = visible(seqlen_q, seqlen_k, causal)
    for row in range(seqlen_q):
        assert max(0, host.visible_keys(row, seqlen_q, seqlen_k, causal)) == mask[row].sum()
    for num_rows in (1, 16, 64, 128):
        for tile_n in (16, 48):
            # A warpgroup of the last tile may have all its rows past seqlen_q.
            for row_begin in range(0, seqlen_q + num_rows, num_rows):
                end, unmasked_end = host.block_range(row_begin, num_rows, tile_n, seqlen_q, seqlen_k, causal)
                rows = mask[row_begin : row_begin + num_rows]
                if rows.size == 0:
                    assert end == math.ceil(seqlen_k / tile_n)
                    continue
                seen = [rows[:, j : j + tile_n].any() for j in range(0, seqlen_k, tile_n)]
                assert end == max(1, sum(seen))
                assert not any(seen[end:])
                whole = [rows[:, j : j + tile_n].all() for j in range(0, seqlen_k - tile_n + 1, tile_n)]
                assert unmasked_end == sum(whole)
                assert all(whole[:unmasked_end])


sizes = st.one_of(st.integers(1, 600), st.integers(LARGEST - 2000, LARGEST), st.integers(1, LARGEST))


@given(
    seqlen_q=sizes,
    seqlen_k=sizes,
    tile=st.integers(0, LARGEST // 64),
    warpgroups=st.sampled_from([1, 2, 3]),
    tile_n=st.sampled_from([64, 80, 96, 128, 176]),
    causal=st.booleans(),
)
@example(seqlen_q=LARGEST, seqlen_k=LARGEST, tile=LARGEST, warpgroups=3, tile_n=176, causal=True)
@example(seqlen_q=LARGEST, seqlen_k=1, tile=0, warpgroups=2, tile_n=64, causal=True)
@example(seqlen_q=1, seqlen_k=LARGEST, tile=0, warpgroups=2, tile_n=176, causal=True)
@settings(max_examples=2000, deadline=None)
def test_block_range_near_the_largest_sizes(seqlen_q, seqlen_k, tile, warpgroups, tile_n, causal):
    """Against the same arithmetic in Python's integers, which do not overflow; every warpgroup of the tile."""
    host = load()
    tile_m = warpgroups * ROWS_PER_WARPGROUP
    tile_begin = min(tile, (seqlen_q - 1) // tile_m) * tile_m

    def keys(row):  # of the last query where there is no such row
        return seqlen_k - (seqlen_q - 1 - row if causal and row < seqlen_q else 0)

    for row in range(tile_begin, tile_begin + tile_m, 31):
        assert host.visible_keys(row, seqlen_q, seqlen_k, causal) == keys(row)
    for row_begin, num_rows in [
        (tile_begin, tile_m),
        *((tile_begin + w * ROWS_PER_WARPGROUP, ROWS_PER_WARPGROUP) for w in range(warpgroups)),
    ]:
        most, fewest = keys(min(row_begin + num_rows, seqlen_q) - 1), keys(row_begin)
        expected = (max(1, -(-most // tile_n)), max(0, fewest) // tile_n)
        assert host.block_range(row_begin, num_rows, tile_n, seqlen_q, seqlen_k, causal) == expected


@given(seqlen_q=st.integers(1, 1500), seqlen_k=st.integers(1, 1500), causal=st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_warpgroup_skips_at_most_one_block(seqlen_q, seqlen_k, causal):
    """The producer brings the blocks of the whole CTA; csrc/fwd/consumer.cuh steps over one, and over no second one."""
    host = load()
    for tile in FWD_TILES.values():
        for tile_begin in range(0, seqlen_q, tile.tile_m):
            end, _ = host.block_range(tile_begin, tile.tile_m, tile.tile_n, seqlen_q, seqlen_k, causal)
            for row_begin in range(tile_begin, tile_begin + tile.tile_m, ROWS_PER_WARPGROUP):
                own_end, _ = host.block_range(row_begin, ROWS_PER_WARPGROUP, tile.tile_n, seqlen_q, seqlen_k, causal)
                assert end - 1 <= own_end <= end


# --- first_query


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 2, 5, 64, 130])
@pytest.mark.parametrize("seqlen_k", [1, 2, 5, 64, 150])
def test_first_query_is_the_masks(host, seqlen_q, seqlen_k, causal):
    mask = visible(seqlen_q, seqlen_k, causal)
    for key in range(seqlen_k):
        first = host.first_query(key, seqlen_q, seqlen_k, causal)
        assert mask[first:, key].all()  # at least the last query
        assert not mask[:first, key].any()
    for key in (seqlen_k, seqlen_k + 127):
        assert host.first_query(key, seqlen_q, seqlen_k, causal) == seqlen_q


@given(seqlen_q=sizes, seqlen_k=sizes, key=sizes, causal=st.booleans())
@example(seqlen_q=LARGEST, seqlen_k=1, key=0, causal=True)
@example(seqlen_q=1, seqlen_k=LARGEST, key=LARGEST + 1023, causal=True)
def test_first_query_near_the_largest_sizes(seqlen_q, seqlen_k, key, causal):
    expected = max(0, key - (seqlen_k - seqlen_q)) if causal else 0
    assert load().first_query(key, seqlen_q, seqlen_k, causal) == (expected if key < seqlen_k else seqlen_q)


# --- TileScheduler

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
@pytest.mark.parametrize("section_heads", [1, 3, 33])
def test_equal(host, num_blocks, heads, num_sms, section_heads):
    """Section after section, block after block of all its heads: tile n goes to CTA n % num_ctas."""
    params = host.make_tile_scheduler(num_blocks, heads, 1, num_sms, host.TileOrder.kEqual, section_heads)
    tiles = check_covers_all(host, num_blocks, heads, 1, params)
    in_order = [
        (block, head)
        for first in range(0, heads, section_heads)
        for block in range(num_blocks)
        for head in range(first, min(first + section_heads, heads))
    ]
    for cta in range(params.num_ctas):
        assert [(m, h) for c, m, h, _ in tiles.tolist() if c == cta] == in_order[cta :: params.num_ctas]


@pytest.mark.parametrize(
    ("num_blocks", "heads", "num_sms", "l2_heads"),
    [(64, 16, 132, 8), (33, 16, 132, 4), (8, 33, 132, 33), (6, 40, 12, 4), (16, 50, 8, 7)],
)
@pytest.mark.parametrize("ascending", [False, True])
def test_ascending_and_descending(host, num_blocks, heads, num_sms, l2_heads, ascending):
    """Heads fastest, odd rounds backwards, section after section."""
    order = host.TileOrder.kAscending if ascending else host.TileOrder.kDescending
    params = host.make_tile_scheduler(num_blocks, heads, 1, num_sms, order, l2_heads)
    a_round = -(-params.num_ctas // num_blocks)  # heads that give every CTA a tile
    assert params.section_heads <= max(l2_heads * 17 // 16, 2 * a_round)
    tiles = check_covers_all(host, num_blocks, heads, 1, params)
    expected = [[] for _ in range(params.num_ctas)]
    round_idx = 0
    for first in range(0, heads, params.section_heads):
        section = range(first, min(first + params.section_heads, heads))
        in_order = [(block, head) for block in range(num_blocks)[:: 1 if ascending else -1] for head in section]
        for r in range(params.rounds_per_section):
            for position, tile in enumerate(in_order[r * params.num_ctas : (r + 1) * params.num_ctas]):
                backwards = round_idx % 2 == 1
                expected[params.num_ctas - 1 - position if backwards else position].append(tile)
            round_idx += 1
    assert round_idx == params.num_rounds
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


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (64, 64), (130, 700), (300, 300), (700, 701)])
@pytest.mark.parametrize("tile_n", [64, 128])
def test_last_key_block_is_the_masks(host, seqlen_q, seqlen_k, tile_n):
    """The turns count from it, so that they begin at 0 and leave none out."""
    mask = visible(seqlen_q, seqlen_k, True)
    for row in range(0, seqlen_q, 64):
        keys = mask[row : row + 64].any(0).nonzero()[0]
        assert host.last_key_block(row, 64, tile_n, seqlen_q, seqlen_k) == keys.max() // tile_n


def causal_imbalance(
    host,
    tile: FwdTile | FwdFp8Tile,
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
    section_heads = max(L2_BUDGET_BYTES // (seqlen_k * tile.head_dim * 2 * element_bytes), 1) * group_size
    section_heads = min(section_heads, num_heads * batch)
    params = host.make_tile_scheduler(
        num_m_blocks, num_heads, batch, num_sms, host.TileOrder.kDescending, section_heads
    )
    cta, m_block, _, _ = host.all_tiles(params).T
    blocks = [
        1 + host.block_range(m * tile.tile_m, tile.tile_m, tile.tile_n, seqlen_q, seqlen_k, True)[0]
        for m in range(num_m_blocks)
    ]
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
    """Where the K and V of few heads fill the L2, a section of those heads must still give every CTA work."""
    tile = tile_for(128, seqlen_k, causal=True)
    assert causal_imbalance(host, tile, batch, seqlen_q, seqlen_k, num_heads, group_size) < 1.1


def backward_imbalance(host, tile: BwdTile, batch: int, seqlen: int, num_heads_kv: int, group_size: int) -> float:
    """Steps of the busiest CTA over the mean, causal, counting two more per tile for its start and end."""
    num_n_blocks, num_m_blocks = -(-seqlen // tile.tile_n), -(-seqlen // tile.tile_m)
    num_ctas = min(132, num_n_blocks * num_heads_kv * batch)
    l2_heads = max(
        BWD_L2_BUDGET_BYTES // (seqlen * tile.head_dim * 8 * group_size), -(-num_ctas // num_n_blocks)
    )  # as csrc/bwd/launch.cuh
    section_heads = host.heads_that_fill_rounds(
        num_n_blocks, num_heads_kv * batch, num_ctas, min(l2_heads, num_heads_kv * batch)
    )
    order = host.TileOrder.kAscending
    params = host.make_tile_scheduler(num_n_blocks, num_heads_kv, batch, 132, order, section_heads)
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
    num_head_batches=st.integers(1, 3000),
    num_ctas=st.integers(1, 132),
    l2_heads=st.integers(1, 3000),
)
def test_heads_that_fill_rounds_stay_near_the_l2(num_blocks, num_head_batches, num_ctas, l2_heads):
    l2_heads = min(l2_heads, num_head_batches)
    heads = load().heads_that_fill_rounds(num_blocks, num_head_batches, num_ctas, l2_heads)
    assert l2_heads // 2 < heads <= min(2 * l2_heads, num_head_batches)
