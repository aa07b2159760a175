"""The Hopper backward kernels against float64, and against everything else that gradients on a GPU promise."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import reference
import torch
from cases import CASES, CAUSAL, FULL, HALF_DTYPES, HEADS, LAYOUTS, LENGTHS, STRIDED, Case, fa3_with_lse, ids
from compare import check_close, check_results
from gpu_helpers import (
    FAR,
    check_equal,
    far_apart,
    in_nan,
    nan_in_new_memory,
    needs_memory,
    offset_by_one,
    packed,
    run_sanitizer,
    wider_by_four,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from model import Block, Calls, checkpointed_train_step, train_step
from tiles import BWD_HEAD_DIMS
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa3
from fa3 import _library, ops

pytestmark = pytest.mark.gpu

MASKS = (False, True)
# Ragged tiles, GQA, and with causal rows without keys.
ONE_PER_KERNEL = [Case(2, 300, 260, 6, 2, head_dim, causal) for head_dim in BWD_HEAD_DIMS for causal in MASKS]
GROUPS = [Case(1, 200, 170, h, hk, d, causal) for d in BWD_HEAD_DIMS for h, hk in HEADS for causal in MASKS]
OTHER_HEAD_DIMS = [
    Case(seqlen_k=150, head_dim=d, causal=causal) for d in (24, 80, 112, 160, 200, 248) for causal in MASKS
]
FAR_APART = [
    Case(1, seqlen_q, seqlen_k, 4, 2, head_dim, causal)
    for head_dim in BWD_HEAD_DIMS
    for seqlen_q, seqlen_k in ((2500, 70), (70, 2500), (1500, 1), (1, 1500))
    for causal in MASKS
]
# Many steps per tile of keys, and many tiles per CTA: the rings and what runs across tiles go round often.
MANY_STEPS = [
    Case(1, seqlen, seqlen, 2, 1, head_dim, causal)
    for head_dim in BWD_HEAD_DIMS
    for seqlen in (4200 if head_dim <= 128 else 2200,)
    for causal in MASKS
]
MANY_TILES = [
    Case(8, seqlen_q, seqlen_k, 32, num_heads_kv, head_dim, causal)
    for head_dim in BWD_HEAD_DIMS
    for seqlen_q, seqlen_k, num_heads_kv in ((200, 300, 32), (40, 300, 8), (130, 400, 16))
    for causal in MASKS
]


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    **options,
) -> reference.Results:
    """Out, lse, dq, dk and dv."""
    return reference.run(fa3_with_lse, q, k, v, dout=dout, dlse=dlse, **options)


def all_inputs(case: Case, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """q, k, v, dout, dlse."""
    return *case.inputs(dtype, "cuda"), *case.output_grads(dtype, "cuda")


def check_case(case: Case, dtype: torch.dtype, deterministic: bool = False, **options) -> None:
    """All results of a loss on out and lse, against float64."""
    q, k, v, dout, dlse = all_inputs(case, dtype)
    options = {"causal": case.causal, "dout": dout, "dlse": dlse, **options}
    got = reference.run(fa3_with_lse, q, k, v, deterministic=deterministic, **options)
    for x in (got.dq, got.dk, got.dv):
        assert x.dtype == dtype
        assert x.is_contiguous()
    truth, baseline = (f(q, k, v, **options) for f in (reference.truth, reference.baseline))
    check_results(got, truth, baseline, rms=True)


# --- values


@pytest.mark.parametrize("dtype", HALF_DTYPES, **ids)
@pytest.mark.parametrize(
    "case", (*CASES, *ONE_PER_KERNEL, *GROUPS, *OTHER_HEAD_DIMS, *FAR_APART, *MANY_STEPS, *MANY_TILES), **ids
)
def test_against_float64(case, dtype):
    check_case(case, dtype)


@pytest.mark.parametrize("dtype", HALF_DTYPES, **ids)
@pytest.mark.parametrize("case", (*ONE_PER_KERNEL, *GROUPS, *FAR_APART, *MANY_STEPS), **ids)
def test_deterministic_against_float64(case, dtype):
    check_case(case, dtype, deterministic=True)


def test_cases_reach_every_kernel():
    built = {row["name"] for row in _library.kernel_table() if row["pass"] == "bwd"}
    explanations = [fa3.explain(*c.inputs(dtype, "cuda")) for c in ONE_PER_KERNEL for dtype in HALF_DTYPES]
    assert {explanation.backward for explanation in explanations} == {"hopper"}
    assert {explanation.backward_kernel["name"] for explanation in explanations} == built


@pytest.mark.parametrize("softmax_scale", [1e-3, 1.0, 3])
@pytest.mark.parametrize("case", ONE_PER_KERNEL, **ids)
def test_softmax_scale(case, softmax_scale):
    check_case(case, torch.bfloat16, softmax_scale=softmax_scale)


@pytest.mark.parametrize("exponent", [-90, 90])
@pytest.mark.parametrize("case", ONE_PER_KERNEL, **ids)
def test_extreme_softmax_scale(case, exponent):
    """Scores of ordinary size, from inputs that are as small or large as the scale is large or small."""
    q, k, v, dout, dlse = all_inputs(case)
    factor = 2.0 ** (-exponent // 2)
    options = {"causal": case.causal, "deterministic": True}
    expected = backward(q, k, v, dout, dlse, softmax_scale=0.125, **options)
    got = backward(q * factor, k * factor, v, dout, dlse, softmax_scale=0.125 * 2.0**exponent, **options)
    # Powers of two: no rounding differs.
    got.dq, got.dk = got.dq * factor, got.dk * factor
    check_equal(got, expected)


@pytest.mark.parametrize("loss", ["out", "lse"])
@pytest.mark.parametrize("case", ONE_PER_KERNEL, **ids)
def test_loss_on_one_output(case, loss):
    """Autograd gives no gradient, and not zeros, for the other one."""
    q, k, v, dout, dlse = all_inputs(case)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    outputs = reference.Results(*fa3_with_lse(*leaves, causal=case.causal))
    grads = torch.autograd.grad(getattr(outputs, loss), leaves, {"out": dout, "lse": dlse}[loss])
    got = reference.Results(outputs.out, outputs.lse, *grads)
    options = {"causal": case.causal, "dout": dout, "dlse": None}
    if loss == "lse":
        assert (got.dv == 0).all()
        options |= {"dout": torch.zeros_like(dout), "dlse": dlse}
    truth, baseline = (f(q, k, v, **options) for f in (reference.truth, reference.baseline))
    check_results(got, truth, baseline, rms=True)


@pytest.mark.parametrize("needed", ["q", "k", "v", "kv"])
def test_gradients_of_some_inputs(needed):
    case = ONE_PER_KERNEL[0]
    q, k, v, dout, dlse = all_inputs(case)
    expected = backward(q, k, v, dout, dlse, deterministic=True)
    inputs = {"q": q, "k": k, "v": v}
    wanted = [inputs[name].requires_grad_() for name in needed]
    got = torch.autograd.grad(fa3_with_lse(**inputs, deterministic=True), wanted, [dout, dlse])
    for name, x in zip(needed, got, strict=True):
        assert torch.equal(x, getattr(expected, f"d{name}"))


# --- next to FlashAttention-2, whose errors are those of 16-bit operands and float32 sums


def flash_attention_2(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, causal: bool, scale: float | None = None
) -> dict[str, torch.Tensor]:
    """Out, dq, dk and dv of torch's. Callers have so many heads that it does not split the keys."""
    leaves = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = functional.scaled_dot_product_attention(*leaves, is_causal=causal, scale=scale)
    results = (out, *torch.autograd.grad(out, leaves, dout.transpose(1, 2)))
    return {name: x.detach().transpose(1, 2) for name, x in zip(("out", "dq", "dk", "dv"), results, strict=True)}


