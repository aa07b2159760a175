"""FP8 in plain PyTorch: the quantiser, and the forward in the arithmetic of the Hopper kernel, on any device.

The forward is a simulation, for CPUs and for tests: it rounds where the kernel rounds (P to e4m3) and sums in float32
as the kernel does, in the kernel's order of key blocks. It is not fast. Products of e4m3 values are exact in float32,
also where the matrix product is allowed TF32.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = torch.finfo(E4M3).max
FP8_BLOCK = 128
"""Rows (queries or keys) of one scale, and keys of one step of the forward."""

# P is computed times 2^8, the largest power of 2 that e4m3 holds, so that it lies in [0, 256]. Below 2^-9 e4m3 holds
# nothing but 0. In [0, 1] that is a score of 6.2 below the largest one, and thousands of such keys may outweigh it.
_P_SHIFT = 8.0
# Scores per tile, of all batches and heads.
_TILE_ELEMENTS = 1 << 21


def num_scales(seqlen: int, block_size: int) -> int:
    """Scales per batch and head, for blocks of block_size rows; 0 is one block of all rows."""
    return -(-seqlen // block_size) if block_size else 1


def num_transposed_keys(seqlen: int) -> int:
    """The length of a line of transposed V: all keys, and zeros to the end of the last step of the forward."""
    return num_scales(seqlen, FP8_BLOCK) * FP8_BLOCK


def transpose_v(v: Tensor) -> Tensor:
    """V (b, s, h, d), e4m3, as the product P V reads it: (b, h, d, n), n = num_transposed_keys(s), a line per channel.

    A line has its keys, of every 16, in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15, in which P lies in the
    registers of an accumulator (csrc/fwd/fp8_layout.h): key 8 i + 2 j + l has position 4 j + 2 i + l. Keys from s on
    are zeros.
    """
    seqlen = v.shape[1]
    lines = F.pad(v.view(torch.uint8).permute(0, 2, 3, 1), (0, num_transposed_keys(seqlen) - seqlen))  # (b, h, d, n)
    return lines.unflatten(-1, (-1, 2, 4, 2)).transpose(-3, -2).flatten(-4).view(E4M3)


def untranspose_v(v: Tensor, seqlen: int) -> Tensor:
    """Transposed V (b, h, d, n) -> (b, s, h, d), contiguous: the inverse of transpose_v."""
    lines = v.view(torch.uint8).unflatten(-1, (-1, 4, 2, 2)).transpose(-3, -2).flatten(-4)
    return lines[..., :seqlen].permute(0, 3, 1, 2).contiguous().view(E4M3)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of x (b, s, h, d), at the dtype of x: row i is turned by the angles of cos[i] and sin[i].

    cos, sin (>= s, rotary_dim / 2). The pairs that turn are neighbours (interleaved) or the two halves of the first
    rotary_dim channels; the other channels stay. -sin turns back.
    """
    num_pairs = cos.shape[1]
    cos, sin = (angles[: x.shape[1], None].to(x.dtype) for angles in (cos, sin))  # (s, 1, rotary_dim / 2)
    turning, rest = x[..., : 2 * num_pairs], x[..., 2 * num_pairs :]
    pair_dim = -1 if interleaved else -2
    first, second = turning.unflatten(-1, (num_pairs, 2) if interleaved else (2, num_pairs)).unbind(pair_dim)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=pair_dim)
    return torch.cat((turned.flatten(-2), rest), dim=-1)


def hadamard(x: Tensor) -> Tensor:
    """The orthonormal Hadamard transform of the last dimension, a power of 2, in Sylvester order: its own inverse."""
    size = x.shape[-1]
    step = 1
    while step < size:
        first, second = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        step *= 2
    return x * size**-0.5


