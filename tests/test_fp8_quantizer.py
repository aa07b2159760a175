"""The quantizer in plain PyTorch against float64, and quantize_fp8."""

from __future__ import annotations

import math

import pytest
import torch
from cases import Case, ids
from fp8_helpers import (
    SIGNS,
    amax_of_blocks,
    check_rounding,
    dequantize,
    quantize_op,
    random_rotary,
    rotate_by_complex_numbers,
    sylvester,
)
from torch._subclasses.fake_tensor import FakeTensorMode

import fa3
from fa3 import fp8
from fa3.fp8_format import E4M3, FP8_SCALE_ROWS
from fa3.portable.fp8 import hadamard, rotate


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], **ids)
@pytest.mark.parametrize("block_size", [FP8_SCALE_ROWS, 0])
@pytest.mark.parametrize("seqlen", [1, 127, 128, 129, 300])
def test_quantizer(seqlen, block_size, dtype):
    x = (torch.randn(2, seqlen, 3, 48) * 10 ** torch.randn(2, 1, 3, 1)).to(dtype)
    x8, descale, mean = quantize_op(x, block_size=block_size)
    assert (x8.dtype, x8.shape, x8.is_contiguous()) == (E4M3, x.shape, True)
    assert (descale.dtype, descale.is_contiguous(), mean.shape) == (torch.float32, True, (0,))
    torch.testing.assert_close(descale, amax_of_blocks(x.float(), block_size) / 448)
    assert torch.equal(amax_of_blocks(x8.float(), block_size), torch.full_like(descale, 448.0))
    check_rounding(x8, descale, x.double())


@pytest.mark.parametrize(("head_dim", "size"), [(64, 64), (96, 128), (128, 128), (8, 64), (192, 256)])
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 8])
def test_quantizer_transforms(head_dim, size, smooth, rotary_dim):
    """Rotary, then smoothing, then signs and Hadamard: against matrices in float64."""
    x = torch.randn(2, 150, 3, head_dim).bfloat16() + 2
    signs = SIGNS[size]
    rotary = (None, None) if rotary_dim is None else random_rotary(150, rotary_dim)
    x8, descale, mean = quantize_op(x, signs, rotary, smooth=smooth)
    expected = x.double()
    if rotary_dim is not None:
        expected = rotate_by_complex_numbers(expected, *rotary, interleaved=False)
    expected_mean = expected.mean(1)
    if smooth:
        torch.testing.assert_close(mean.double(), expected_mean, rtol=1e-5, atol=1e-6)
        expected = expected - expected_mean[:, None]
    padded = torch.nn.functional.pad(expected, (0, size - head_dim))
    expected = (padded * signs) @ sylvester(size) * size**-0.5
    torch.testing.assert_close(descale.double(), amax_of_blocks(expected, FP8_SCALE_ROWS) / 448, rtol=1e-5, atol=0)
    check_rounding(x8, descale, expected)


def test_quantizer_strides():
    x = torch.randn(2, 3, 200, 64).bfloat16()
    expected = quantize_op(x.transpose(1, 2).contiguous())
    for got, y in zip(quantize_op(x.transpose(1, 2)), expected, strict=True):
        assert torch.equal(got.float(), y.float())
        assert got.is_contiguous()


def test_zeros_nan_and_infinity():
    """Blocks of zeros have scale 1; NaN stays where it is and counts nowhere; an infinity takes its block along."""
    x = torch.randn(1, 4 * 128, 1, 16)
    expected, expected_scale, _ = quantize_op(x)
    x[:, :128] = 0.0
    x[0, 130, 0, 3], x[0, 140, 0, :] = math.nan, math.nan
    x[0, 300, 0, 5] = -math.inf
    x8, descale, _ = quantize_op(x)
    assert torch.equal(descale[..., 1:4:2], expected_scale[..., 1:4:2])
    assert (descale[0, 0, 0], descale[0, 0, 2]) == (1.0, math.inf)
    assert (x8[:, :128].float() == 0).all()
    is_nan = x8[:, 128:256].isnan()
    assert torch.equal(is_nan, x[:, 128:256].isnan())
    assert torch.equal(x8[:, 128:256].float()[~is_nan], expected[:, 128:256].float()[~is_nan])
    assert dequantize(x8, descale)[:, 256:384].isnan().all()
    assert torch.equal(x8[:, 384:].float(), expected[:, 384:].float())


@pytest.mark.parametrize(("value", "rounded"), [(1e-44, 0.0), (9e-43, 0.0), (2.0**-124, 4.0)])
def test_tiny_values(value, rounded):
    """The scale of a block is at least the smallest normal float32, whose reciprocal is finite."""
    x8, descale, _ = quantize_op(torch.full((1, 1, 1, 16), value))
    assert descale.item() == 2.0**-126
    assert (x8.float() == rounded).all()