@pytest.mark.parametrize("dtype", HALF_DTYPES, **ids)
@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize(
    ("head_dim", "batch", "seqlen"), [*((d, 4, 1000) for d in BWD_HEAD_DIMS), (128, 1, 4200), (256, 1, 2200)]
)
def test_rms_error_is_no_worse_than_flash_attention_2s(head_dim, batch, seqlen, causal, dtype):
    q, k, v, dout, _ = all_inputs(Case(batch, seqlen, seqlen, 16, 16, head_dim), dtype)
    truth = reference.truth(q, k, v, dout=dout, causal=causal)
    peer = flash_attention_2(q, k, v, dout, causal)
    got = backward(q, k, v, dout, causal=causal)
    for name in ("dq", "dk", "dv"):
        exact = getattr(truth, name)
        ours, theirs = ((x - exact).square().mean().sqrt().item() for x in (getattr(got, name), peer[name]))
        assert ours <= theirs * 1.02, name  # the same to the noise of the roundings


@pytest.mark.parametrize("dtype", HALF_DTYPES, **ids)
@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("where", ["qk", "v", "dout"])
@pytest.mark.parametrize("head_dim", BWD_HEAD_DIMS)
def test_outlier_channels(head_dim, where, causal, dtype):
    """A few channels 50 times as large: in q and k, most rows then have one key of weight 1."""
    q, k, v, dout, _ = all_inputs(Case(2, 500, 500, 32, 32, head_dim), dtype)
    for x in {"qk": (q, k), "v": (v,), "dout": (dout,)}[where]:
        x[..., 3:50:20] *= 50
    truth = reference.truth(q, k, v, dout=dout, causal=causal)
    peer = flash_attention_2(q, k, v, dout, causal)
    got = backward(q, k, v, dout, causal=causal)
    for name, baseline in peer.items():
        check_close(name, getattr(got, name), getattr(truth, name), baseline, rms=True)


