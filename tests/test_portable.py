"""The portable path against float64: values, gradients, memory, and the edge cases."""

from __future__ import annotations

import math
import random

import pytest
import reference
import torch
from cases import (
    CASES,
    CAUSAL,
    FULL,
    HALF_DTYPES,
    RECTANGULAR,
    SQUARE,
    STRIDED,
    WINDOWED,
    Case,
    draw,
    fa3_with_lse,
    ids,
)
from compare import check_close, check_results
from torch.utils._python_dispatch import TorchDispatchMode

import fa3
from fa3 import ops
from fa3.mask import Mask
from fa3.portable import attention as portable

FULL_DTYPES = (torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def _portable():
    with fa3.backend("portable"):
        yield


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles even in small cases: 16 x 16."""
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(portable._TILE_ELEMENTS, device, 0)
    monkeypatch.setattr(portable, "_MIN_TILE", 16)


def check_case(case: Case, dtype: torch.dtype, device: torch.device, **options) -> None:
    q, k, v = case.inputs(dtype, device)
    dout, dlse = case.output_grads(dtype, device)
    options = {"causal": case.causal, "dout": dout, "dlse": dlse, **options}
    got = reference.run(fa3_with_lse, q, k, v, **options)
    assert got.out.dtype == dtype
    assert got.out.is_contiguous()
    assert got.lse.dtype == portable.accumulate_dtype(dtype)
    assert got.lse.is_contiguous()
    truth, baseline = (f(q, k, v, **options) for f in (reference.truth, reference.baseline))
    check_results(got, truth, baseline, rms=True)


@pytest.mark.parametrize("case", CASES, **ids)
def test_bfloat16(case, device):
    check_case(case, torch.bfloat16, device)


@pytest.mark.parametrize("case", CASES[::3], **ids)
def test_float16(case, device):
    check_case(case, torch.float16, device)


@pytest.mark.parametrize("dtype", FULL_DTYPES, **ids)
@pytest.mark.parametrize("case", SQUARE[-6:] + RECTANGULAR[-6:], **ids)
def test_full_precision(case, dtype, device):
    check_case(case, dtype, device)


@pytest.mark.parametrize("dtype", (*HALF_DTYPES, torch.float64), **ids)
@pytest.mark.parametrize("case", SQUARE[6:14] + RECTANGULAR[16:], **ids)
def test_many_tiles(case, dtype, device, small_tiles, monkeypatch):
    """The tiled forward also where torch's CPU attention would be taken."""
    monkeypatch.setattr(portable, "sdpa_covers", lambda q, k, mask: False)
    check_case(case, dtype, device)


@pytest.mark.parametrize("tiles", ["large", "small"])
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64), **ids)
@pytest.mark.parametrize("case", WINDOWED, **ids)
def test_windows_and_chunks(case, dtype, tiles, device, request):
    if tiles == "small":
        request.getfixturevalue("small_tiles")
    q, k, v = case.inputs(dtype, device)
    dout, dlse = case.output_grads(dtype, device)
    options = {**case.mask_options, "dout": dout, "dlse": dlse}
    got = reference.run(fa3_with_lse, q, k, v, **options)
    truth, baseline = (f(q, k, v, **options) for f in (reference.truth, reference.baseline))
    check_results(got, truth, baseline, rms=True)


@pytest.mark.parametrize(
    ("mask", "same"),
    [
        ((299, 128, 0), FULL),  # the last query reaches back to key 0, the first one forward to the last key
        ((-1, -1, 300), FULL),
        ((1000, 0, 2**40), CAUSAL),
        ((299, 0, 0), CAUSAL),
    ],
)
def test_limits_that_hide_nothing_change_no_bit(mask, same):
    q, k, v = Case(seqlen_k=300).inputs(torch.bfloat16, "cpu")
    for got, expected in zip(*(ops.portable_fwd(q, k, v, 0.125, *m) for m in (mask, same)), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("softmax_scale", [1e-3, 1.0, 3])
def test_softmax_scale(softmax_scale, device):
    check_case(Case(causal=True, seqlen_k=200), torch.bfloat16, device, softmax_scale=softmax_scale)


def test_randomized(seed, device):
    rng = random.Random(seed)
    for _ in range(20):
        case, dtype = draw(rng, max_seqlen=250), rng.choice(HALF_DTYPES)
        torch.manual_seed(rng.randrange(2**32))
        print(case.name, dtype)
        check_case(case, dtype, device)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 5), (3, 7), (7, 3), (4, 0)])