@pytest.mark.parametrize("size", [1, 2, 64, 128, 256])
def test_hadamard(size):
    """Sylvester's matrix over sqrt(n), its own inverse; with signs before it orthonormal as well."""
    matrix = hadamard(torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(matrix, sylvester(size) * size**-0.5)
    x = torch.randn(3, size, dtype=torch.float64)
    torch.testing.assert_close(hadamard(hadamard(x)), x)
    if size in SIGNS:
        signed = SIGNS[size].double().diag() @ matrix
        torch.testing.assert_close(signed @ signed.T, torch.eye(size, dtype=torch.float64))
        torch.testing.assert_close(hadamard(hadamard(x * SIGNS[size])) * SIGNS[size], x)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 16, 64])
def test_rotary(rotary_dim, interleaved):
    x, rotary = torch.randn(2, 50, 3, 64, dtype=torch.float64), random_rotary(50, rotary_dim)
    turned = rotate(x, *rotary, interleaved)
    torch.testing.assert_close(turned, rotate_by_complex_numbers(x, *rotary, interleaved))
    cos, sin = rotary
    torch.testing.assert_close(rotate(turned, cos, -sin, interleaved), x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("block_size", [FP8_SCALE_ROWS, None])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_incoherent_processing_leaves_the_scores(head_dim, block_size):
    """q k^T is the same within the rounding to e4m3, and v is padded but not transformed."""
    case = Case(seqlen_q=150, seqlen_k=150, num_heads_q=4, head_dim=head_dim)
    q, k, v = case.inputs(torch.bfloat16, "cpu")
    x = fa3.quantize_fp8(q, k, v, block_size=block_size, seed=3)
    padded = 64 if head_dim == 64 else 128
    blocks = 2 if block_size else 1
    assert [y.shape[3] for y in (x.q, x.k, x.v)] == [padded] * 3
    assert (x.q_descale.shape, x.k_descale.shape, x.v_descale.shape) == ((2, 4, blocks), (2, 2, blocks), (2, 2, blocks))
    q8, k8, v8 = (dequantize(x[i], x[i + 3]) for i in range(3))
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(2, 2))
    scores8 = torch.einsum("bihd,bjhd->bhij", q8, k8.repeat_interleave(2, 2))
    # Each of the head_dim products carries two roundings of 0.026 on average.
    assert (scores8 - scores).square().mean().sqrt() < 1.5 * 0.026 * 2**0.5 * head_dim**0.5
    check_rounding(x.v[..., :head_dim], x.v_descale, v.double())
    assert (v8[..., head_dim:] == 0).all()


def test_transform_says_what_a_cache_needs():
    """A later key, transformed by hand as Fp8Transform says, is what quantize_fp8 makes of it."""
    q, k, v = Case(seqlen_q=40, seqlen_k=40, head_dim=96).inputs(torch.bfloat16, "cpu")
    k += 3
    rotary = random_rotary(40, 32)
    x = fa3.quantize_fp8(q, k, v, rotary=rotary, smooth_k=True, seed=11)
    transform = x.transform
    assert (transform.seed, transform.incoherent, transform.head_dim) == (11, True, 96)
    assert transform.k_mean.shape == (2, 2, 96)
    rotated = rotate(k[:, 5:6].float(), *(y[5:] for y in rotary), False)
    padded = torch.nn.functional.pad(rotated - transform.k_mean[:, None], (0, 32))
    key = hadamard(padded * transform.signs())
    check_rounding(x.k[:, 5:6], x.k_descale, key.double())


def test_signs_are_reproducible():
    signs = fa3.quantize_fp8(*Case(head_dim=128).inputs(torch.bfloat16, "cpu"), seed=5).transform.signs()
    bits = torch.randint(2, (128,), generator=torch.Generator().manual_seed(5))
    assert torch.equal(signs, 1.0 - 2.0 * bits)
    assert not torch.equal(signs, fp8._signs(6, 128, torch.device("cpu")))
    plain = fa3.quantize_fp8(*Case().inputs(torch.bfloat16, "cpu"), incoherent=False).transform
    assert (plain.signs(), plain.k_mean) == (None, None)


def test_signs_outlive_the_mode_in_which_they_were_made():
    """They are kept: a fake tensor, or one of inference mode, would reach calls outside of it."""
    fp8._cached_signs.cache_clear()
    with FakeTensorMode(), torch.inference_mode():
        signs = fp8._signs(0, 64, torch.device("cpu"))
    assert type(signs) is torch.Tensor
    assert not signs.is_inference()
