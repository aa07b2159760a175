"""What is measured: the grid of the FlashAttention papers, its inputs, its FLOP count and the truth to compare with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fa3.ops import visible_pairs

TOTAL_TOKENS = 16384  # batch * seqlen
HIDDEN_SIZE = 2048  # heads * head_dim
HEAD_DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FLOP_FORMULA = "forward 4 * batch * heads * visible (query, key) pairs * head_dim"


@dataclass(frozen=True)
class Case:
    """One cell of the grid: self-attention, as many query as key and value heads."""

    dtype: str
    head_dim: int
    causal: bool
    seqlen: int

    @property
    def batch(self) -> int:
        return max(1, TOTAL_TOKENS // self.seqlen)

    @property
    def heads(self) -> int:
        return max(1, HIDDEN_SIZE // self.head_dim)

    @property
    def flops(self) -> int:
        pairs = visible_pairs(self.seqlen, self.seqlen, self.causal)
        return forward_flops(self.batch, self.heads, pairs, self.head_dim, self.head_dim)

    def as_row(self) -> dict:
        """The fields of a results row that name the case."""
        return {
            "pass": "fwd",
            "dtype": self.dtype,
            "head_dim": self.head_dim,
            "causal": self.causal,
            "seqlen": self.seqlen,
            "batch": self.batch,
            "heads": self.heads,
            "heads_kv": self.heads,
        }

    def make_inputs(self, device: str = "cuda", seed: int = 0) -> list[torch.Tensor]:
        """q, k, v of shape (batch, seqlen, heads, head_dim), standard normal."""
        generator = torch.Generator(device).manual_seed(seed)
        shape = (self.batch, self.seqlen, self.heads, self.head_dim)
        return [torch.randn(shape, generator=generator, device=device, dtype=DTYPES[self.dtype]) for _ in range(3)]


def grid(dtype: str, head_dims=HEAD_DIMS, seqlens=SEQLENS, masks=(False, True)) -> list[Case]:
    return [Case(dtype, head_dim, causal, seqlen) for head_dim in head_dims for causal in masks for seqlen in seqlens]


def forward_flops(batch: int, heads: int, pairs: int, head_dim: int, head_dim_v: int) -> int:
    """A multiplication and an addition per pair and element: head_dim for Q K^T, head_dim_v for P V."""
    return 2 * batch * heads * pairs * (head_dim + head_dim_v)


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, chunk_bytes: int = 2**30
) -> torch.Tensor:
    """Attention in float64, in chunks of query rows whose scores fill chunk_bytes; heads and seqlens are equal."""
    q, k, v = (x.transpose(1, 2).double().contiguous() for x in (q, k, v))  # (batch, heads, seqlen, head_dim)
    batch, heads, seqlen, head_dim = q.shape
    chunk_rows = max(1, chunk_bytes // (8 * batch * heads * seqlen))
    rows = torch.arange(seqlen, device=q.device)
    out = torch.empty_like(v)
    for chunk in rows.split(chunk_rows):
        scores = q[:, :, chunk] @ k.transpose(2, 3) * head_dim**-0.5
        if causal:
            scores.masked_fill_(rows > chunk[:, None], float("-inf"))
        out[:, :, chunk] = scores.softmax(dim=-1) @ v
    return out.transpose(1, 2)


def worst_row_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest relative error, ||out - expected|| / ||expected||, of an output row (one query of one head)."""
    return ((out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()


def tolerance(dtype: str) -> float:
    """What worst_row_error may reach: rounding P and out costs a row about eps / 3, one wrong element far more."""
    return 2 * torch.finfo(DTYPES[dtype]).eps
