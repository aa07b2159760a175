"""FP8 in plain PyTorch: the forward and the quantiser against float64, the public functions, and what they refuse."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import pytest
import reference
import torch
from cases import Case, ids
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import fa3
from fa3 import fp8, fp8_portable, ops
from fa3.fp8_portable import E4M3, FP8_BLOCK, hadamard, rotate, transpose_v, untranspose_v

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
            blocks = math.ceil(seqlen / FP8_BLOCK) if self.scales == "blocks" else 1
            scales[name] = 10 ** (2 * torch.rand(self.batch, heads, blocks) - 1)
        return tensors, scales


def dequantise(x: torch.Tensor, descale: torch.Tensor) -> torch.Tensor:
    """The float64 values that x (b, s, h, d) and its scales, (b, h or a divisor of it, blocks), mean."""
    seqlen, num_heads = x.shape[1:3]
    descale = descale.double().repeat_interleave(num_heads // descale.shape[1], 1)
    per_row = descale.repeat_interleave(FP8_BLOCK if descale.shape[2] > 1 else seqlen, 2)[:, :, :seqlen]
    return x.double() * per_row.transpose(1, 2)[..., None]


def all_dequantised(tensors: list[torch.Tensor], scales: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [dequantise(x, descale) for x, descale in zip(tensors, scales.values(), strict=True)]


def check_forward(out: torch.Tensor, lse: torch.Tensor, q, k, v, softmax_scale: float, causal: bool) -> None:
    """Within what rounding P to e4m3, and out, can cost at most; and on average what it should.

    q, k and v are exact. e4m3 has 3 fraction bits: P has a relative error up to 2^-4, and below 2^-14 of the largest
    (its subnormals are those below 2^-6, and P is scaled by 2^8) an absolute one up to 2^-18. So have P's sums, which
    divide out and make lse.
    """
    options = {"softmax_scale": softmax_scale, "causal": causal}
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
    check_forward(out, lse, *all_dequantised(tensors, scales), 0.1, case.causal)


@pytest.mark.parametrize("causal", [False, True])
def test_tiles_of_queries_do_not_change_results(causal, monkeypatch):
    case = Fp8Case(seqlen_q=300, seqlen_k=500, num_heads_q=6, causal=causal)
    tensors, scales = case.fp8_inputs()
    expected = fa3.flash_attn_func(*tensors, 0.1, causal, **scales, return_lse=True)
    monkeypatch.setattr(fp8_portable, "_TILE_ELEMENTS", 77 * case.batch * case.num_heads_q * FP8_BLOCK)
    for got, x in zip(fa3.flash_attn_func(*tensors, 0.1, causal, **scales, return_lse=True), expected, strict=True):
        torch.testing.assert_close(got, x, rtol=1e-2, atol=1e-5)


def test_softmax_scale_and_out_dtype():
    case = FORWARD_CASES[0]
    tensors, scales = case.fp8_inputs()
    scales = {name: x / 10 for name, x in scales.items()}
    half, lse = fa3.flash_attn_func(*tensors, **scales, out_dtype=torch.float16, return_lse=True)
    assert half.dtype == torch.float16
    check_forward(half, lse, *all_dequantised(tensors, scales), case.head_dim**-0.5, False)
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
    expected, expected_lse = reference.attention(*all_dequantised(tensors, scales), causal=True)
    assert torch.equal(lse.isnan(), expected_lse.isnan())
    if where == "v":
        assert out[0, 150:, 1, 3].isnan().all()
        out[0, :, 1, 3] = expected[0, :, 1, 3] = 0.0
    assert torch.equal(out.isnan(), expected.isnan())


# --- transposed V


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


@pytest.mark.parametrize("block_size", [FP8_BLOCK, None])
@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("seqlen", [0, 1, 16, 100, 128, 300])
def test_quantiser_writes_v_transposed(seqlen, head_dim, block_size):
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


# --- what FP8 inputs are refused for


def fp8_arguments(**changes) -> dict[str, torch.Tensor]:
    """q (2, 200, 4, 16), k and v (2, 300, 2, 16), and one scale per block."""
    tensors, scales = Fp8Case(2, 200, 300, num_heads_q=4, head_dim=16).fp8_inputs()
    return dict(zip("qkv", tensors, strict=True)) | scales | changes


def raises(kind: type[Exception], message: str, function=fa3.flash_attn_func, **arguments) -> None:
    with pytest.raises(kind, match="^" + re.escape(f"{function.__name__}: {message}")) as caught:
        function(**arguments)
    assert type(caught.value) is kind


def test_the_arguments_before_a_change_are_right():
    fa3.flash_attn_func(**fp8_arguments())


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_scales_are_required_for_fp8_and_refused_for_others(name):
    message = f"{name} must be given for float8_e4m3fn inputs, got None; no scale is ever assumed"
    raises(ValueError, message, **fp8_arguments(**{name: None}))
    others = dict(zip("qkv", Case().inputs(torch.bfloat16, "cpu"), strict=True))
    message = f"{name} must be None for torch.bfloat16 inputs, got Tensor; scales belong to float8_e4m3fn"
    raises(ValueError, message, **others, **{name: torch.ones(2, 2)})


@pytest.mark.parametrize(
    ("name", "shapes", "heads", "blocks"),
    [
        ("q_descale", [(), (2,), (1, 2), (2, 1), (2, 3, 2), (2, 2, 3), (2, 2, 2, 1)], "2 or 4", "ceil(200 / 128) = 2"),
        ("k_descale", [(2,), (3, 2), (2, 4), (2, 4, 1), (2, 2, 2), (2, 2, 300)], "2", "ceil(300 / 128) = 3"),
        ("v_descale", [(2,), (3, 2), (2, 4), (2, 4, 1), (2, 2, 2), (2, 2, 300)], "2", "ceil(300 / 128) = 3"),
    ],
)
def test_shapes_of_scales(name, shapes, heads, blocks):
    for shape in shapes:
        message = (
            f"{name} must have shape (batch, heads) or (batch, heads, blocks), batch 2, heads {heads}, "
            f"blocks 1 or {blocks}, got {shape}"
        )
        raises(ValueError, message, **fp8_arguments(**{name: torch.ones(shape)}))


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_other_scales(name):
    raises(TypeError, f"{name} must be a torch.Tensor, got float", **fp8_arguments(**{name: 1.0}))
    half, meta = torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, 2, device="meta")
    raises(TypeError, f"{name}.dtype must be float32, got torch.bfloat16", **fp8_arguments(**{name: half}))
    raises(ValueError, f"{name}.device must equal q.device = cpu, got meta", **fp8_arguments(**{name: meta}))


@pytest.mark.parametrize("head_dim", [8, 24, 272])
def test_head_dim_of_fp8(head_dim):
    tensors, scales = Fp8Case(head_dim=head_dim).fp8_inputs()
    rule = "be a multiple of 16 from 16 to 256 for torch.float8_e4m3fn"
    message = f"q.shape[3] (head_dim) must {rule}, got {head_dim}"
    raises(ValueError, message, **dict(zip("qkv", tensors, strict=True)), **scales)


def test_out_dtype():
    message = "out_dtype must be None, bfloat16 or float16, got torch.float32"
    raises(ValueError, message, **fp8_arguments(out_dtype=torch.float32))
    others = dict(zip("qkv", Case().inputs(torch.bfloat16, "cpu"), strict=True))
    message = "out_dtype must be None for torch.bfloat16 inputs, got torch.float16"
    raises(ValueError, message, **others, out_dtype=torch.float16)


@pytest.mark.parametrize("name", ["q", "k", "v", "q_descale", "k_descale", "v_descale"])
def test_no_gradient(name):
    arguments = fp8_arguments()
    expected = fa3.flash_attn_func(**arguments)
    arguments[name] = arguments[name].clone().requires_grad_()
    raises(NotImplementedError, f"{name} must not require a gradient: FP8 is a forward without a backward", **arguments)
    with torch.no_grad():
        assert torch.equal(fa3.flash_attn_func(**arguments), expected)


@pytest.mark.skipif(fa3.is_available(), reason="the Hopper kernels can run here")
@pytest.mark.parametrize("function", [fa3.flash_attn_fp8_func, fa3.quantize_fp8])
def test_cuda_without_kernels(function):
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(x.shape, dtype=x.dtype, device="cuda:0") for x in Case().inputs(torch.bfloat16, "cpu"))
        raises(RuntimeError, fa3.unavailable_reason(), function, q=q, k=k, v=v)


@pytest.mark.parametrize("name", ["fwd_fp8", "quantize_fp8"])
def test_library_without_the_op(name, monkeypatch):
    """A library that was built without FP8: no other path is taken in silence."""
    monkeypatch.setattr("fa3.interface.choose_path", lambda device, function: "hopper")
    monkeypatch.setattr(ops, name, None)
    message = f"the compiled library has no op fa3::{name}; build the kernels again"
    if name == "fwd_fp8":
        raises(RuntimeError, message, **fp8_arguments())
    else:
        raises(
            RuntimeError,
            message,
            fa3.quantize_fp8,
            **dict(zip("qkv", Case().inputs(torch.bfloat16, "cpu"), strict=True)),
        )


# --- the quantiser


def quantise(x: torch.Tensor, signs=None, rotary=(None, None), interleaved=False, smooth=False, block_size=FP8_BLOCK):
    return ops.portable_quantize_fp8(x, signs, *rotary, interleaved, smooth, block_size)


def check_rounding(x8: torch.Tensor, descale: torch.Tensor, truth: torch.Tensor) -> None:
    """x8 is the e4m3 nearest to the truth over its scale, which float32 may have moved a little."""
    scales = dequantise(torch.ones_like(truth), descale)
    bound = 2**-4 * truth.abs() + 2**-10 * scales + 1e-6 * truth.abs().max()
    assert ((dequantise(x8, descale) - truth).abs() <= bound).all()


def amax_of_blocks(x: torch.Tensor, block_size: int) -> torch.Tensor:
    """(b, h, blocks), by a loop."""
    block_size = block_size or x.shape[1]
    return torch.stack([x[:, i : i + block_size].abs().amax((1, 3)) for i in range(0, x.shape[1], block_size)], dim=-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], **ids)
@pytest.mark.parametrize("block_size", [FP8_BLOCK, 0])
@pytest.mark.parametrize("seqlen", [1, 127, 128, 129, 300])
def test_quantiser(seqlen, block_size, dtype):
    x = (torch.randn(2, seqlen, 3, 48) * 10 ** torch.randn(2, 1, 3, 1)).to(dtype)
    x8, descale, mean = quantise(x, block_size=block_size)
    assert (x8.dtype, x8.shape, x8.is_contiguous()) == (E4M3, x.shape, True)
    assert (descale.dtype, descale.is_contiguous(), mean.shape) == (torch.float32, True, (0,))
    torch.testing.assert_close(descale, amax_of_blocks(x.float(), block_size) / 448)
    assert torch.equal(amax_of_blocks(x8.float(), block_size), torch.full_like(descale, 448.0))
    check_rounding(x8, descale, x.double())


@pytest.mark.parametrize(("head_dim", "size"), [(64, 64), (96, 128), (128, 128), (8, 64), (192, 256)])
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 8])
def test_quantiser_transforms(head_dim, size, smooth, rotary_dim):
    """Rotary, then smoothing, then signs and Hadamard: against matrices in float64."""
    x = torch.randn(2, 150, 3, head_dim).bfloat16() + 2
    signs = SIGNS[size]
    rotary = (None, None) if rotary_dim is None else random_rotary(150, rotary_dim)
    x8, descale, mean = quantise(x, signs, rotary, smooth=smooth)
    expected = x.double()
    if rotary_dim is not None:
        expected = rotate_by_complex_numbers(expected, *rotary, interleaved=False)
    expected_mean = expected.mean(1)
    if smooth:
        torch.testing.assert_close(mean.double(), expected_mean, rtol=1e-5, atol=1e-6)
        expected = expected - expected_mean[:, None]
    padded = torch.nn.functional.pad(expected, (0, size - head_dim))
    expected = (padded * signs) @ sylvester(size) * size**-0.5
    torch.testing.assert_close(descale.double(), amax_of_blocks(expected, FP8_BLOCK) / 448, rtol=1e-5, atol=0)
    check_rounding(x8, descale, expected)


def test_quantiser_strides():
    x = torch.randn(2, 3, 200, 64).bfloat16()
    expected = quantise(x.transpose(1, 2).contiguous())
    for got, y in zip(quantise(x.transpose(1, 2)), expected, strict=True):
        assert torch.equal(got.float(), y.float())
        assert got.is_contiguous()


def test_zeros_nan_and_infinity():
    """Blocks of zeros have scale 1; NaN stays where it is and counts nowhere; an infinity takes its block along."""
    x = torch.randn(1, 4 * 128, 1, 16)
    expected, expected_scale, _ = quantise(x)
    x[:, :128] = 0.0
    x[0, 130, 0, 3], x[0, 140, 0, :] = math.nan, math.nan
    x[0, 300, 0, 5] = -math.inf
    x8, descale, _ = quantise(x)
    assert torch.equal(descale[..., 1:4:2], expected_scale[..., 1:4:2])
    assert (descale[0, 0, 0], descale[0, 0, 2]) == (1.0, math.inf)
    assert (x8[:, :128].float() == 0).all()
    is_nan = x8[:, 128:256].isnan()
    assert torch.equal(is_nan, x[:, 128:256].isnan())
    assert torch.equal(x8[:, 128:256].float()[~is_nan], expected[:, 128:256].float()[~is_nan])
    assert dequantise(x8, descale)[:, 256:384].isnan().all()
    assert torch.equal(x8[:, 384:].float(), expected[:, 384:].float())


@pytest.mark.parametrize(("value", "rounded"), [(1e-44, 0.0), (9e-43, 0.0), (2.0**-124, 4.0)])
def test_tiny_values(value, rounded):
    """The scale of a block is at least the smallest normal float32, whose reciprocal is finite."""
    x8, descale, _ = quantise(torch.full((1, 1, 1, 16), value))
    assert descale.item() == 2.0**-126
    assert (x8.float() == rounded).all()


def sylvester(size: int) -> torch.Tensor:
    """The Hadamard matrix by its definition, float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


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


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 16, 64])
def test_rotary(rotary_dim, interleaved):
    x, rotary = torch.randn(2, 50, 3, 64, dtype=torch.float64), random_rotary(50, rotary_dim)
    turned = rotate(x, *rotary, interleaved)
    torch.testing.assert_close(turned, rotate_by_complex_numbers(x, *rotary, interleaved))
    cos, sin = rotary
    torch.testing.assert_close(rotate(turned, cos, -sin, interleaved), x, rtol=1e-6, atol=1e-6)


