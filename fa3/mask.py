"""The mask: which keys a query sees. No other place in Python knows what causal, windows and chunks mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

UNLIMITED = -1


@dataclass(frozen=True)
class Mask:
    """Limits of the keys that a query sees, as the ops take them.

    Masks are aligned to the bottom right: query i stands at position p = i + seqlen_k - seqlen_q among the keys. It
    sees the keys from p - left to p + right, both included. With a chunk it sees, of those, the keys j of its own
    chunk: j // chunk = p // chunk. The first key and the last key that a query sees never decrease from one query to
    the next, and queries that see no key come before all others.
    """

    left: int = UNLIMITED
    """Keys before p that are visible; -1: all of them."""
    right: int = UNLIMITED
    """Keys after p that are visible; -1: all of them; 0: the causal mask."""
    chunk: int = 0
    """Keys of a chunk; 0: no chunks."""

    @classmethod
    def resolve(
        cls,
        causal: bool,
        window_size: tuple[int | None, int | None] = (UNLIMITED, UNLIMITED),
        attention_chunk: int | None = 0,
    ) -> Mask:
        """The mask that a user's arguments mean. None is no limit; causal is right = 0, whatever window_size says."""
        left, right = (UNLIMITED if side is None else side for side in window_size)
        return cls(left, 0 if causal else right, attention_chunk or 0)

    def simplified(self, seqlen_q: int, seqlen_k: int) -> Mask:
        """The same mask without the limits that hide nothing at these lengths, so that results are bit-equal."""
        return Mask(
            left=UNLIMITED if self.left >= seqlen_k - 1 else self.left,  # the last query stands at the last key
            right=UNLIMITED if self.right >= seqlen_q - 1 else self.right,  # the first query, seqlen_q - 1 before it
            chunk=0 if self.chunk >= seqlen_k >= seqlen_q else self.chunk,
        )

    def keys_of(self, query: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """[begin, end) of the keys that this query sees; begin >= end where it sees none."""
        position = query + seqlen_k - seqlen_q
        begin, end = 0, seqlen_k
        if self.left != UNLIMITED:
            begin = max(begin, position - self.left)
        if self.right != UNLIMITED:
            end = min(end, position + self.right + 1)
        if self.chunk:
            chunk_begin = position // self.chunk * self.chunk
            begin, end = max(begin, chunk_begin), min(end, chunk_begin + self.chunk)
        return begin, end

    def first_query(self, seqlen_q: int, seqlen_k: int) -> int:
        """The first query that sees a key; seqlen_q where there is none."""
        if seqlen_k == 0:
            return seqlen_q
        if self.chunk:
            return max(0, seqlen_q - seqlen_k)
        return 0 if self.right == UNLIMITED else min(seqlen_q, max(0, seqlen_q - seqlen_k - self.right))

    def keys_of_tile(self, queries: tuple[int, int], seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """[begin, end) around all keys that some of these queries, [begin, end), see."""
        begin, _ = self.keys_of(queries[0], seqlen_q, seqlen_k)
        _, end = self.keys_of(queries[1] - 1, seqlen_q, seqlen_k)
        return begin, end

    def hidden(
        self, queries: tuple[int, int], keys: tuple[int, int], seqlen_q: int, seqlen_k: int, device: torch.device
    ) -> Tensor | None:
        """Which scores of a tile are hidden: bool (queries, keys), or None where none is."""
        last_begin, _ = self.keys_of(queries[1] - 1, seqlen_q, seqlen_k)
        _, first_end = self.keys_of(queries[0], seqlen_q, seqlen_k)
        if last_begin <= keys[0] and keys[1] <= first_end:
            return None
        offset = seqlen_k - seqlen_q
        positions = torch.arange(queries[0] + offset, queries[1] + offset, device=device)[:, None]
        key = torch.arange(*keys, device=device)
        hidden = torch.zeros((positions.shape[0], key.shape[0]), dtype=torch.bool, device=device)
        if self.left != UNLIMITED:
            hidden |= key < positions - self.left
        if self.right != UNLIMITED:
            hidden |= key > positions + self.right
        if self.chunk:
            hidden |= key // self.chunk != positions // self.chunk
        return hidden

    def visible_pairs(self, seqlen_q: int, seqlen_k: int) -> int:
        """How many (query, key) pairs the mask leaves, per batch and query head."""
        first_position = seqlen_k - seqlen_q
        if not self.chunk:
            return self._pairs_in((first_position, seqlen_k), (0, seqlen_k))
        chunks = ((begin, min(begin + self.chunk, seqlen_k)) for begin in range(0, seqlen_k, self.chunk))
        return sum(self._pairs_in((max(begin, first_position), end), (begin, end)) for begin, end in chunks)

    def _pairs_in(self, positions: tuple[int, int], keys: tuple[int, int]) -> int:
        """The pairs of these positions and keys, each [begin, end), that the window leaves."""
        num_positions, num_keys = max(0, positions[1] - positions[0]), keys[1] - keys[0]
        if num_positions == 0:
            return 0

        def pairs_up_to(distance: int) -> int:
            """Pairs with key - position <= distance: clamp(x, 0, num_keys) per query, x = first, ..., last."""
            first = positions[0] + distance + 1 - keys[0]
            last = first + num_positions - 1
            return _sum_clamped(last, num_keys) - _sum_clamped(first - 1, num_keys)

        pairs = num_positions * num_keys if self.right == UNLIMITED else pairs_up_to(self.right)
        return pairs if self.left == UNLIMITED else pairs - pairs_up_to(-self.left - 1)


def _sum_clamped(last: int, limit: int) -> int:
    """The sum of clamp(x, 0, limit) over all x <= last."""

    def sum_up_to(n: int) -> int:
        return max(n, 0) * (max(n, 0) + 1) // 2

    return sum_up_to(last) - sum_up_to(last - limit)
