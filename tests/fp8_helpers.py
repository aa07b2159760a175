"""What the FP8 tests share: cases, scales, the bounds of rounding, and the steps of the recipe by their definitions."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import pytest
import reference
import torch
from cases import Case

import fa3
from fa3 import fp8, ops
from fa3.fp8_format import E4M3, FP8_SCALE_ROWS

SIGNS = {size: fp8._signs(7, size, torch.device("cpu")) for size in (64, 128, 256)}


@dataclass(frozen=True)
class Fp8Case(Case):
    """A call with FP8 inputs: each scale is for a block of 128 rows or for a head, q's for query or for KV heads."""

    scales: str = "blocks"
    q_scales_of: str = "query heads"

    @property
    def name(self) -> str:
        return f"{super().name}-{self.scales}-{self.q_scales_of.replace(' ', '-')}"

    def fp8_inputs(self) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """e4m3 q, k, v, and scales that differ everywhere by factors up to 100."""
        tensors = [x.to(E4M3) for x in self.inputs(torch.float32, "cpu")]
        q_heads = self.num_heads_q if self.q_scales_of == "query heads" else self.num_heads_kv
        sizes = {
            "q_descale": (q_heads, self.seqlen_q),
            "k_descale": (self.num_heads_kv, self.seqlen_k),
            "v_descale": (self.num_heads_kv, self.seqlen_k),
        }
        scales = {}
        for name, (heads, seqlen) in sizes.items():
            blocks = math.ceil(seqlen / FP8_SCALE_ROWS) if self.scales == "blocks" else 1
            scales[name] = 10 ** (2 * torch.rand(self.batch, heads, blocks) - 1)
        return tensors, scales


def dequantize(x: torch.Tensor, descale: torch.Tensor) -> torch.Tensor:
    """The float64 values that x (b, s, h, d) and its scales, (b, h or a divisor of it, blocks), mean."""
    seqlen, num_heads = x.shape[1:3]
    descale = descale.double().repeat_interleave(num_heads // descale.shape[1], 1)
    per_row = descale.repeat_interleave(FP8_SCALE_ROWS if descale.shape[2] > 1 else seqlen, 2)[:, :, :seqlen]
    return x.double() * per_row.transpose(1, 2)[..., None]


def all_dequantized(tensors: list[torch.Tensor], scales: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [dequantize(x, descale) for x, descale in zip(tensors, scales.values(), strict=True)]


def check_forward(out: torch.Tensor, lse: torch.Tensor, q, k, v, softmax_scale: float, causal: bool, **mask) -> None:
    """Within what rounding P to e4m3, and out, can cost at most; and on average what it should.

    q, k and v are exact. e4m3 has 3 fraction bits: P has a relative error up to 2^-4, and below 2^-14 of the largest
    (its subnormals are those below 2^-6, and P is scaled by 2^8) an absolute one up to 2^-18. So have P's sums, which
    divide out and make lse.
    """
    options = {"softmax_scale": softmax_scale, "causal": causal, **mask}
    truth, true_lse = reference.attention(q, k, v, **options)
    lse_rounding = -math.log(1 - 2**-4 - 2**-18 * k.shape[1])
    torch.testing.assert_close(lse.double(), true_lse, rtol=2e-6, atol=2e-5 + lse_rounding)
    magnitude, _ = reference.attention(q, k, v.abs(), **options)
    group_size = q.shape[2] // k.shape[2]
    all_v = v.abs().sum(1, keepdim=True).repeat_interleave(group_size, 2)
    error = (out.double() - truth).abs()
    rounding = torch.finfo(out.dtype).eps * truth.abs()
    at_most = 2**-4 * magnitude + 2**-18 * all_v
    at_most = (at_most + (2**-4 + 2**-18 * k.shape[1]) * truth.abs()) / (1 - 2**-4)
    assert (error <= at_most + rounding).all()
    # sum of p^2 v^2, from the attention at twice the scale; rounding p costs 0.026 p on average.
    squares, twice_lse = reference.attention(q, k, v.square(), **(options | {"softmax_scale": 2 * softmax_scale}))
    squares *= (twice_lse - 2 * true_lse).nan_to_num(-math.inf).exp().transpose(1, 2)[..., None]
    expected = 0.026 * squares.sqrt() + 2**-18 * all_v + rounding
    assert error.square().mean().sqrt() <= 1.3 * expected.square().mean().sqrt()


def transposed_by_its_definition(v: torch.Tensor) -> torch.Tensor:
    """The layout that the kernel reads, one position after the other."""
    batch, seqlen, num_heads, head_dim = v.shape
    lines = torch.zeros(batch, num_heads, head_dim, 128 * math.ceil(seqlen / 128), dtype=torch.uint8)
    for position in range(lines.shape[3]):
        p = position % 16
        key = position - p + 8 * (p % 4 // 2) + 2 * (p // 4) + p % 2
        if key < seqlen:
            lines[..., position] = v.view(torch.uint8)[:, key]
    return lines.view(E4M3)


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def fp8_arguments(**changes) -> dict[str, torch.Tensor]:
    """q (2, 200, 4, 16), k and v (2, 300, 2, 16), and one scale per block."""
    tensors, scales = Fp8Case(2, 200, 300, num_heads_q=4, head_dim=16).fp8_inputs()
    return dict(zip("qkv", tensors, strict=True)) | scales | changes


def raises(kind: type[Exception], message: str, function=fa3.flash_attn_func, **arguments) -> None:
    with pytest.raises(kind, match="^" + re.escape(f"{function.__name__}: {message}")) as caught:
        function(**arguments)
    assert type(caught.value) is kind


def quantize_op(
    x: torch.Tensor, signs=None, rotary=(None, None), interleaved=False, smooth=False, block_size=FP8_SCALE_ROWS
):
    return ops.portable_quantize_fp8(x, signs, *rotary, interleaved, smooth, block_size)


def check_rounding(x8: torch.Tensor, descale: torch.Tensor, truth: torch.Tensor) -> None:
    """x8 is the e4m3 nearest to the truth over its scale, which float32 may have moved a little."""
    scales = dequantize(torch.ones_like(truth), descale)
    bound = 2**-4 * truth.abs() + 2**-10 * scales + 1e-6 * truth.abs().max()
    assert ((dequantize(x8, descale) - truth).abs() <= bound).all()


def amax_of_blocks(x: torch.Tensor, block_size: int) -> torch.Tensor:
    """(b, h, blocks), by a loop."""
    block_size = block_size or x.shape[1]
    return torch.stack([x[:, i : i + block_size].abs().amax((1, 3)) for i in range(0, x.shape[1], block_size)], dim=-1)


def sylvester(size: int) -> torch.Tensor:
    """The Hadamard matrix by its definition, float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def random_rotary(seqlen: int, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = 2 * math.pi * torch.rand(seqlen + 3, rotary_dim // 2)
    return angles.cos(), angles.sin()


def rotate_by_complex_numbers(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    turn = torch.complex(cos.double(), sin.double())[: x.shape[1]]
    out = x.double().clone()
    for pair in range(cos.shape[1]):
        i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + cos.shape[1])
        turned = torch.complex(x[..., i].double(), x[..., j].double()) * turn[:, pair, None]
        out[..., i], out[..., j] = turned.real, turned.imag
    return out


def relative_rmse(x: torch.Tensor, expected: torch.Tensor) -> float:
    return ((x.double() - expected).square().mean() / expected.square().mean()).sqrt().item()