@pytest.mark.parametrize("dtype", HALF_DTYPES, **ids)
@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("head_dim", BWD_HEAD_DIMS)
def test_very_negative_lse(head_dim, causal, dtype):
    """All scores are 10,000 lower; softmax is the same, and padded keys must not see the difference."""
    q, k, v, dout, _ = all_inputs(Case(2, 300, 300, 32, 32, head_dim), dtype)
    q[..., 0], k[..., 0] = 100, -800
    truth = reference.truth(q, k, v, dout=dout, causal=causal, softmax_scale=0.125)
    assert truth.lse.max() < -9000
    peer = flash_attention_2(q, k, v, dout, causal, scale=0.125)
    got = backward(q, k, v, dout, causal=causal, softmax_scale=0.125)
    for name, baseline in peer.items():
        check_close(name, getattr(got, name), getattr(truth, name), baseline, rms=True)


@pytest.mark.parametrize(
    ("dtype", "magnitude"),
    [(torch.bfloat16, 1e4), (torch.bfloat16, 1e9), (torch.bfloat16, 3e30), (torch.float16, 1e4)],
    **ids,
)
@pytest.mark.parametrize("head_dim", BWD_HEAD_DIMS)
def test_scores_of_any_size_stay_finite(head_dim, dtype, magnitude):
    """The rounding of a huge lse must not make a P above 1, let alone infinite."""
    q, k, v, dout, dlse = all_inputs(Case(seqlen_q=200, seqlen_k=300, head_dim=head_dim), dtype)
    q, k = (x.abs() * magnitude**0.5 for x in (q, k))
    for sign in (1, -1):
        got = backward(q, sign * k, v, dout, dlse, causal=True, softmax_scale=0.5)
        for name, x in got.items():
            assert x.isfinite().all(), name
        largest = dout.float().abs().sum(1, keepdim=True)  # of a dv whose P is at most 1
        assert (got.dv.float().abs() <= 1.01 * largest).all()


@pytest.mark.parametrize("dtype", HALF_DTYPES, **ids)
def test_very_low_score_keeps_its_weight(dtype):
    """A key with a raw score of -524288, alone, has weight 1: dv is dout."""
    q = torch.full((1, 1, 1, 8), 256.0, dtype=dtype, device="cuda")
    v, dout = torch.randn_like(q), torch.randn_like(q)
    got = backward(q, -q, v, dout, softmax_scale=1.0)
    assert torch.equal(got.dv, dout)


@pytest.mark.parametrize("score", [2.5e38, -2.5e38, 3.2e38, -3.2e38])
def test_largest_scores_stay_finite(score):
    """An lse that is finite, and infinite in base 2."""
    q = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16, device="cuda")
    k = q.clone()
    q[..., 0], k[..., 0] = 1.6e19, score / 1.6e19
    v, dout = torch.randn_like(q), torch.randn_like(q)
    for name, x in backward(q, k, v, dout, softmax_scale=1.0).items():
        assert x.isfinite().all(), name


# --- memory around the inputs and outputs, and what a value may reach