# --- quantize_fp8


@pytest.mark.parametrize("block_size", [FP8_BLOCK, None])
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
    q8, k8, v8 = (dequantise(x[i], x[i + 3]) for i in range(3))
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


@pytest.mark.parametrize(
    ("kind", "message", "options"),
    [
        (ValueError, "block_size must be 128 or None, got 64", {"block_size": 64}),
        (TypeError, "seed must be an int, got bool", {"seed": True}),
        (TypeError, "incoherent must be a bool, got NoneType", {"incoherent": None}),
        (TypeError, "rotary_interleaved must be a bool, got int", {"rotary_interleaved": 1}),
        (TypeError, "smooth_k must be a bool, got str", {"smooth_k": "yes"}),
        (TypeError, "rotary must be a pair of tensors (cos, sin) or None, got Tensor", {"rotary": torch.ones(2, 129)}),
        (TypeError, "rotary must be a pair of tensors (cos, sin) or None, got tuple", {"rotary": (1.0, 2.0)}),
        (
            ValueError,
            "rotary[0] (cos) must have shape (seqlen, rotary_dim / 2) with at least seqlen_q = 129 rows and rotary_dim "
            "at most head_dim = 64, the same for cos and sin, got (128, 4)",
            {"rotary": (torch.ones(128, 4), torch.ones(129, 4))},
        ),
        (ValueError, "rotary[1] (sin) must have shape", {"rotary": (torch.ones(129, 4), torch.ones(129, 5))}),
        (ValueError, "rotary[0] (cos) must have shape", {"rotary": (torch.ones(129, 33), torch.ones(129, 33))}),
        (
            TypeError,
            "rotary[1] (sin).dtype must equal that of cos, torch.float32, got torch.bfloat16",
            {"rotary": (torch.ones(129, 4), torch.ones(129, 4).bfloat16())},
        ),
        (
            TypeError,
            "rotary[0] (cos).dtype must be float32 or q.dtype = torch.bfloat16, got torch.float16",
            {"rotary": (torch.ones(129, 4).half(), torch.ones(129, 4).half())},
        ),
        (
            ValueError,
            "rotary[0] (cos).device must equal q.device = cpu, got meta",
            {"rotary": (torch.ones(129, 4, device="meta"), torch.ones(129, 4))},
        ),
    ],
)
@pytest.mark.parametrize("function", [fa3.quantize_fp8, fa3.flash_attn_fp8_func])
def test_options_of_the_quantiser(function, kind, message, options):
    raises(kind, message, function, **dict(zip("qkv", Case().inputs(torch.bfloat16, "cpu"), strict=True)), **options)


