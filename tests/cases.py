"""What CPU and GPU tests share: the call under test, and its cases of sizes, masks and memory layouts."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import reference
import torch

import fa3

# Masks as the ops take them: window_left, window_right, attention_chunk.
FULL, CAUSAL = (-1, -1, 0), (-1, 0, 0)
HALF_DTYPES = (torch.bfloat16, torch.float16)
LENGTHS = (1, 63, 64, 65, 127, 128, 129, 300, 1023)
HEAD_DIMS = (8, 40, 64, 72, 96, 128, 136, 192, 256)
HEADS = ((2, 2), (6, 2), (4, 1), (7, 1), (16, 2))  # groups of 1, 3, 4, 7, 8
LAYOUTS = ("contiguous", "transposed", "fused_qkv", "expanded_kv", "odd_strides", "unaligned")


@dataclass(frozen=True)
class Case:
    """One call of flash_attn_func."""

    batch: int = 2
    seqlen_q: int = 129
    seqlen_k: int = 129
    num_heads_q: int = 2
    num_heads_kv: int = 2
    head_dim: int = 64
    causal: bool = False
    layout: str = "contiguous"
    window_size: tuple[int, int] = (-1, -1)
    attention_chunk: int = 0

    @property
    def mask_options(self) -> dict:
        """The mask as flash_attn_func and the reference take it."""
        return {"causal": self.causal, "window_size": self.window_size, "attention_chunk": self.attention_chunk}

    @property
    def op_mask(self) -> tuple[int, int, int]:
        """The mask as the ops take it: window_left, window_right, attention_chunk."""
        left, right = self.window_size
        return left, 0 if self.causal else right, self.attention_chunk

    @property
    def name(self) -> str:
        """The id of the test, such as b2-sq129-sk300-h4-hk1-d64-causal."""
        sizes = f"b{self.batch}-sq{self.seqlen_q}-sk{self.seqlen_k}-h{self.num_heads_q}-hk{self.num_heads_kv}"
        mask = "causal" if self.causal else "full"
        if self.window_size != (-1, -1):
            mask += "-window{}_{}".format(*self.window_size)
        if self.attention_chunk:
            mask += f"-chunk{self.attention_chunk}"
        return f"{sizes}-d{self.head_dim}-{mask}" + (f"-{self.layout}" if self.layout != "contiguous" else "")

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.seqlen_q, self.num_heads_q, self.head_dim)

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.seqlen_k, self.num_heads_kv, self.head_dim)

    def inputs(self, dtype: torch.dtype, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normal q, k, v in this layout. Memory around and between their elements holds NaN."""
        q = torch.randn(self.q_shape, device=device).to(dtype)
        k, v = (torch.randn(self.kv_shape, device=device).to(dtype) for _ in range(2))
        if self.layout == "transposed":
            return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        if self.layout == "fused_qkv":
            return torch.cat([q, k, v], dim=2).split([self.num_heads_q, self.num_heads_kv, self.num_heads_kv], dim=2)
        if self.layout == "expanded_kv":  # one KV head in memory
            return q, *(x[:, :, :1].expand(self.kv_shape) for x in (k, v))
        if self.layout == "odd_strides":
            return tuple(_with_odd_strides(x) for x in (q, k, v))
        if self.layout == "unaligned":
            return tuple(_unaligned(x) for x in (q, k, v))
        return q, k, v

    def output_grads(self, dtype: torch.dtype, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """Normal dout, and dlse which is 0 where lse is -inf."""
        dout = torch.randn(self.q_shape, device=device).to(dtype)
        dlse = torch.randn(self.batch, self.num_heads_q, self.seqlen_q, device=device)
        has_key = reference.visible(self.seqlen_q, self.seqlen_k, **self.mask_options, device=device).any(-1)
        dlse[:, :, ~has_key] = 0.0
        return dout, dlse


ids = {"ids": lambda x: x.name if isinstance(x, Case) else str(x).removeprefix("torch.")}


def fa3_with_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> tuple[torch.Tensor, torch.Tensor]:
    return fa3.flash_attn_func(q, k, v, return_lse=True, **options)


def _with_odd_strides(x: torch.Tensor) -> torch.Tensor:
    """Strides that address nothing, and so mean nothing, on the dimensions of size 1."""
    strides = [7 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, strides)


def _unaligned(x: torch.Tensor) -> torch.Tensor:
    """Base and strides that are no multiple of 16 bytes, with NaN between the rows."""
    buffer = torch.full((*x.shape[:3], x.shape[3] + 3), math.nan, dtype=x.dtype, device=x.device)
    return buffer[..., 1:-2].copy_(x)


def _with_both_masks(cases: list[Case]) -> list[Case]:
    return [replace(case, causal=causal) for case in cases for causal in (False, True)]


def _lengths(seqlen_q: int, seqlen_k: int) -> Case:
    return Case(batch=2 if max(seqlen_q, seqlen_k) < 500 else 1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads_q=4)


SQUARE = _with_both_masks([_lengths(n, n) for n in LENGTHS])

# seqlen_q below and above seqlen_k (above with causal: rows without keys), primes, one query over many keys.
RECTANGULAR = _with_both_masks(
    [
        _lengths(sq, sk)
        for sq, sk in (
            (2, 5),
            (5, 2),
            (1, 1023),
            (1023, 1),
            (63, 65),
            (65, 63),
            (127, 128),
            (128, 127),
            (128, 1024),
            (1024, 128),
            (113, 211),
            (509, 257),
            (64, 129),
            (300, 65),
        )
    ]
)

SIZES = _with_both_masks(
    [
        Case(seqlen_q=113, seqlen_k=141, head_dim=d, num_heads_q=h, num_heads_kv=hk)
        for d in HEAD_DIMS
        for h, hk in HEADS[:2]
    ]
    + [Case(seqlen_q=141, seqlen_k=141, num_heads_q=h, num_heads_kv=hk) for h, hk in HEADS]
    + [Case(batch=5, seqlen_q=33, seqlen_k=33, num_heads_q=71, num_heads_kv=1, head_dim=16)]
)

EMPTY = _with_both_masks(
    [
        Case(batch=0),
        Case(seqlen_q=0),
        Case(seqlen_k=0, num_heads_q=4),
        Case(seqlen_q=0, seqlen_k=0),
        Case(batch=0, seqlen_q=0, seqlen_k=0),
    ]
)

STRIDED = _with_both_masks(
    [Case(num_heads_q=6, layout=layout) for layout in LAYOUTS[1:4]]
    + [Case(seqlen_q=65, seqlen_k=130, num_heads_q=4, layout=layout) for layout in ("transposed", "expanded_kv")]
    + [Case(batch=1, seqlen_k=200, num_heads_q=4, num_heads_kv=1, layout="odd_strides")]
    + [Case(batch=1, seqlen_q=1, num_heads_q=1, num_heads_kv=1, layout="odd_strides")]
    + [Case(num_heads_q=6, head_dim=d, layout="unaligned") for d in (64, 72)]
)

CASES = tuple(SQUARE + RECTANGULAR + SIZES + EMPTY + STRIDED)

# Windows and chunks, alone and together, at lengths around theirs; rows without keys where seqlen_q > seqlen_k.
WINDOWED = [
    Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads_q=4, causal=causal, window_size=window, attention_chunk=chunk)
    for seqlen_q, seqlen_k in ((129, 129), (65, 200), (200, 65), (1, 100), (5, 0))
    for causal, window, chunk in (
        (False, (0, 0), 0),
        (False, (17, 5), 0),
        (False, (-1, 30), 0),
        (False, (64, -1), 0),
        (True, (40, -1), 0),
        (False, (-1, -1), 48),
        (True, (-1, -1), 64),
        (True, (20, -1), 33),
        (False, (1000, 1000), 1000),
    )
]


def draw(rng: random.Random, max_seqlen: int = 400) -> Case:
    """A case at random; every combination that it gives is one that flash_attn_func must compute."""
    num_heads_kv = rng.choice([1, 1, 2, 3, 4])
    layout = rng.choice(LAYOUTS)
    seqlen_q = rng.choice([rng.randint(0, max_seqlen), rng.choice(LENGTHS[:-1])])
    seqlen_k = rng.choice([seqlen_q, rng.randint(0, max_seqlen), rng.choice(LENGTHS[:-1])])
    return Case(
        batch=rng.choice([1, 1, 2, 3]),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_q if layout == "fused_qkv" else seqlen_k,
        num_heads_q=num_heads_kv * rng.choice([1, 1, 2, 3, 4, 7, 8, 9]),
        num_heads_kv=num_heads_kv,
        head_dim=8 * rng.randint(1, 32),
        causal=rng.random() < 0.5,
        layout=layout,
    )
