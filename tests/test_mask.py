"""fa3.mask against the definition of each mask, for all small lengths and limits."""

from __future__ import annotations

import itertools

import pytest
import reference
import torch

from fa3.mask import Mask

LENGTHS = range(7)
MASKS = [Mask(*limits) for limits in itertools.product((-1, 0, 1, 2, 9), (-1, 0, 1, 2, 9), (0, 1, 2, 3, 7))]
CPU = torch.device("cpu")


def visible(mask: Mask, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    return reference.visible(seqlen_q, seqlen_k, window_size=(mask.left, mask.right), attention_chunk=mask.chunk)


@pytest.mark.parametrize("seqlen_q", LENGTHS)
@pytest.mark.parametrize("seqlen_k", LENGTHS)
def test_all_answers_agree_with_the_definition(seqlen_q, seqlen_k):
    for mask in MASKS:
        sees = visible(mask, seqlen_q, seqlen_k)
        assert mask.visible_pairs(seqlen_q, seqlen_k) == sees.sum(), mask
        rows_with_keys = sees.any(-1).nonzero().flatten().tolist()
        first = mask.first_query(seqlen_q, seqlen_k)
        assert rows_with_keys == list(range(first, seqlen_q)), mask
        for query, row in enumerate(sees):
            begin, end = mask.keys_of(query, seqlen_q, seqlen_k)
            assert row.nonzero().flatten().tolist() == list(range(begin, end)), (mask, query)


@pytest.mark.parametrize("seqlen_q", LENGTHS[1:])
@pytest.mark.parametrize("seqlen_k", LENGTHS[1:])
def test_tiles(seqlen_q, seqlen_k):
    """Of every tile of queries and keys: what is visited, and what is hidden there."""
    tiles = [[(i, j) for i in range(n) for j in range(i + 1, n + 1)] for n in (seqlen_q, seqlen_k)]
    for mask in MASKS[::3]:
        sees = visible(mask, seqlen_q, seqlen_k)
        for queries, keys in itertools.product(*tiles):
            begin, end = mask.keys_of_tile(queries, seqlen_q, seqlen_k)
            seen = sees[slice(*queries)].any(0).nonzero().flatten().tolist()
            assert set(seen) <= set(range(begin, end))
            expected = ~sees[slice(*queries), slice(*keys)]
            hidden = mask.hidden(queries, keys, seqlen_q, seqlen_k, CPU)
            if hidden is None:
                assert not expected.any()
            else:
                assert torch.equal(hidden, expected)
                assert expected.any()


@pytest.mark.parametrize("seqlen_q", LENGTHS[1:])
@pytest.mark.parametrize("seqlen_k", LENGTHS[1:])
def test_simplified(seqlen_q, seqlen_k):
    """The same keys, and no limit where none is hidden."""
    for mask in MASKS:
        sees = visible(mask, seqlen_q, seqlen_k)
        simplified = mask.simplified(seqlen_q, seqlen_k)
        assert torch.equal(visible(simplified, seqlen_q, seqlen_k), sees)
        assert (simplified == Mask()) == bool(sees.all()), mask


@pytest.mark.parametrize("lengths", [(100_003, 100_003), (5, 1_000_000), (131_072, 70_001)])
@pytest.mark.parametrize("mask", [Mask(right=0), Mask(1000, 0), Mask(7, 300), Mask(chunk=8192), Mask(5000, 0, 3000)])
def test_visible_pairs_of_long_sequences(mask, lengths):
    ranges = (mask.keys_of(query, *lengths) for query in range(lengths[0]))
    assert mask.visible_pairs(*lengths) == sum(max(0, end - begin) for begin, end in ranges)


def test_arguments():
    assert Mask.resolve(causal=False) == Mask(-1, -1, 0)
    assert Mask.resolve(True, (5, 7), 16) == Mask(5, 0, 16)
    assert Mask.resolve(False, (None, 0), None) == Mask(right=0)