def test_layout_of_v_is_an_option_of_the_quantiser_alone():
    arguments = dict(zip("qkv", Case().inputs(torch.bfloat16, "cpu"), strict=True))
    raises(TypeError, "v_transposed must be a bool, got NoneType", fa3.quantize_fp8, **arguments, v_transposed=None)
    for function in (fa3.flash_attn_fp8_func, fa3.validate_fp8):
        with pytest.raises(TypeError, match="v_transposed"):
            function(**arguments, v_transposed=True)


@pytest.mark.parametrize("function", [fa3.quantize_fp8, fa3.flash_attn_fp8_func])
def test_inputs_of_the_quantiser(function):
    def inputs(dtype: torch.dtype = torch.bfloat16, **sizes) -> dict[str, torch.Tensor]:
        return dict(zip("qkv", Case(**sizes).inputs(dtype, "cpu"), strict=True))

    for dtype in (torch.float64, E4M3):
        message = f"q.dtype must be bfloat16 or float16 (in plain PyTorch float32 too), got {dtype}"
        raises(NotImplementedError, message, function, **inputs(dtype))
    raises(ValueError, "v.shape[1] (seqlen_k)", function, **(inputs() | {"v": torch.zeros(2, 5, 2, 64).bfloat16()}))
    message = "q.shape[3] (head_dim) must be a multiple of 16 where incoherent is False, got 40"
    raises(ValueError, message, function, **inputs(head_dim=40), incoherent=False)
    rotary = random_rotary(129, 16)
    message = "rotary must be None unless seqlen_k = seqlen_q = 129, got 200; "
    raises(NotImplementedError, message, function, **inputs(seqlen_k=200), rotary=rotary)
    for name in "qkv":
        needing = inputs()
        needing[name].requires_grad_()
        message = f"{name} must not require a gradient: FP8 is a forward without a backward, got requires_grad=True"
        raises(NotImplementedError, message, function, **needing)
        with torch.no_grad():
            function(**needing)