def quantize(
    x: Tensor,
    signs: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    rotary_interleaved: bool,
    smooth: bool,
    block_size: int,
    transpose: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotary, then the mean over rows off, then signs and Hadamard, then e4m3; all in float32.

    x (b, s, h, d) -> x8 (b, s, h, n) e4m3, descale (b, h, num_blocks) float32, mean (b, h, d) float32, all contiguous.
    n is the length of signs, to which x is padded with zeros, or d without them. num_blocks is
    ceil(s / block_size), or 1 for block_size 0. descale is the largest magnitude of the block over 448 (1 where that is
    0), not counting NaN, which stays NaN; an infinity makes its block NaN. Without `smooth`, mean is empty, shape (0,).

    `transpose` is for V, which is only rounded: x8 is then what transpose_v makes of it, (b, h, d,
    num_transposed_keys(s)), and signs, cos and sin must be None and smooth False.
    """
    seqlen = x.shape[1]
    values = x.float()
    if cos is not None:
        values = rotate(values, cos, sin, rotary_interleaved)
    mean = values.new_empty(0)
    if smooth:
        mean = values.sum(1) / max(seqlen, 1)
        values = values - mean[:, None]
    if signs is not None:
        values = hadamard(F.pad(values, (0, signs.shape[0] - values.shape[3])) * signs)

    rows = block_size or max(seqlen, 1)
    whole_blocks = (0, 0, 0, 0, 0, num_scales(seqlen, block_size) * rows - seqlen)  # zeros after the last row
    blocks = F.pad(values, whole_blocks).unflatten(1, (-1, rows))  # (b, num_blocks, rows, h, n)
    amax = blocks.abs().nan_to_num(0.0, posinf=math.inf).amax((2, 4), keepdim=True)
    # At least the smallest normal float32, so that its reciprocal, with which the kernel multiplies, is finite.
    descale = torch.where(amax > 0, (amax / E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny), 1.0)
    x8 = (blocks / descale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).flatten(1, 2)[:, :seqlen]
    if transpose:
        x8 = transpose_v(x8)
    # clone and not contiguous(), which leaves odd strides on dimensions of size 1.
    x8, descale = (y.clone(memory_format=torch.contiguous_format) for y in (x8, descale[:, :, 0, :, 0].transpose(1, 2)))
    return x8, descale, mean


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor,
    k_descale: Tensor,
    v_descale: Tensor,
    softmax_scale: float,
    causal: bool,
    out_fp16: bool,
    v_transposed: bool = False,
) -> tuple[Tensor, Tensor]:
    """q (b, sq, h, d), k and v (b, sk, hk, d), e4m3 -> contiguous out (b, sq, h, d), bfloat16 or float16, and lse
    (b, h, sq) of the scores that the scales give back.

    With v_transposed, v is (b, hk, d, num_transposed_keys(sk)), as from transpose_v.
    descales, float32, any strides: q (b, h or hk, ceil(sq / 128) or 1), k and v (b, hk, ceil(sk / 128) or 1).
    """
    batch, seqlen_q, num_heads_q, head_dim = q.shape
    seqlen_k, num_heads_kv = k.shape[1:3]
    num_key_blocks = num_scales(seqlen_k, FP8_BLOCK)
    offset = seqlen_k - seqlen_q  # causal, aligned to the bottom right: query i sees keys j <= i + offset

    if v_transposed:
        v = untranspose_v(v, seqlen_k)
    # Heads are (hk, group) in what follows, a KV head (hk, 1).
    q = q.float().unflatten(2, (num_heads_kv, -1)).permute(0, 2, 3, 1, 4)  # (b, hk, group, sq, d)
    k, v = (x.float().transpose(1, 2).unsqueeze(2) for x in (k, v))  # (b, hk, 1, sk, d)
    q_descale = q_descale.unflatten(1, (num_heads_kv, -1)).expand(-1, -1, -1, num_scales(seqlen_q, FP8_BLOCK))
    q_descale = q_descale.repeat_interleave(FP8_BLOCK, -1)[..., :seqlen_q, None]  # (b, hk, group or 1, sq, 1)
    k_descale, v_descale = (
        x.expand(-1, -1, num_key_blocks)[:, :, None, None, None] for x in (k_descale, v_descale)
    )  # (b, hk, 1, 1, 1, num_key_blocks)
    score_scale = softmax_scale * math.log2(math.e)

    out_dtype = torch.float16 if out_fp16 else torch.bfloat16
    out = torch.empty((batch, seqlen_q, num_heads_q, head_dim), dtype=out_dtype, device=q.device)
    lse = torch.empty((batch, num_heads_q, seqlen_q), dtype=torch.float32, device=q.device)
    grouped_out = out.unflatten(2, (num_heads_kv, -1)).permute(0, 2, 3, 1, 4)
    grouped_lse = lse.unflatten(1, (num_heads_kv, -1)).unsqueeze(-1)  # (b, hk, group, sq, 1)

    tile_rows = max(1, _TILE_ELEMENTS // max(1, batch * num_heads_q * FP8_BLOCK))
    for begin in range(0, seqlen_q, tile_rows):
        end = min(begin + tile_rows, seqlen_q)
        row_max = torch.full_like(grouped_lse[..., begin:end, :], -math.inf)  # of the scaled scores, log2 units
        row_sum = torch.zeros_like(row_max)
        tile_out = torch.zeros_like(q[..., begin:end, :])
        visible_keys = min(seqlen_k, end + offset) if causal else seqlen_k
        for first_key in reversed(range(0, visible_keys, FP8_BLOCK)):
            keys, block = slice(first_key, min(first_key + FP8_BLOCK, seqlen_k)), first_key // FP8_BLOCK
            scale = q_descale[..., begin:end, :] * k_descale[..., block] * score_scale
            scores = (q[..., begin:end, :] @ k[..., keys, :].mT) * scale
            if causal:
                last_key = torch.arange(begin, end, device=q.device)[:, None] + offset
                hidden = torch.arange(keys.start, keys.stop, device=q.device) > last_key
                scores.masked_fill_(hidden, -math.inf)
            new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
            # A row that has met only scores of -inf: -inf minus -inf would be NaN.
            subtracted = new_max.masked_fill(new_max == -math.inf, 0.0)
            p = torch.exp2(scores - subtracted + _P_SHIFT)
            correction = torch.exp2(row_max - subtracted)
            # The sums are of what V is multiplied with, and not of P before: equal values of V come back as they are.
            p8 = p.to(E4M3).float()
            row_sum = row_sum * correction + p8.sum(-1, keepdim=True)
            tile_out = tile_out * correction + v_descale[..., block] * (p8 @ v[..., keys, :])
            row_max = new_max
        has_no_key = row_sum == 0
        grouped_out[..., begin:end, :] = (tile_out / row_sum).masked_fill(has_no_key, 0.0)
        grouped_lse[..., begin:end, :] = (row_max - _P_SHIFT) * math.log(2) + row_sum.log()
    return out, lse
