"""FP8 in plain PyTorch: the quantizer, and the forward in the arithmetic of the Hopper kernel, on any device.

The forward is a simulation, for CPUs and for tests: it rounds where the kernel rounds (P to e4m3) and sums in float32
as the kernel does, in the kernel's order of key blocks. It is not fast. Products of e4m3 values are exact in float32,
also where the matrix product is allowed TF32.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fa3.fp8_format import E4M3, E4M3_MAX, FP8_SCALE_ROWS, num_scales, transpose_v, untranspose_v
from fa3.mask import Mask

# P is computed times 2^8, the largest power of 2 that e4m3 holds, so that it lies in [0, 256]. Below 2^-9 e4m3 holds
# nothing but 0. In [0, 1] that is a score of 6.2 below the largest one, and thousands of such keys may outweigh it.
_P_SHIFT = 8.0
# Scores per tile, of all batches and heads.
_TILE_ELEMENTS = 1 << 21


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of x (b, s, h, d), at the dtype of x: row i is turned by the angles of cos[i] and sin[i].

    cos, sin (>= s, rotary_dim / 2). The pairs that turn are neighbors (interleaved) or the two halves of the first
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
    window_left: int,
    window_right: int,
    attention_chunk: int,
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
    num_key_blocks = num_scales(seqlen_k)
    mask = Mask(window_left, window_right, attention_chunk).simplified(seqlen_q, seqlen_k)

    if v_transposed:
        v = untranspose_v(v, seqlen_k)
    # Heads are (hk, group) in what follows, a KV head (hk, 1).
    q = q.float().unflatten(2, (num_heads_kv, -1)).permute(0, 2, 3, 1, 4)  # (b, hk, group, sq, d)
    k, v = (x.float().transpose(1, 2).unsqueeze(2) for x in (k, v))  # (b, hk, 1, sk, d)
    q_descale = q_descale.unflatten(1, (num_heads_kv, -1)).expand(-1, -1, -1, num_scales(seqlen_q))
    q_descale = q_descale.repeat_interleave(FP8_SCALE_ROWS, -1)[..., :seqlen_q, None]  # (b, hk, group or 1, sq, 1)
    k_descale, v_descale = (
        x.expand(-1, -1, num_key_blocks)[:, :, None, None, None] for x in (k_descale, v_descale)
    )  # (b, hk, 1, 1, 1, num_key_blocks)
    score_scale = softmax_scale * math.log2(math.e)

    out_dtype = torch.float16 if out_fp16 else torch.bfloat16
    out = torch.empty((batch, seqlen_q, num_heads_q, head_dim), dtype=out_dtype, device=q.device)
    lse = torch.empty((batch, num_heads_q, seqlen_q), dtype=torch.float32, device=q.device)
    grouped_out = out.unflatten(2, (num_heads_kv, -1)).permute(0, 2, 3, 1, 4)
    grouped_lse = lse.unflatten(1, (num_heads_kv, -1)).unsqueeze(-1)  # (b, hk, group, sq, 1)

    tile_rows = max(1, _TILE_ELEMENTS // max(1, batch * num_heads_q * FP8_SCALE_ROWS))
    for begin in range(0, seqlen_q, tile_rows):
        end = min(begin + tile_rows, seqlen_q)
        row_max = torch.full_like(grouped_lse[..., begin:end, :], -math.inf)  # of the scaled scores, log2 units
        row_sum = torch.zeros_like(row_max)
        tile_out = torch.zeros_like(q[..., begin:end, :])
        first_key, end_key = mask.keys_of_tile((begin, end), seqlen_q, seqlen_k)
        for block in reversed(range(first_key // FP8_SCALE_ROWS, num_scales(end_key))):
            keys = slice(block * FP8_SCALE_ROWS, min((block + 1) * FP8_SCALE_ROWS, seqlen_k))
            scale = q_descale[..., begin:end, :] * k_descale[..., block] * score_scale
            scores = (q[..., begin:end, :] @ k[..., keys, :].mT) * scale
            hidden = mask.hidden((begin, end), (keys.start, keys.stop), seqlen_q, seqlen_k, q.device)
            if hidden is not None:
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