@pytest.mark.parametrize("case", (*ONE_PER_KERNEL, *(c for c in CASES if c.head_dim == 40)), **ids)
def test_nan_around_the_inputs_changes_nothing(case):
    q, k, v, dout, dlse = all_inputs(case)
    surrounded = [in_nan(x) for x in (q, k, v, dout)]
    assert not fa3.explain(*surrounded[:3]).copies
    options = {"causal": case.causal, "deterministic": True}
    check_equal(backward(*surrounded, dlse, **options), backward(q, k, v, dout, dlse, **options))


EMPTY = [c for c in CASES if math.prod(c.q_shape) * math.prod(c.kv_shape) == 0]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", [*ONE_PER_KERNEL, *EMPTY, Case(1, 900, 50, 4, causal=True)], **ids)
def test_every_element_is_written(case, deterministic):
    """Outputs and scratch memory hold NaN before the call."""
    q, k, v, dout, dlse = all_inputs(case)
    out, lse = ops.fwd(q, k, v, 0.125, *case.op_mask)
    arguments = (dout, dlse, q, k, v, out, lse, 0.125, *case.op_mask, deterministic)
    expected = ops.bwd(*arguments)
    with nan_in_new_memory():
        got = ops.bwd(*arguments)
    if not deterministic:
        torch.testing.assert_close(got[0], expected[0])
        got, expected = got[1:], expected[1:]
    for x, y in zip(got, expected, strict=True):
        assert torch.equal(x, y)


def test_rows_without_keys_reach_nothing():
    """Their dq is 0, and NaN in their query and gradients changes no gradient, to the bit."""
    for head_dim in BWD_HEAD_DIMS:
        q, k, v, dout, dlse = all_inputs(Case(2, 700, 50, 4, 2, head_dim, causal=True))
        options = {"causal": True, "deterministic": True}
        expected = backward(q, k, v, dout, dlse, **options)
        assert (expected.dq[:, :650] == 0).all()
        q[:, 600:650] = math.nan
        dout[:, :650] = math.nan
        dlse[:, :, :650] = math.nan
        check_equal(backward(q, k, v, dout, dlse, **options), expected)


@pytest.mark.parametrize("where", ["q", "k", "v", "dout", "dlse"])
@pytest.mark.parametrize("head_dim", BWD_HEAD_DIMS)
def test_nan_propagates(head_dim, where):
    """A NaN of one head makes the same gradients NaN as in plain PyTorch."""
    names = ("q", "k", "v", "dout", "dlse")
    inputs = dict(zip(names, all_inputs(Case(2, 200, 260, 6, 2, head_dim)), strict=True))
    inputs[where][(0, 1, 117) if where == "dlse" else (0, 117, 1, 3)] = math.nan
    got, expected = backward(**inputs), reference.run(reference.attention, **inputs)
    for name, x in got.items():
        assert torch.equal(x.isnan(), getattr(expected, name).isnan()), name


# --- strides and sizes


@pytest.mark.parametrize("case", STRIDED, **ids)
def test_strides_do_not_change_results(case):
    q, k, v, dout, dlse = all_inputs(case)
    options = {"dout": dout, "dlse": dlse, "causal": case.causal, "deterministic": True}
    check_equal(backward(q, k, v, **options), backward(*packed(q, k, v), **options))


ANY_STRIDES = {
    "one_element": lambda x: x.new_ones(()).expand(x.shape),
    "one_vector": lambda x: x[:1, :1, :1].expand(x.shape),
    "one_column": lambda x: x[..., :1].expand(x.shape),
    "reversed_dimensions": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "heads_first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every_other_column": lambda x: x.repeat_interleave(2, dim=3)[..., ::2],
    "offset_by_one": offset_by_one,
    "wider_by_four": wider_by_four,
}


@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("view", ANY_STRIDES.values(), ids=ANY_STRIDES)
def test_gradient_of_the_output_may_have_any_strides(view, causal):
    """seqlen_q > seqlen_k: with causal the kernels get a part of its rows."""
    q, k, v, dout, _ = all_inputs(Case(2, 300, 260, 6, 2, 72))
    dout = view(dout)
    options = {"causal": causal, "deterministic": True}
    check_equal(backward(q, k, v, dout, **options), backward(q, k, v, *packed(dout), **options))


