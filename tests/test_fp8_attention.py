"""flash_attn_fp8_func and validate_fp8."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from cases import Case, ids
from fp8_helpers import raises, random_rotary, relative_rmse, rotate_by_complex_numbers

import fa3
from fa3.portable.fp8 import rotate


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], **ids)
@pytest.mark.parametrize("head_dim", [64, 96, 40])
@pytest.mark.parametrize(
    "options", [{}, {"smooth_k": True}, {"block_size": None}, {"rotary_interleaved": True, "smooth_k": True}]
)
def test_fp8_attention(options, head_dim, dtype):
    """Near the exact attention, with its shape, dtype, scale and lse."""
    case = Case(batch=1, seqlen_q=260, seqlen_k=260, num_heads_q=4, head_dim=head_dim, causal=True)
    q, k, v = case.inputs(dtype, "cpu")
    k = k + torch.randn(1, 1, 2, head_dim).to(dtype)
    exact_q, exact_k = q.double(), k.double()
    if "rotary_interleaved" in options:
        options = options | {"rotary": random_rotary(260, 32)}
        exact_q, exact_k = (rotate_by_complex_numbers(x, *options["rotary"], True) for x in (q, k))
    out, lse = fa3.flash_attn_fp8_func(q, k, v, causal=True, return_lse=True, **options)
    truth, true_lse = reference.attention(exact_q, exact_k, v.double(), causal=True)
    assert (out.dtype, out.shape, out.is_contiguous()) == (dtype, q.shape, True)
    assert relative_rmse(out, truth) < 0.07
    assert (lse - true_lse).abs().max() < 0.25
    assert (lse - true_lse).mean().abs() < 0.01
    assert torch.equal(fa3.flash_attn_fp8_func(q, k, v, causal=True, **options), out)


def test_smoothing_of_k_leaves_softmax_and_helps_a_k_with_an_offset():
    q, k, v = Case(seqlen_q=200, seqlen_k=333, num_heads_q=6, head_dim=96).inputs(torch.float32, "cpu")
    k += 10 * torch.randn(2, 1, 2, 96)
    truth, true_lse = reference.attention(q.double(), k.double(), v.double())
    smooth, smooth_lse = fa3.flash_attn_fp8_func(q, k, v, smooth_k=True, return_lse=True)
    plain, plain_lse = fa3.flash_attn_fp8_func(q, k, v, return_lse=True)
    assert relative_rmse(smooth, truth) < 0.06 < 0.2 < relative_rmse(plain, truth)
    assert (smooth_lse - true_lse).abs().mean() < 0.03 < 0.15 < (plain_lse - true_lse).abs().mean()


def test_the_papers_recipe_helps_with_outliers():
    """Entries N(0, 1), one in a thousand N(0, 100): block scales and incoherent processing lower the error."""

    def with_outliers(*shape: int) -> torch.Tensor:
        return torch.randn(shape) + 10 * torch.randn(shape) * (torch.rand(shape) < 0.001)

    q, k, v = (with_outliers(1, 512, 2, 128) for _ in range(3))
    truth, _ = reference.attention(q.double(), k.double(), v.double())

    def error(**options) -> float:
        return relative_rmse(fa3.flash_attn_fp8_func(q, k, v, **options), truth)

    assert error() < 0.8 * error(incoherent=False) < 0.8 * error(incoherent=False, block_size=None)


@pytest.mark.parametrize("with_rotary", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], **ids)
def test_straight_through(dtype, with_rotary):
    """The forward is FP8 to the bit, the gradients are those of the 16-bit attention at the same tensors."""
    case = Case(seqlen_q=150, seqlen_k=150, num_heads_q=4, causal=True)
    rotary = random_rotary(150, 32) if with_rotary else None
    inputs = [x.requires_grad_() for x in case.inputs(dtype, "cpu")]
    options = {"causal": True, "smooth_k": True, "rotary": rotary, "return_lse": True}
    with torch.no_grad():
        expected_outputs = fa3.flash_attn_fp8_func(*inputs, **options)
    outputs = fa3.flash_attn_fp8_func(*inputs, **options, straight_through=True)
    for got, expected in zip(outputs, expected_outputs, strict=True):
        assert torch.equal(got, expected)

    def exact(q, k, v):
        if with_rotary:
            q, k = (rotate(x.float(), *rotary, False).to(dtype) for x in (q, k))
        return fa3.flash_attn_func(q, k, v, causal=True, return_lse=True)

    output_grads = case.output_grads(dtype, "cpu")
    expected_grads = torch.autograd.grad(exact(*inputs), inputs, output_grads)
    for got, expected in zip(torch.autograd.grad(outputs, inputs, output_grads), expected_grads, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected)

    out = fa3.flash_attn_fp8_func(*inputs, causal=True, straight_through=True)
    (dq,) = torch.autograd.grad(out.sum(), inputs[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives are not implemented"):
        dq.sum().backward()


def test_straight_through_keeps_only_the_inputs():
    inputs = [x.requires_grad_() for x in Case().inputs(torch.bfloat16, "cpu")]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.data_ptr()), lambda x: x):
        fa3.flash_attn_fp8_func(*inputs, straight_through=True)
    assert saved == [x.data_ptr() for x in inputs]


@pytest.mark.parametrize("name", ["return_lse", "straight_through"])
def test_flags_of_fp8_attention(name):
    q, k, v = Case().inputs(torch.bfloat16, "cpu")
    raises(TypeError, f"{name} must be a bool, got int", fa3.flash_attn_fp8_func, q=q, k=k, v=v, **{name: 1})


def test_validation_finds_the_heads_that_fp8_spoils():
    """Errors average out where values agree. In head 1 they cancel, and the errors remain."""
    q, k, v = Case(seqlen_q=300, seqlen_k=300, num_heads_q=4, num_heads_kv=4).inputs(torch.bfloat16, "cpu")
    v[:, :, [0, 2, 3]] += 3
    report = fa3.validate_fp8(q, k, v, threshold=0.01)
    assert report.rmse.shape == (4,)
    assert report.failing_heads == [1]
    assert report.rmse[1] == pytest.approx(
        relative_rmse(fa3.flash_attn_fp8_func(q, k, v)[:, :, 1], fa3.flash_attn_func(q, k, v)[:, :, 1].double()),
        rel=1e-3,
    )
    assert "1 of 4 heads above the threshold 0.01\n  head 1: " in str(report)
    assert fa3.validate_fp8(q, k, v, threshold=0.1).failing_heads == []


def test_validation_takes_the_options():
    q, k, v = Case(seqlen_q=140, seqlen_k=140, num_heads_q=4).inputs(torch.bfloat16, "cpu")
    q.requires_grad_()
    k += 20
    options = {"rotary": random_rotary(140, 32), "rotary_interleaved": True, "softmax_scale": 0.05, "causal": True}
    plain = fa3.validate_fp8(q, k, v, **options)
    smooth = fa3.validate_fp8(q, k, v, **options, smooth_k=True, block_size=None, incoherent=False)
    assert (smooth.rmse < 0.1).all()
    assert (smooth.rmse < plain.rmse).all()
    assert not smooth.rmse.requires_grad
    with pytest.raises(TypeError, match="straight_through"):
        fa3.validate_fp8(q, k, v, straight_through=True)


def test_validation_of_nan_and_of_nothing():
    q, k, v = Case(causal=True).inputs(torch.bfloat16, "cpu")
    v[0, 3, 1, 3] = math.nan
    assert fa3.validate_fp8(q, k, v, threshold=1.0).failing_heads == [1]
    empty = fa3.validate_fp8(*Case(seqlen_k=0).inputs(torch.bfloat16, "cpu"))
    assert empty.failing_heads == []
    assert (empty.rmse == 0).all()