# --- flash_attn_fp8_func


def relative_rmse(x: torch.Tensor, expected: torch.Tensor) -> float:
    return ((x.double() - expected).square().mean() / expected.square().mean()).sqrt().item()


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


# --- validate_fp8


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


# --- torch.compile, opcheck, FLOP counts, explain


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
OPCHECK_CASES = (
    Fp8Case(seqlen_q=20, seqlen_k=130, num_heads_q=4, head_dim=16),
    Fp8Case(seqlen_q=130, seqlen_k=20, num_heads_q=4, head_dim=16, causal=True, scales="heads", q_scales_of="KV heads"),
    Fp8Case(seqlen_q=20, seqlen_k=0, num_heads_q=4, head_dim=16),
)


@pytest.mark.parametrize(("out_fp16", "v_transposed"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("case", OPCHECK_CASES, **ids)
def test_opcheck_forward(case, out_fp16, v_transposed):
    (q, k, v), scales = case.fp8_inputs()
    v = transpose_v(v) if v_transposed else v
    arguments = (q, k, v, *scales.values(), 0.25, case.causal, out_fp16, v_transposed)
    # Not test_schema, which multiplies the inputs: torch has no product of e4m3 tensors.
    torch.library.opcheck(ops.portable_fwd_fp8, arguments, test_utils=OPCHECKS)
    for real, fake in zip(ops.portable_fwd_fp8(*arguments), ops._fake_forward_fp8(*arguments), strict=True):
        assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())


@pytest.mark.parametrize("seqlen", [0, 1, 130])
@pytest.mark.parametrize("block_size", [FP8_BLOCK, 0])
@pytest.mark.parametrize(("everything", "transpose"), [(False, False), (True, False), (False, True)])
def test_opcheck_quantiser(seqlen, block_size, everything, transpose):
    x = torch.randn(2, 3, seqlen, 48).bfloat16().transpose(1, 2)
    rotary = random_rotary(seqlen, 16) if everything else (None, None)
    arguments = (x, SIGNS[64] if everything else None, *rotary, everything, everything, block_size, transpose)
    torch.library.opcheck(ops.portable_quantize_fp8, arguments)
    for real, fake in zip(ops.portable_quantize_fp8(*arguments), ops._fake_quantize_fp8(*arguments), strict=True):
        assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("rotary_dim", [None, 16])
def test_compiled(rotary_dim):
    """One graph, other lengths and seeds included, and the results of eager mode."""

    def function(q, k, v, seed, rotary):
        options = {"smooth_k": True, "seed": seed, "rotary": rotary, "causal": True}
        x = fa3.quantize_fp8(q, k, v, smooth_k=True, seed=seed)
        return x, fa3.flash_attn_fp8_func(q, k, v, return_lse=True, **options)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for seed, seqlen in ((0, 130), (1, 150), (2, 257)):
        q, k, v = Case(seqlen_q=seqlen, seqlen_k=seqlen, num_heads_q=4, head_dim=48).inputs(torch.bfloat16, "cpu")
        rotary = random_rotary(seqlen, rotary_dim) if rotary_dim else None
        x, got = compiled(q, k, v, seed, rotary)
        expected_x, expected = function(q, k, v, seed, rotary)
        assert isinstance(x, fa3.Fp8Inputs)
        assert x.transform.seed == seed
        got, expected = [*x[:6], x.transform.k_mean, *got], [*expected_x[:6], expected_x.transform.k_mean, *expected]
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a.float(), b.float())


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_with_scales():
    arguments = fp8_arguments()
    compiled = torch.compile(fa3.flash_attn_func, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**arguments), fa3.flash_attn_func(**arguments))


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_with_v_transposed():
    """One compilation for the first lengths and one for all others (of more than one block)."""

    def function(q, k, v):
        x = fa3.quantize_fp8(q, k, v, v_transposed=True)
        scales = {"q_descale": x.q_descale, "k_descale": x.k_descale, "v_descale": x.v_descale}
        return x.v, fa3.flash_attn_func(x.q, x.k, x.v, **scales, v_transposed=True), fa3.flash_attn_fp8_func(q, k, v)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for seqlen_q, seqlen_k in ((129, 130), (257, 150), (300, 256), (130, 513)):
        inputs = Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads_q=4, head_dim=96).inputs(torch.bfloat16, "cpu")
        for got, expected in zip(compiled(*inputs), function(*inputs), strict=True):
            assert torch.equal(got.float(), expected.float())
    assert counter.frame_count <= 2


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_straight_through():
    def function(q, k, v):
        return fa3.flash_attn_fp8_func(q, k, v, rotary=rotary, straight_through=True).square().sum()

    rotary = random_rotary(129, 16)
    inputs = [x.requires_grad_() for x in Case(num_heads_q=4).inputs(torch.float32, "cpu")]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    got, expected = (torch.autograd.grad(f(*inputs), inputs) for f in (compiled, function))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_meta_tensors():
    q, k, v = (x.to("meta") for x in Case(head_dim=96).inputs(torch.float16, "cpu"))
    x = fa3.quantize_fp8(q, k, v, smooth_k=True)
    assert (x.v.shape, x.v.dtype, x.k_descale.shape) == ((2, 129, 2, 128), E4M3, (2, 2, 2))
    assert fa3.quantize_fp8(q, k, v, v_transposed=True).v.shape == (2, 2, 128, 256)
    out, lse = fa3.flash_attn_fp8_func(q, k, v, return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (2, 2, 129), torch.float32)