def test_sum_backward():
    leaves = [x.requires_grad_() for x in Case(num_heads_q=4, head_dim=128).inputs(torch.bfloat16, "cuda")]
    fa3.flash_attn_func(*leaves, deterministic=True).sum().backward()
    expected = backward(*leaves, torch.ones_like(leaves[0]), deterministic=True)
    for x, y in zip(leaves, (expected.dq, expected.dk, expected.dv), strict=True):
        assert torch.equal(x.grad, y)


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=["full", "causal"])
def test_saved_tensors_may_have_any_strides(mask):
    """As a compiler may choose them: not even lse need be contiguous."""
    q, k, v, dout, dlse = all_inputs(Case(2, 300, 260, 6, 2, 72))
    out, lse = ops.fwd(q, k, v, 0.125, *mask)
    expected = ops.bwd(dout, dlse, q, k, v, out, lse, 0.125, *mask, True)
    views = ANY_STRIDES["reversed_dimensions"](out), *(x.mT.contiguous().mT for x in (lse, dlse))
    assert not any(x.is_contiguous() for x in views)
    strided_out, strided_lse, strided_dlse = views
    got = ops.bwd(dout, strided_dlse, q, k, v, strided_out, strided_lse, 0.125, *mask, True)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("dout", lambda x: x[:, 1:], r"bwd: dout must have the shape .* \(2, 129, 2, 64\), got \(2, 128, 2, 64\)"),
        ("dout", lambda x: x.half(), "bwd: dout must have q's dtype"),
        ("dout", lambda x: x.cpu(), "bwd: dout must be on a CUDA device"),
        ("out", lambda x: x[0], "bwd: out must have the shape"),
        ("lse", lambda x: x.mT, "bwd: lse must have the shape"),
        ("lse", lambda x: x.bfloat16(), "bwd: lse must be float32"),
        ("dlse", lambda x: x[..., None], "bwd: dlse must have the shape"),
        ("dlse", lambda x: x.double(), "bwd: dlse must be float32"),
        ("k", lambda x: x[:1], "bwd: k must have q's batch"),
        ("softmax_scale", lambda x: 0.0, "bwd: softmax_scale must be from 1e-37 to 1e38"),
    ],
)
def test_checks_of_the_op(name, change, message):
    q, k, v, dout, dlse = all_inputs(Case())
    out, lse = ops.fwd(q, k, v, 0.125, *FULL)
    arguments = {"dout": dout, "dlse": dlse, "q": q, "k": k, "v": v, "out": out, "lse": lse, "softmax_scale": 0.125}
    arguments[name] = change(arguments[name])
    with pytest.raises(RuntimeError, match=message):
        ops.bwd(**arguments, window_left=-1, window_right=-1, attention_chunk=0, deterministic=False)


def test_strides_beyond_32_bits():
    needs_memory(8)
    q, k, v, dout = far_apart()
    for causal in MASKS:
        options = {"causal": causal, "deterministic": True}
        got = backward(q, k, v, dout, **options)
        assert all(x.isfinite().all() for _, x in got.items())
        check_equal(got, backward(*packed(q, k, v, dout), **options))


def test_gradients_beyond_32_bits():
    """More than 2^31 elements of dq and of its accumulator, from inputs that are one batch in memory."""
    needs_memory(40)
    shape = (1, 1000, 16, 128)
    batch = FAR // math.prod(shape) + 2
    q, k, v, dout = (torch.randn(shape, device="cuda").bfloat16() for _ in range(4))
    k, v = k[:, :70], v[:, :70]

    def grads(q, k, v, dout):
        return ops.bwd(dout, None, q, k, v, *ops.fwd(q, k, v, 0.125, *FULL), 0.125, *FULL, True)

    expected = grads(q, k, v, dout)
    got = grads(*(x.expand(batch, -1, -1, -1) for x in (q, k, v, dout)))
    assert got[0].numel() > FAR
    for x, one in zip(got, expected, strict=True):
        assert all(torch.equal(part, one.expand_as(part)) for part in x.split(64))


@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("sizes", [(1100, 3, 5, 64, 8), (1, 3, 5, 66000, 1000), (70000, 2, 3, 1, 1)])
def test_more_than_65535_heads(sizes, causal):
    check_case(Case(*sizes, head_dim=64, causal=causal), torch.bfloat16)


# --- repeats, streams, graphs, devices

