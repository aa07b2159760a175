"""Transposed V: its layout, the quantizer that writes it and the attention that reads it."""

from __future__ import annotations

import math
import re

import pytest
import torch
from cases import Case, ids
from fp8_helpers import Fp8Case, equal_bits, fp8_arguments, raises, transposed_by_its_definition

import fa3
from fa3 import ops
from fa3.fp8_format import E4M3, FP8_SCALE_ROWS, transpose_v, untranspose_v


def test_order_of_transposed_keys():
    keys = torch.arange(32, dtype=torch.uint8)[None, :, None, None].view(E4M3)
    line = transpose_v(keys).view(torch.uint8).flatten().tolist()
    order = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    assert line == order + [16 + key for key in order] + [0] * 96


@pytest.mark.parametrize("seqlen", [0, 1, 16, 100, 128, 300])
def test_transposition_of_v(seqlen):
    v = torch.randint(256, (2, seqlen, 3, 16), dtype=torch.uint8).view(E4M3)
    transposed = transpose_v(v)
    assert equal_bits(transposed, transposed_by_its_definition(v))
    assert equal_bits(untranspose_v(transposed, seqlen), v)


@pytest.mark.parametrize("block_size", [FP8_SCALE_ROWS, None])
@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("seqlen", [0, 1, 16, 100, 128, 300])
def test_quantizer_writes_v_transposed(seqlen, head_dim, block_size):
    """The same values and scales as row-major, to the bit, and zeros after the last key."""
    inputs = Case(seqlen_q=5, seqlen_k=seqlen, num_heads_q=4, head_dim=head_dim).inputs(torch.bfloat16, "cpu")
    row_major = fa3.quantize_fp8(*inputs, block_size=block_size)
    x = fa3.quantize_fp8(*inputs, block_size=block_size, v_transposed=True)
    padded = 64 if head_dim == 64 else 128
    assert (x.v.dtype, x.v.shape, x.v.is_contiguous()) == (E4M3, (2, 2, padded, math.ceil(seqlen / 128) * 128), True)
    assert equal_bits(x.v, transposed_by_its_definition(row_major.v))
    assert (x.v.float().count_nonzero(-1) <= seqlen).all()
    for name in ("q", "k", "q_descale", "k_descale", "v_descale"):
        assert equal_bits(getattr(x, name), getattr(row_major, name)), name


def sliced(v: torch.Tensor) -> torch.Tensor:
    """Every second head of a tensor with NaN elsewhere."""
    batch, num_heads, head_dim, keys = v.shape
    around = torch.full((batch, 2 * num_heads, head_dim + 1, keys + 16), 0x7F, dtype=torch.uint8).view(E4M3)
    inner = around[:, ::2, :head_dim, :keys]
    return inner.copy_(v)


TRANSPOSED_V_CASES = [
    *(Fp8Case(seqlen_q=130, seqlen_k=200, head_dim=d, causal=c) for d in (16, 64, 96, 128, 256) for c in (False, True)),
    Fp8Case(seqlen_q=200, seqlen_k=300, num_heads_q=6, causal=True, q_scales_of="KV heads"),
    Fp8Case(seqlen_q=300, seqlen_k=130, num_heads_q=4, num_heads_kv=1, causal=True, scales="heads"),
    Fp8Case(seqlen_q=1, seqlen_k=1, num_heads_q=4),
    Fp8Case(seqlen_q=5, seqlen_k=0),
    Fp8Case(batch=0, seqlen_q=5, seqlen_k=5),
]


@pytest.mark.parametrize("case", TRANSPOSED_V_CASES, **ids)
def test_attention_with_v_transposed(case):
    """The bits of row-major V, whatever the strides."""
    (q, k, v), scales = case.fp8_inputs()
    options = {"causal": case.causal, "return_lse": True, **scales}
    expected = fa3.flash_attn_func(q, k, v, **options)
    vt = transpose_v(v)
    for strided in (vt, sliced(vt), vt.transpose(1, 2).contiguous().transpose(1, 2)):
        for got, x in zip(fa3.flash_attn_func(q, k, strided, **options, v_transposed=True), expected, strict=True):
            assert torch.equal(got, x)
    one_head = fa3.flash_attn_func(q, k, v[:, :, :1].contiguous().expand(v.shape), **options)
    expanded = vt[:, :1].contiguous().expand(vt.shape)
    for got, x in zip(fa3.flash_attn_func(q, k, expanded, **options, v_transposed=True), one_head, strict=True):
        assert torch.equal(got, x)


