"""The FP8 forward in plain PyTorch, a simulation of the kernel's arithmetic, against float64."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from cases import WINDOWED, ids
from fp8_helpers import Fp8Case, all_dequantized, check_forward

import fa3
from fa3 import ops
from fa3.fp8_format import E4M3, FP8_SCALE_ROWS
from fa3.portable import fp8 as simulation

FORWARD_CASES = [
    Fp8Case(seqlen_q=300, seqlen_k=300, num_heads_q=6, num_heads_kv=2),
    Fp8Case(seqlen_q=300, seqlen_k=300, num_heads_q=6, num_heads_kv=2, causal=True, q_scales_of="KV heads"),
    Fp8Case(seqlen_q=300, seqlen_k=300, num_heads_q=6, num_heads_kv=2, causal=True, scales="heads"),
    Fp8Case(seqlen_q=130, seqlen_k=513, num_heads_q=4, num_heads_kv=1, causal=True, q_scales_of="KV heads"),
    Fp8Case(seqlen_q=130, seqlen_k=513, head_dim=128, scales="heads"),
    Fp8Case(seqlen_q=513, seqlen_k=130, head_dim=16, causal=True),
    Fp8Case(seqlen_q=257, seqlen_k=257, head_dim=256, causal=True),
    Fp8Case(seqlen_q=128, seqlen_k=256, head_dim=96, causal=True),
    Fp8Case(seqlen_q=127, seqlen_k=129, head_dim=48, num_heads_q=7, num_heads_kv=1),
    Fp8Case(seqlen_q=1, seqlen_k=1000, num_heads_q=8, num_heads_kv=2, causal=True),
    Fp8Case(batch=1, seqlen_q=1, seqlen_k=1, num_heads_q=1, num_heads_kv=1, causal=True, layout="odd_strides"),
    Fp8Case(seqlen_q=200, seqlen_k=200, num_heads_q=6, layout="fused_qkv"),
    Fp8Case(seqlen_q=200, seqlen_k=200, num_heads_q=6, layout="expanded_kv"),
    Fp8Case(seqlen_q=200, seqlen_k=200, layout="transposed", causal=True),
]


@pytest.mark.parametrize("case", FORWARD_CASES, **ids)
def test_forward(case):
    tensors, scales = case.fp8_inputs()
    out, lse = fa3.flash_attn_func(*tensors, 0.1, case.causal, **scales, return_lse=True)
    assert (out.dtype, out.shape, out.is_contiguous()) == (torch.bfloat16, case.q_shape, True)
    assert (lse.dtype, lse.is_contiguous()) == (torch.float32, True)
    check_forward(out, lse, *all_dequantized(tensors, scales), 0.1, case.causal)


@pytest.mark.parametrize("case", WINDOWED, **ids)
def test_windows_and_chunks(case):
    """By the op, which offers more masks than the public function."""
    case = Fp8Case(**vars(case))
    tensors, scales = case.fp8_inputs()
    out, lse = ops.portable_fwd_fp8(*tensors, *scales.values(), 0.1, *case.op_mask, False)
    check_forward(out, lse, *all_dequantized(tensors, scales), 0.1, **case.mask_options)


@pytest.mark.parametrize("causal", [False, True])
def test_tiles_of_queries_do_not_change_results(causal, monkeypatch):
    case = Fp8Case(seqlen_q=300, seqlen_k=500, num_heads_q=6, causal=causal)
    tensors, scales = case.fp8_inputs()
    expected = fa3.flash_attn_func(*tensors, 0.1, causal, **scales, return_lse=True)
    monkeypatch.setattr(simulation, "_TILE_ELEMENTS", 77 * case.batch * case.num_heads_q * FP8_SCALE_ROWS)
    for got, x in zip(fa3.flash_attn_func(*tensors, 0.1, causal, **scales, return_lse=True), expected, strict=True):
        torch.testing.assert_close(got, x, rtol=1e-2, atol=1e-5)


def test_softmax_scale_and_out_dtype():
    case = FORWARD_CASES[0]
    tensors, scales = case.fp8_inputs()
    scales = {name: x / 10 for name, x in scales.items()}
    half, lse = fa3.flash_attn_func(*tensors, **scales, out_dtype=torch.float16, return_lse=True)
    assert half.dtype == torch.float16
    check_forward(half, lse, *all_dequantized(tensors, scales), case.head_dim**-0.5, False)
    out = fa3.flash_attn_func(*tensors, **scales, out_dtype=torch.bfloat16)
    torch.testing.assert_close(out.float(), half.float(), rtol=2**-8, atol=1e-6)


def test_scales_without_blocks_and_with_any_strides():
    """(batch, num_heads_kv) is one scale per KV head, a stride of 0 one for all, and neither changes a bit."""
    case = Fp8Case(seqlen_q=300, seqlen_k=300, num_heads_q=6, scales="heads", q_scales_of="KV heads")
    tensors, scales = case.fp8_inputs()
    expected = fa3.flash_attn_func(*tensors, **scales)
    assert torch.equal(fa3.flash_attn_func(*tensors, **{name: x[..., 0] for name, x in scales.items()}), expected)
    transposed = {name: x[..., 0].T.contiguous().T for name, x in scales.items()}
    assert torch.equal(fa3.flash_attn_func(*tensors, **transposed), expected)

    same = {name: torch.tensor(0.5 + i) for i, name in enumerate(scales)}
    expected = fa3.flash_attn_func(*tensors, **{name: x.repeat(2, 2, 3) for name, x in same.items()})
    for shape in ((2, 2), (2, 2, 1), (2, 2, 3)):
        got = fa3.flash_attn_func(*tensors, **{name: x.expand(shape) for name, x in same.items()})
        assert torch.equal(got, expected), shape


@pytest.mark.parametrize("scales", ["blocks", "heads"])
@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k", "causal"),
    [(0, 5, 5, False), (2, 0, 5, True), (2, 5, 0, False), (2, 0, 0, False), (2, 300, 5, True)],
)
def test_rows_without_keys_and_empty_tensors(batch, seqlen_q, seqlen_k, causal, scales):
    case = Fp8Case(batch, seqlen_q, seqlen_k, num_heads_q=4, causal=causal, scales=scales)
    tensors, scales = case.fp8_inputs()
    out, lse = fa3.flash_attn_func(*tensors, **scales, causal=causal, return_lse=True)
    assert (out.shape, lse.shape) == (case.q_shape, (batch, 4, seqlen_q))
    without_keys = seqlen_q if seqlen_k == 0 else max(0, seqlen_q - seqlen_k) * causal
    assert (out[:, :without_keys] == 0).all()
    assert (lse[:, :, :without_keys] == -math.inf).all()
    assert out.isfinite().all()
    assert lse[:, :, without_keys:].isfinite().all()


def test_one_key_among_thousands_of_low_scores():
    """4096 keys 7 below the best outweigh it by 3.7: each of their weights, 2^-10.1, is less than e4m3 holds."""
    q, k, v = torch.ones(1, 1, 1, 16), torch.zeros(1, 4097, 1, 16), torch.zeros(1, 4097, 1, 16)
    k[:, 0], v[:, 0] = 7 / 16, 1.0
    v[:, 1:] = -1.0
    tensors = [x.to(E4M3) for x in (q, k, v)]
    one = torch.ones(1, 1)
    out, lse = fa3.flash_attn_func(*tensors, 1.0, q_descale=one, k_descale=one, v_descale=one, return_lse=True)
    check_forward(out, lse, *(x.double() for x in tensors), 1.0, False)
    others = 4096 * math.exp(-7)
    assert out[0, 0, 0, 0].item() == pytest.approx((1 - others) / (1 + others), abs=0.03)


@pytest.mark.parametrize("head_dim", [16, 128, 256])
def test_p_is_rounded(head_dim):
    """Four keys with scores of 0, -7 / 64, -16.625 and -18.5 in log2 units, and v that tells their P apart."""
    q, k = torch.zeros(1, 1, 1, head_dim), torch.zeros(1, 4, 1, head_dim)
    v = torch.eye(head_dim)[:4, None].expand(1, 4, 1, head_dim)
    q[..., :2] = 1.0
    k[0, :, 0, 0] = torch.tensor([0.0, -7 / 64, -16.0, -18.0])
    k[0, :, 0, 1] = torch.tensor([0.0, 0.0, -0.625, -0.5])
    one = torch.ones(1, 1)
    scales = {"q_descale": one, "k_descale": one, "v_descale": one}
    tensors = [x.to(E4M3) for x in (q, k, v)]
    out, lse = fa3.flash_attn_func(*tensors, math.log(2), **scales, out_dtype=torch.float16, return_lse=True)
    p = torch.tensor([256.0, 240.0, 2**-9, 0.0])  # 237.3 and 1.3 x 2^-9 before rounding, and 0.35 x 2^-9
    row_sum = p.sum().item()
    torch.testing.assert_close(out[0, 0, 0, :4].float(), p / row_sum, rtol=2**-11, atol=2**-25)
    assert lse.item() == pytest.approx(math.log(row_sum / 256), rel=1e-6)


def test_equal_scores_of_131072_keys_return_v():
    """No sum drifts: P is 256 for all keys."""
    q, k = torch.randn(1, 1, 1, 16).to(E4M3), torch.randn(1, 1, 1, 16).to(E4M3).expand(1, 131072, 1, 16)
    v = torch.randn(1, 1, 1, 16).to(E4M3)
    scale = {"q_descale": torch.full((1, 1), 0.3), "k_descale": torch.full((1, 1), 0.7)}
    v_descale = torch.full((1, 1), 1.1)
    out = fa3.flash_attn_func(q, k, v.expand(k.shape), **scale, v_descale=v_descale)
    torch.testing.assert_close(out, (v.float() * 1.1).bfloat16(), rtol=2**-8, atol=0)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_equal_values_come_back(head_dim):
    """Of any scores: the weights are divided by their sum as it is. Here nearly all round alike."""
    q, k = torch.ones(1, 1, 1, head_dim), torch.zeros(1, 1000, 1, head_dim)
    # P is 243 of 256, which e4m3 rounds to 240: the last block, which is the first step, has the maximum.
    k[0, :-1, 0, 0] = -5 / 64
    v = torch.full(k.shape, 1.5)
    one = torch.ones(1, 1)
    tensors = [x.to(E4M3) for x in (q, k, v)]
    out = fa3.flash_attn_func(*tensors, math.log(2), q_descale=one, k_descale=one, v_descale=one)
    assert (out == 1.5).all()


def test_very_low_score_keeps_its_weight():
    q = torch.full((1, 1, 1, 16), 256.0).to(E4M3)
    v, scale = torch.randn(q.shape).to(E4M3), torch.full((1, 1), 2.0)
    out, lse = fa3.flash_attn_func(
        q, (-q.float()).to(E4M3), v, 1.0, q_descale=scale, k_descale=scale, v_descale=scale, return_lse=True
    )
    assert torch.equal(out, 2 * v.bfloat16())
    assert lse.item() == pytest.approx(-4 * 16 * 256**2, rel=1e-6)


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_propagates(where):
    """As in plain attention; but NaN in v reaches, as 0 x NaN, queries that causal hides it from."""
    case = Fp8Case(seqlen_q=300, seqlen_k=300, causal=True)
    tensors, scales = case.fp8_inputs()
    {"q": tensors[0], "k": tensors[1], "v": tensors[2]}[where].view(torch.uint8)[0, 150, 1, 3] = 0x7F
    out, lse = fa3.flash_attn_func(*tensors, causal=True, **scales, return_lse=True)
    expected, expected_lse = reference.attention(*all_dequantized(tensors, scales), causal=True)
    assert torch.equal(lse.isnan(), expected_lse.isnan())
    if where == "v":
        assert out[0, 150:, 1, 3].isnan().all()
        out[0, :, 1, 3] = expected[0, :, 1, 3] = 0.0
    assert torch.equal(out.isnan(), expected.isnan())