REPEATED = [
    Case(2, 700, 900, 8, num_heads_kv, head_dim, causal)
    for head_dim in BWD_HEAD_DIMS
    for num_heads_kv in (8, 2)
    for causal in MASKS
]


def differing(case: Case, dtype: torch.dtype, repeats: int, deterministic: bool, refill) -> list[bool]:
    """Whether dq, dk and dv ever differ from those of the first call, while the GPU is busy with other work too."""
    q, k, v, dout, dlse = all_inputs(case, dtype)
    out, lse = ops.fwd(q, k, v, 0.125, *case.op_mask)
    arguments = (dout, dlse, q, k, v, out, lse, 0.125, *case.op_mask, deterministic)
    first = ops.bwd(*arguments)
    differs = torch.zeros(3, dtype=torch.bool, device="cuda")
    for repeat in range(repeats):
        if repeat % 2:
            refill()
        differs |= torch.stack([(x != y).any() for x, y in zip(ops.bwd(*arguments), first, strict=True)])
    return differs.tolist()


@pytest.mark.parametrize("dtype", HALF_DTYPES, **ids)
@pytest.mark.parametrize("case", REPEATED, **ids)
def test_deterministic_repeats_are_bit_equal(case, dtype, busy_stream):
    assert differing(case, dtype, 200, True, busy_stream) == [False, False, False]


@pytest.mark.parametrize("case", REPEATED, **ids)
def test_dk_and_dv_are_bit_equal_always(case, busy_stream):
    _, dk_differs, dv_differs = differing(case, torch.bfloat16, 50, False, busy_stream)
    assert not dk_differs
    assert not dv_differs


@pytest.mark.parametrize("deterministic", [False, True])
def test_two_streams(deterministic):
    """Calls that run at the same time, with shapes and values of their own. CTAs that wait for their turn get it."""
    cases = [Case(4, 1000, 900, 8, 2, 128, True), Case(3, 700, 1100, 8, 8, 64)]
    inputs = [all_inputs(case) for case in cases]
    options = [{"causal": case.causal, "deterministic": deterministic} for case in cases]
    expected = [backward(*x, **o) for x, o in zip(inputs, options, strict=True)]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    results = []
    for _, i in itertools.product(range(30), range(len(cases))):
        with torch.cuda.stream(streams[i]):
            results.append((i, backward(*inputs[i], **options[i])))
    torch.cuda.synchronize()
    for i, got in results:
        if not deterministic:
            torch.testing.assert_close(got.dq, expected[i].dq)
            got.dq = None
        check_equal(got, expected[i])


@pytest.mark.parametrize("layout", ["contiguous", "fused_qkv", "unaligned"])
@pytest.mark.parametrize("causal", MASKS)
def test_cuda_graph(causal, layout):
    """Forward and backward captured once, and replayed with other values: the same to the bit as without a graph."""
    inputs = all_inputs(Case(3, 500, 500, 6, 2, 72, causal, layout))
    run = functools.partial(backward, causal=causal, deterministic=True)
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        run(*inputs)
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(*inputs)
    for _ in range(3):
        for x in inputs:
            x.copy_(torch.randn_like(x))
        for _, x in got.items():
            x.fill_(math.nan)
        graph.replay()
        check_equal(got, run(*inputs))