@pytest.mark.parametrize(("incoherent", "head_dim"), [(True, 40), (True, 128), (False, 48)])
def test_fp8_attention_transposes_v(incoherent, head_dim, monkeypatch):
    """And that does not change a bit."""
    q, k, v = Case(seqlen_k=200, num_heads_q=4, head_dim=head_dim, causal=True).inputs(torch.bfloat16, "cpu")
    forward, ways = ops.portable_fwd_fp8, []

    def recorded(*arguments):
        ways.append(arguments[-1])
        return forward(*arguments)

    monkeypatch.setattr(ops, "portable_fwd_fp8", recorded)
    out = fa3.flash_attn_fp8_func(q, k, v, causal=True, incoherent=incoherent)
    x = fa3.quantize_fp8(q, k, v, incoherent=incoherent)
    scales = {"q_descale": x.q_descale, "k_descale": x.k_descale, "v_descale": x.v_descale}
    in_rows = fa3.flash_attn_func(x.q, x.k, x.v, head_dim**-0.5, True, **scales)
    assert torch.equal(in_rows[..., :head_dim], out)
    assert ways == [True, False]


@pytest.mark.parametrize("function", [fa3.flash_attn_func, fa3.explain])
@pytest.mark.parametrize(
    ("kind", "message", "shape"),
    [
        (
            ValueError,
            "v must have 4 dimensions (batch, num_heads_kv, head_dim, keys), got shape (2, 16, 384)",
            (2, 16, 384),
        ),
        (ValueError, "v.shape[0] (batch) must equal q.shape[0] = 2, got 1", (1, 2, 16, 384)),
        (
            ValueError,
            "v.shape[3] (keys) must equal ceil(300 / 128) * 128 = 384, got 300; fa3.quantize_fp8(..., v_tr",
            (2, 2, 16, 300),
        ),
        (ValueError, "v.shape[3] (keys) must equal ceil(300 / 128) * 128 = 384, got 16; ", (2, 300, 2, 16)),
        (ValueError, "v.shape[1] (num_heads_kv) must equal k.shape[2] = 2, got 4", (2, 4, 16, 384)),
        (
            NotImplementedError,
            "v.shape[2] (head_dim_v) must equal q.shape[3] = 16, got 8; zero-pad v and slice the output",
            (2, 2, 8, 384),
        ),
        (NotImplementedError, "v.shape[2] (head_dim_v) must equal q.shape[3] = 16, got 32", (2, 2, 32, 384)),
    ],
)
def test_shapes_of_transposed_v(function, kind, message, shape):
    arguments = fp8_arguments(v=torch.zeros(shape).to(E4M3), v_transposed=True)
    if function is fa3.explain:
        arguments = {name: arguments[name] for name in ("q", "k", "v", "v_transposed")}
    with pytest.raises(kind, match="^" + re.escape(f"flash_attn_func: {message}")) as caught:
        function(**arguments)
    assert type(caught.value) is kind


def test_strides_of_transposed_v():
    v = torch.zeros(2, 2, 384, 16).to(E4M3).mT
    message = "v must have a contiguous last dimension (stride 1), got stride 16; use v.contiguous()"
    raises(ValueError, message, **fp8_arguments(v=v, v_transposed=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_v_transposed_is_for_fp8(dtype):
    others = dict(zip("qkv", Case().inputs(dtype, "cpu"), strict=True))
    raises(ValueError, f"v_transposed must be False for {dtype} inputs, got True", **others, v_transposed=True)


def test_v_transposed_is_a_bool():
    raises(TypeError, "v_transposed must be a bool, got int", **fp8_arguments(v_transposed=1))