def test_fake_tensors_with_v_transposed():
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v, *scales, _ = fa3.quantize_fp8(*Case().inputs(torch.bfloat16, "cpu"), v_transposed=True)
        assert (v.shape, v.dtype, v.is_contiguous()) == ((2, 2, 64, 256), E4M3, True)
        scales = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
        out, lse = fa3.flash_attn_func(q, k, v, **scales, v_transposed=True, return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 129, 2, 64), torch.bfloat16, (2, 2, 129), torch.float32)


@pytest.mark.parametrize("v_transposed", [False, True])
def test_flop_counter_and_checkpointing(v_transposed):
    arguments = fp8_arguments()
    if v_transposed:
        arguments |= {"v": transpose_v(arguments["v"]), "v_transposed": True}
    with FlopCounterMode(display=False) as counter:
        fa3.flash_attn_func(**arguments, causal=True)
    pairs = 2 * 4 * ops.visible_pairs(200, 300, causal=True)
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    assert counts == {"fa3.portable_fwd_fp8": 4 * pairs * 16}
    assert ops.portable_fwd_fp8 in fa3.checkpoint_save_ops()


def test_explain():
    (q, k, v), _ = Fp8Case().fp8_inputs()
    explanation = fa3.explain(q, k, v)
    assert (explanation.path, explanation.backward) == ("portable", "refused")
    assert "blocks of 128 keys" in str(explanation)
    assert fa3.explain(q, k, transpose_v(v), v_transposed=True) == explanation
    with fa3.backend("hopper"):
        refused = fa3.explain(q, k, v)
    assert (refused.path, refused.backward) == ("refused", None)