def test_another_device_than_the_current_one(gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", (gpu.index + 1) % torch.cuda.device_count())
    inputs = all_inputs(Case(2, 300, 260, 6, 2, causal=True, layout="unaligned"))
    options = {"causal": True, "deterministic": True}
    got = backward(*(x.to(other) for x in inputs), **options)
    assert torch.cuda.current_device() == gpu.index
    assert all(x.device == other for _, x in got.items())
    check_equal(reference.Results(*(x.to(gpu) for _, x in got.items())), backward(*inputs, **options))


def test_no_call_waits_for_the_gpu():
    """Asked of CUDA: it raises where a call of torch's synchronizes."""
    q, k, v, dout, dlse = all_inputs(Case(layout="unaligned"))
    inputs = q, k, v, ANY_STRIDES["reversed_dimensions"](dout), dlse
    backward(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        backward(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_backward_follows_its_forward():
    """The portable path on request, also where the block has been left; and the kernels without one."""
    case = ONE_PER_KERNEL[0]
    q, k, v, dout, dlse = all_inputs(case)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with Calls() as calls:
        with fa3.backend("portable"):
            portable = fa3_with_lse(*leaves, causal=case.causal)
        hopper = fa3_with_lse(*leaves, causal=case.causal)
        both = [torch.autograd.grad(outputs, leaves, [dout, dlse]) for outputs in (portable, hopper)]
    assert calls.count == {ops.portable_fwd: 1, ops.portable_bwd: 1, ops.fwd: 1, ops.bwd: 1}
    for x, y in zip(*both, strict=True):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)


# --- torch.compile and activation checkpointing


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("case", [*ONE_PER_KERNEL[:2], *STRIDED[:2], Case(seqlen_k=0)], **ids)
def test_opcheck(case, with_dlse):
    q, k, v, dout, dlse = all_inputs(case)
    out, lse = ops.fwd(q, k, v, 0.25, *case.op_mask)
    torch.library.opcheck(ops.bwd, (dout, dlse if with_dlse else None, q, k, v, out, lse, 0.25, *case.op_mask, True))


@pytest.fixture
def block(gpu) -> torch.nn.Module:
    return Block().to(gpu, torch.bfloat16)


@pytest.fixture
def tokens(gpu) -> torch.Tensor:
    return torch.randn(2, 200, 64, device=gpu).bfloat16()


def test_compiled_train_step(block, tokens):
    torch._dynamo.reset()
    expected = train_step(block, tokens)
    with Calls() as calls:
        train_step(block, tokens)
    assert calls.count == {ops.fwd: 1, ops.bwd: 1}
    got = train_step(torch.compile(block, fullgraph=True), tokens)
    for a, b in zip(got, expected, strict=True):
        assert (a - b).norm() <= 0.02 * b.norm()  # the compiler fuses bfloat16 operations, and rounds less often


@pytest.mark.parametrize("causal", MASKS)
def test_compiled_gradients(causal):
    """Attention alone, at several lengths: equal to the bit."""
    torch._dynamo.reset()
    function = functools.partial(fa3_with_lse, causal=causal, deterministic=True)
    compiled = torch.compile(function, fullgraph=True)
    for seqlen_q, seqlen_k in ((100, 200), (300, 130), (65, 64)):
        q, k, v, dout, dlse = all_inputs(Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads_q=4))
        got, expected = (reference.run(f, q, k, v, dout=dout, dlse=dlse) for f in (compiled, function))
        check_equal(got, expected)


@pytest.mark.parametrize(("saves", "forwards"), [(False, 2), (True, 1)])
def test_activation_checkpointing(saves, forwards, block, tokens):
    expected = train_step(block, tokens)
    with Calls() as calls:
        got = checkpointed_train_step(block, tokens, saves)
    assert calls.count == {ops.fwd: forwards, ops.bwd: 1}
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_second_derivatives_are_refused():
    q, k, v = (x.requires_grad_() for x in Case().inputs(torch.bfloat16, "cuda"))
    (dq,) = torch.autograd.grad(fa3.flash_attn_func(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="flash_attn_func: second derivatives are not implemented"):
        dq.sum().backward()


# --- drawn at random, and under compute-sanitizer


@st.composite
def cases(draw) -> Case:
    length = st.one_of(st.integers(1, 700), st.sampled_from(LENGTHS))
    num_heads_kv = draw(st.integers(1, 3))
    return Case(
        batch=draw(st.integers(1, 3)),
        seqlen_q=draw(length),
        seqlen_k=draw(length),
        num_heads_q=num_heads_kv * draw(st.integers(1, 9)),
        num_heads_kv=num_heads_kv,
        head_dim=8 * draw(st.integers(1, 32)),
        causal=draw(st.booleans()),
        layout=draw(st.sampled_from([layout for layout in LAYOUTS if layout != "fused_qkv"])),
    )


@given(
    case=cases(),
    dtype=st.sampled_from(HALF_DTYPES),
    deterministic=st.booleans(),
    softmax_scale=st.sampled_from([None, 0.05, 1.0]),
)
@settings(max_examples=40, derandomize=True, deadline=None)
def test_randomized(case, dtype, deterministic, softmax_scale):
    torch.manual_seed(0)
    check_case(case, dtype, deterministic, softmax_scale=softmax_scale)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_compute_sanitizer(tool):
    run_sanitizer(tool, "backward")