def test_gradcheck(seqlen_q, seqlen_k, causal, small_tiles):
    q = torch.randn(1, seqlen_q, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, seqlen_k, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def out_and_visible_lse(q, k, v):
        out, lse = fa3_with_lse(q, k, v, causal=causal)
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(out_and_visible_lse, (q, k, v))


@pytest.mark.parametrize("needed", ["q", "k", "v", "kv"])
@pytest.mark.parametrize("loss", ["out", "lse"])
def test_partial_gradients(needed, loss):
    """Some inputs without a gradient, or a loss on one output alone."""
    case = Case(seqlen_q=40, seqlen_k=50, causal=True)
    inputs = dict(zip("qkv", case.inputs(torch.float64, "cpu"), strict=True))
    for name in needed:
        inputs[name].requires_grad_()
    wanted = [inputs[name] for name in needed]

    def grads(function):
        value = dict(zip(("out", "lse"), function(**inputs, causal=True), strict=True))[loss].square().sum()
        if not value.requires_grad:  # naively, lse does not depend on v
            return [torch.zeros_like(x) for x in wanted]
        found = torch.autograd.grad(value, wanted, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]

    for got, expected in zip(grads(fa3_with_lse), grads(reference.attention), strict=True):
        torch.testing.assert_close(got, expected)


class _Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an op returned, and how many matrix products ran."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        self.products += func.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm_)
        return result


def _run_directly(seqlen_q: int, seqlen_k: int, mask: Mask) -> _Largest:
    q = torch.randn(1, seqlen_q, 1, 8)
    k = torch.randn(1, seqlen_k, 1, 8)
    with _Largest() as largest:
        out, lse = portable.tiled_forward(q, k, k, 1.0, mask)
        portable.backward(out, lse, q, k, k, out, lse, 1.0, mask.left, mask.right, mask.chunk)
    return largest


@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_linear_in_seqlen(causal):
    seqlen = 4096
    assert _run_directly(seqlen, seqlen, Mask.resolve(causal)).numel <= max(portable._TILE_ELEMENTS["cpu"], seqlen * 8)
    assert portable._TILE_ELEMENTS["cpu"] <= seqlen**2 // 32


def test_hidden_tiles_are_skipped(small_tiles):
    """7 products per tile, forward and backward; causal visits 10 of 16 tiles, and none of queries without keys."""
    assert _run_directly(64, 64, Mask()).products == 7 * 16
    assert _run_directly(64, 64, Mask(right=0)).products == 7 * 10
    assert _run_directly(64 + 160, 64, Mask(right=0)).products == 7 * 10


def test_rows_without_keys_ignore_their_gradient(device):
    """NaN in the gradient of a row that sees no key changes nothing, to the bit."""
    case = Case(seqlen_q=70, seqlen_k=50, num_heads_q=4, causal=True)
    inputs = [x.requires_grad_() for x in case.inputs(torch.bfloat16, device)]
    dout, dlse = case.output_grads(torch.bfloat16, device)
    out, lse = fa3_with_lse(*inputs, causal=True)
    assert (out[:, :20] == 0).all()
    assert (lse[:, :, :20] == -math.inf).all()
    expected = torch.autograd.grad([out, lse], inputs, [dout, dlse], retain_graph=True)
    dout[:, :20] = math.nan
    dlse[:, :, :20] = math.nan
    got = torch.autograd.grad([out, lse], inputs, [dout, dlse])
    assert (got[0][:, :20] == 0).all()
    for x, y in zip(got, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tiled", [False, True])
def test_very_low_score_keeps_its_weight(tiled, causal, device, monkeypatch):
    """A key with a raw score of -524288, alone, has weight 1."""
    if tiled:
        monkeypatch.setattr(portable, "sdpa_covers", lambda q, k, mask: False)
    q = torch.full((1, 1, 1, 8), 256.0, dtype=torch.bfloat16, device=device)
    k, v = -q, torch.randn_like(q)
    assert (q.float() * k.float()).sum() == -524288
    out, lse = fa3_with_lse(q, k, v, softmax_scale=1.0, causal=causal)
    assert torch.equal(out, v)
    assert lse.item() == -524288


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("magnitude", [1e2, 1e4, 3e8])
def test_scores_of_any_size_stay_finite(magnitude, tiled, device, monkeypatch, small_tiles):
    if tiled:
        monkeypatch.setattr(portable, "sdpa_covers", lambda q, k, mask: False)
    case = Case(causal=True)
    q, k, v = case.inputs(torch.bfloat16, device)
    options = {"dout": torch.randn_like(q), "causal": True, "softmax_scale": 0.5}
    q, k = (x.abs() * magnitude**0.5 for x in (q, k))
    for sign in (1, -1):
        got = reference.run(fa3_with_lse, q, sign * k, v, **options)
        for name, x in got.items():
            assert x.isfinite().all(), name
        truth = reference.truth(q, sign * k, v, **options)
        torch.testing.assert_close(got.lse.double(), truth.lse, rtol=1e-5, atol=0)
        baseline = reference.baseline(q, sign * k, v, **options)
        check_close("out", got.out, truth.out, baseline.out)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("others", [0.0, 0.03, 1.0])
@pytest.mark.parametrize("score", [1e4, 2.4e5, 7e5, 1e6])
def test_error_where_keys_share_a_large_channel(score, others, causal):
    """All scaled scores of a row are near `score`; the other channels, of this size, tell the keys apart."""
    q, k, v = Case(1, 300, 300).inputs(torch.float32, "cpu")
    q, k = others * q, others * k
    q[..., 3] = k[..., 3] = (8 * score) ** 0.5
    q, k, v = (x.bfloat16() for x in (q, k, v))
    options = {"causal": causal, "dout": torch.randn_like(q), "dlse": torch.randn(1, 2, 300)}
    got = reference.run(fa3_with_lse, q, k, v, **options)
    check_results(got, reference.truth(q, k, v, **options), reference.baseline(q, k, v, **options), rms=True)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_propagates(where, tiled, device, monkeypatch):
    if tiled:
        monkeypatch.setattr(portable, "sdpa_covers", lambda q, k, mask: False)
    q, k, v = Case().inputs(torch.bfloat16, device)
    {"q": q, "k": k, "v": v}[where][0, 17, 1, 3] = math.nan
    got, expected = (reference.Results(*f(q, k, v)) for f in (fa3_with_lse, reference.attention))
    for name, x in got.items():
        assert torch.equal(x.isnan(), getattr(expected, name).isnan()), name


@pytest.mark.parametrize("case", STRIDED, **ids)
def test_strides_do_not_change_results(case, device):
    q, k, v = case.inputs(torch.bfloat16, device)
    dout, dlse = case.output_grads(torch.bfloat16, device)
    options = {"causal": case.causal, "dout": dout, "dlse": dlse}
    got = reference.run(fa3_with_lse, q, k, v, **options)
    packed = [x.clone(memory_format=torch.contiguous_format) for x in (q, k, v)]
    expected = reference.run(fa3_with_lse, *packed, **options)
    for name, x in got.items():
        assert torch.equal(x, getattr(expected, name)), name


def test_gradient_of_the_output_may_have_any_strides(device):
    case = Case(causal=True, num_heads_q=4)
    inputs = [x.requires_grad_() for x in case.inputs(torch.bfloat16, device)]
    out = fa3.flash_attn_func(*inputs, causal=True)
    for dout in (
        torch.ones((), dtype=out.dtype, device=device).expand(out.shape),
        torch.randn(out.shape[::-1], device=device).to(out.dtype).permute(3, 2, 1, 0),
    ):
        got = torch.autograd.grad(out, inputs, dout, retain_graph=True)
        expected = torch.autograd.grad(out, inputs, dout.contiguous(), retain_graph=True)
        for x, y in zip(got, expected, strict=True):
            assert torch.equal(x, y)


def test_repeats_are_bit_equal(device):
    case = Case(seqlen_q=300, seqlen_k=500, num_heads_q=6, causal=True)
    q, k, v = case.inputs(torch.bfloat16, device)
    dout, dlse = case.output_grads(torch.bfloat16, device)
    first, *others = (
        reference.run(fa3_with_lse, q, k, v, causal=True, dout=dout, dlse=dlse, deterministic=True) for _ in range(4)
    )
    for other in others:
        for name, x in first.items():
            assert torch.equal(x, getattr(other, name)), name


@pytest.mark.parametrize("dtype", HALF_DTYPES, **ids)
@pytest.mark.parametrize("causal", [False, True])
def test_torch_cpu_attention_meets_the_rule(dtype, causal):
    """The portable path relies on torch's fused CPU kernel: its out and lse at a length of several of its blocks."""
    case = Case(batch=1, seqlen_q=1500, seqlen_k=1500, num_heads_q=4, head_dim=128, causal=causal)
    q, k, v = case.inputs(dtype, "cpu")
    mask = Mask.resolve(causal)
    assert portable.sdpa_covers(q, k, mask)
    got = reference.Results(*portable.forward(q, k, v, 128**-0.5, mask.left, mask.right, mask.chunk))
    options = {"causal": causal}
    check_results(got, reference.truth(q, k, v, **options), reference.baseline(q, k, v, **options), rms=True)
    assert (got.lse - reference.truth(q, k, v, **options).lse).abs().max() < 2e-4
