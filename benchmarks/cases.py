"""What is measured: the grid of the FlashAttention papers, its inputs, its FLOP count and the truth to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fa3.mask import Mask

TOTAL_TOKENS = 16384  # batch * seqlen
HIDDEN_SIZE = 2048  # heads * head_dim
HEAD_DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FLOP_FORMULA = "forward 4 * batch * heads * visible (query, key) pairs * head_dim, backward 2.5 times that"
# The forward has 2 matrix products, the backward 5: S and dP again, dV, dQ, dK.
FLOPS_OVER_FORWARD = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}
# Gradients are compared in tiles of so many rows. A single row is no fair measure of them: the first queries under a
# causal mask see few keys, and their dq is a small difference of large numbers (of the very first one it is 0).
GRADIENT_ROWS = 64


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

    def flops(self, pass_name: str) -> int:
        pairs = Mask.resolve(self.causal).visible_pairs(self.seqlen, self.seqlen)
        forward = forward_flops(self.batch, self.heads, pairs, self.head_dim, self.head_dim)
        return round(forward * FLOPS_OVER_FORWARD[pass_name])

    def as_row(self, pass_name: str) -> dict:
        """The fields of a results row that name the case."""
        return {
            "pass": pass_name,
            "dtype": self.dtype,
            "head_dim": self.head_dim,
            "causal": self.causal,
            "seqlen": self.seqlen,
            "batch": self.batch,
            "heads": self.heads,
            "heads_kv": self.heads,
        }

    def make_inputs(self, device: str = "cuda", seed: int = 0) -> list[torch.Tensor]:
        """q, k, v and the gradient of out, each (batch, seqlen, heads, head_dim), standard normal."""
        generator = torch.Generator(device).manual_seed(seed)
        shape = (self.batch, self.seqlen, self.heads, self.head_dim)
        return [torch.randn(shape, generator=generator, device=device, dtype=DTYPES[self.dtype]) for _ in range(4)]


def grid(dtype: str, head_dims=HEAD_DIMS, seqlens=SEQLENS, masks=(False, True)) -> list[Case]:
    return [Case(dtype, head_dim, causal, seqlen) for head_dim in head_dims for causal in masks for seqlen in seqlens]


def forward_flops(batch: int, heads: int, pairs: int, head_dim: int, head_dim_v: int) -> int:
    """A multiplication and an addition per pair and element: head_dim for Q K^T, head_dim_v for P V."""
    return 2 * batch * heads * pairs * (head_dim + head_dim_v)


@torch.no_grad()
def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, chunk_bytes: int = 2**30
) -> torch.Tensor:
    """Attention in float64, in chunks of query rows whose scores fill chunk_bytes; heads and seqlens are equal."""
    q, k, v = (_heads_first(x) for x in (q, k, v))
    out = torch.empty_like(v)
    for chunk, p in _probabilities(q, k, causal, chunk_bytes):
        out[:, :, chunk] = p @ v
    return out.transpose(1, 2)


@torch.no_grad()
def reference_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, causal: bool, chunk_bytes: int = 2**30
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv in float64, in the same chunks."""
    q, k, v, dout = (_heads_first(x) for x in (q, k, v, dout))
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    scale = q.shape[3] ** -0.5
    for chunk, p in _probabilities(q, k, causal, chunk_bytes):
        dv += p.transpose(2, 3) @ dout[:, :, chunk]
        dp = dout[:, :, chunk] @ v.transpose(2, 3)
        ds = p * (dp - (p * dp).sum(dim=-1, keepdim=True)) * scale
        dq[:, :, chunk] = ds @ k
        dk += ds.transpose(2, 3) @ q[:, :, chunk]
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """(batch, heads, seqlen, head_dim) in float64."""
    return x.transpose(1, 2).double().contiguous()


def _probabilities(
    q: torch.Tensor, k: torch.Tensor, causal: bool, chunk_bytes: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Chunks of query rows and their softmax(q k^T)."""
    batch, heads, seqlen, head_dim = q.shape
    chunk_rows = max(1, chunk_bytes // (8 * batch * heads * seqlen))
    rows = torch.arange(seqlen, device=q.device)
    for chunk in rows.split(chunk_rows):
        scores = q[:, :, chunk] @ k.transpose(2, 3) * head_dim**-0.5
        if causal:
            scores.masked_fill_(rows > chunk[:, None], float("-inf"))
        yield chunk, scores.softmax(dim=-1)


@torch.no_grad()
def worst_error(x: torch.Tensor, expected: torch.Tensor, rows: int = 1) -> float:
    """Largest relative error, ||x - expected|| / ||expected||, of `rows` consecutive rows of one head."""
    squares = [y.square().sum(dim=-1) for y in (x.double() - expected, expected)]  # (batch, seqlen, heads)
    whole_tiles = (0, 0, 0, -x.shape[1] % rows)  # zeros after the last row
    error, size = (F.pad(y, whole_tiles).unflatten(1, (-1, rows)).sum(dim=2) for y in squares)
    return (error / size).max().sqrt().item()


def tolerance(dtype: str) -> float:
    """What worst_error may reach: rounding costs a row of out about eps / 3, a tile of a gradient less than eps / 2.

    (P and dS are rounded before they are multiplied, and the result is.) One wrong element of out costs far more, and
    so does one wrong row of a gradient.
    """
    return 2 * torch.finfo(DTYPES[dtype]).eps