def test_explain_without_the_kernels(monkeypatch):
    (q, k, v), _ = Fp8Case().fp8_inputs()
    monkeypatch.setattr("fa3.interface.choose_path", lambda *arguments: "hopper")
    monkeypatch.setattr(ops, "fwd_fp8", None)
    assert fa3.explain(q, k, v).path == "refused"


def test_explain_hopper_with_v_transposed(monkeypatch):
    """The library is asked for the kernel of the layout; and what TMA wants of v's strides it wants of this v's."""
    table = [{"name": name, "head_dim": 128, "tile_m": 192, "tile_n": 128} for name in ("row-major", "transposed")]
    monkeypatch.setattr("fa3._library.kernel_table", lambda: table)
    monkeypatch.setattr("fa3.interface.choose_path", lambda *arguments: "hopper")
    monkeypatch.setattr("fa3._explain.choose_path", lambda device: "hopper")
    monkeypatch.setattr("fa3._explain._selected_rows", lambda *arguments: (int(arguments[-1]), -1))
    monkeypatch.setattr(ops, "fwd_fp8", ops.portable_fwd_fp8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a Hopper GPU")
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    (q, k, v), _ = Fp8Case(head_dim=128).fp8_inputs()
    vt = transpose_v(v)
    assert fa3.explain(q, k, v).kernel == table[0]
    explanation = fa3.explain(q, k, vt, v_transposed=True)
    assert (explanation.kernel, explanation.copies) == (table[1], [])
    odd = torch.nn.functional.pad(vt.view(torch.uint8), (0, 3)).view(E4M3)[..., :256]
    copies = fa3.explain(q, k, odd, v_transposed=True).copies
    assert copies == ["v: stride 259 bytes of dimension 2 is not a multiple of 16"]
    monkeypatch.setattr("fa3._explain._selected_rows", lambda *arguments: (-1, -1))
    refused = fa3.explain(q, k, vt, v_transposed=True)
    assert refused.path == "refused"
    assert "head_dim 128 in torch.float8_e4m3fn with v transposed" in str(refused)
