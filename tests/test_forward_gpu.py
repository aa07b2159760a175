"""The Hopper forward kernels against float64, and against everything else that a GPU call promises."""

from __future__ import annotations

import functools
import math
import random
import time

import pytest
import reference
import torch
from cases import CASES, HALF_DTYPES, STRIDED, Case, draw, fa3_with_lse, ids
from compare import check_close, check_results
from gpu_helpers import (
    FAR,
    check_equal,
    far_apart,
    in_nan,
    needs_memory,
    offset_by_one,
    packed,
    run_sanitizer,
    wider_by_four,
)
from tiles import FWD_TILES, HEAD_DIMS, UNLIMITED, FwdTile, tile_for
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa3
from fa3 import _library, ops

pytestmark = pytest.mark.gpu

# Either side of the lengths at which the kernel changes.
AT_LIMITS = [
    Case(batch=1, seqlen_q=200, seqlen_k=seqlen_k, num_heads_kv=1, head_dim=tile.head_dim, causal=causal)
    for tile in FWD_TILES.values()
    for causal in (False, True)
    for seqlen_k in (tile.max_seqlen_k(causal), tile.max_seqlen_k(causal) + 1)
    if 0 < tile.max_seqlen_k(causal) < UNLIMITED  # 0: the tile is not for this mask
]
# Many key blocks, and many tiles per CTA: the rings and the pipeline between tiles go round often.
MANY_BLOCKS = [
    Case(1, seqlen, seqlen, 2, 1, head_dim, causal)
    for head_dim in HEAD_DIMS
    for seqlen in (4200 if head_dim <= 128 else 2200,)
    for causal in (False, True)
]
MANY_TILES = [
    Case(8, seqlen_q, seqlen_k, 32, 8, head_dim, causal)
    for head_dim in HEAD_DIMS
    for seqlen_q, seqlen_k in ((300, 200), (300, 40), (400, 130))
    for causal in (False, True)
]


def seqlens_k_for(tile: FwdTile, causal: bool) -> list[int]:
    """A length at which the kernel of this tile runs, if there is one for this mask."""
    lengths = (
        260,
        *(other.max_seqlen_k(causal) + 100 for other in FWD_TILES.values() if other.head_dim == tile.head_dim),
    )
    return [n for n in lengths if n < UNLIMITED and tile_for(tile.head_dim, n, causal) == tile][:1]


# For tests that repeat a call often: ragged tiles, GQA, and where keys are few, rows without keys.
ONE_PER_KERNEL = [
    Case(2, 300, seqlen_k, 6, 2, tile.head_dim, causal)
    for tile in FWD_TILES.values()
    for causal in (False, True)
    for seqlen_k in seqlens_k_for(tile, causal)
]


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> reference.Results:
    return reference.Results(*fa3_with_lse(q, k, v, **options))


def check_case(case: Case, dtype: torch.dtype, device: torch.device, **options) -> None:
    """Out and lse against float64."""
    q, k, v = case.inputs(dtype, device)
    options = {"causal": case.causal, **options}
    got = forward(q, k, v, **options)
    assert (got.out.dtype, got.lse.dtype) == (dtype, torch.float32)
    assert got.out.is_contiguous()
    assert got.lse.is_contiguous()
    truth, baseline = (f(q, k, v, **options) for f in (reference.truth, reference.baseline))
    check_results(got, truth, baseline, rms=True)
    # The scores of the baseline are rounded to 16 bits, those of the kernels are not.
    torch.testing.assert_close(got.lse.double(), truth.lse, rtol=1e-5, atol=2e-4)


# --- values


@pytest.mark.parametrize("dtype", HALF_DTYPES, **ids)
@pytest.mark.parametrize("case", (*CASES, *AT_LIMITS, *MANY_BLOCKS, *MANY_TILES), **ids)
def test_against_float64(case, dtype, gpu):
    check_case(case, dtype, gpu)


@pytest.mark.parametrize("softmax_scale", [1e-3, 1.0, 3])
def test_softmax_scale(softmax_scale, gpu):
    check_case(Case(causal=True, seqlen_k=200), torch.bfloat16, gpu, softmax_scale=softmax_scale)


@functools.cache
def kernel_of(case: Case, dtype: torch.dtype) -> str:
    """Name of the kernel that a call takes."""
    explanation = fa3.explain(*case.inputs(dtype, "cuda"), causal=case.causal)
    assert explanation.path == "hopper", explanation
    return explanation.kernel["name"]


@pytest.mark.parametrize("cases", [(*AT_LIMITS, *MANY_BLOCKS), ONE_PER_KERNEL], ids=["values", "repeats"])
def test_cases_reach_every_kernel(cases):
    table = _library.kernel_table()
    built = {row["name"] for row in table if row["pass"] == "fwd" and row["dtype"] != "e4m3"}  # test_fp8_gpu.py's
    assert {kernel_of(case, dtype) for case in cases for dtype in HALF_DTYPES} == built


def test_kernel_changes_at_the_limits():
    for below, above in zip(AT_LIMITS[::2], AT_LIMITS[1::2], strict=True):
        assert kernel_of(below, torch.bfloat16) != kernel_of(above, torch.bfloat16)


@pytest.mark.parametrize("dtype", HALF_DTYPES, **ids)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "seqlen"), [(d, 1000) for d in HEAD_DIMS] + [(128, 4200), (256, 2200)])
def test_rms_error_is_no_worse_than_flash_attention_2s(head_dim, seqlen, causal, dtype, gpu):
    # Enough heads that FlashAttention-2 does not split the keys: a split keeps the largest weight of each part exact.
    q, k, v = Case(4, seqlen, seqlen, 16, 16, head_dim).inputs(dtype, gpu)
    truth = reference.truth(q, k, v, causal=causal).out
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        peer = functional.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)
    ours, theirs = ((x - truth).square().mean().sqrt().item() for x in (forward(q, k, v, causal=causal).out, peer))
    assert ours <= theirs * 1.02  # the same to the noise of two roundings


# --- memory around the inputs and outputs


@pytest.mark.parametrize("case", (*ONE_PER_KERNEL, *(c for c in CASES if c.head_dim == 40)), **ids)
def test_nan_around_the_inputs_changes_nothing(case, gpu):
    q, k, v = case.inputs(torch.bfloat16, gpu)
    surrounded = [in_nan(x) for x in (q, k, v)]
    assert not fa3.explain(*surrounded).copies
    check_equal(forward(*surrounded, causal=case.causal), forward(q, k, v, causal=case.causal))


@pytest.mark.parametrize("case", [*ONE_PER_KERNEL, Case(seqlen_k=0), Case(1, 900, 50, 4, causal=True)], **ids)
def test_every_element_is_written(case, gpu):
    """The outputs land where NaN was: the allocator gives back the block that was freed last."""
    q, k, v = case.inputs(torch.bfloat16, gpu)
    expected = forward(q, k, v, causal=case.causal)
    stale = [torch.empty_like(x).fill_(math.nan) for _, x in expected.items()]
    places = [x.data_ptr() for x in stale]
    del stale
    got = forward(q, k, v, causal=case.causal)
    assert [x.data_ptr() for _, x in got.items()] == places
    check_equal(got, expected)
    assert not got.out.isnan().any()
    assert not got.lse.isnan().any()


def test_rows_without_keys(gpu):
    """Exactly 0 and -inf, also where the query is NaN."""
    q, k, v = Case(seqlen_q=700, seqlen_k=50, num_heads_q=4, causal=True).inputs(torch.bfloat16, gpu)
    q[:, 640:645] = math.nan
    got = forward(q, k, v, causal=True)
    assert (got.out[:, :650] == 0).all()
    assert (got.lse[:, :, :650] == -math.inf).all()
    assert got.out[:, 650:].isfinite().all()
    assert got.lse[:, :, 650:].isfinite().all()


# --- strides and sizes


@pytest.mark.parametrize("case", STRIDED, **ids)
def test_strides_do_not_change_results(case, gpu):
    q, k, v = case.inputs(torch.bfloat16, gpu)
    copies = fa3.explain(q, k, v, causal=case.causal).copies
    assert [copy[0] for copy in copies] == (["q", "k", "v"] if case.layout == "unaligned" else [])
    check_equal(forward(q, k, v, causal=case.causal), forward(*packed(q, k, v), causal=case.causal))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("view", "is_copied"),
    [
        (lambda x: x[:1].expand(x.shape), False),
        (lambda x: x[:, :1].expand(x.shape), False),
        (lambda x: x[:1, :1, :1].expand(x.shape), False),
        (lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3), False),
        (offset_by_one, True),
        (wider_by_four, True),
    ],
    ids=["one_batch", "one_row", "one_vector", "heads_outermost", "base", "strides"],
)
def test_views(view, is_copied, causal, gpu):
    """Each input in turn, then all."""
    inputs = Case(num_heads_q=6, seqlen_k=200, causal=causal).inputs(torch.bfloat16, gpu)
    for chosen in ("q", "k", "v", "qkv"):
        viewed = [view(x) if name in chosen else x for name, x in zip("qkv", inputs, strict=True)]
        copies = fa3.explain(*viewed).copies
        assert [copy[0] for copy in copies] == (list(chosen) if is_copied else []), copies
        check_equal(forward(*viewed, causal=causal), forward(*packed(*viewed), causal=causal), chosen)


@pytest.mark.parametrize("empty", ["q", "k"])
def test_empty_tensors_of_any_strides(empty, gpu):
    """No element, no constraint on the last stride."""
    lengths = {"q": (0, 5), "k": (5, 0)}[empty]
    q, k = (torch.randn(2, 4, 64, n, device=gpu).bfloat16().transpose(2, 3).transpose(1, 2) for n in lengths)
    q, k = (x if x.numel() == 0 else x.contiguous() for x in (q, k))
    got = forward(q, k, k)
    assert (got.out == 0).all()
    assert (got.lse == -math.inf).all()


def test_one_query_is_causal_or_not(gpu):
    """Causal hides nothing from a single query: the same kernel runs, and the results are equal to the bit."""
    q, k, v = Case(seqlen_q=1, seqlen_k=800, head_dim=256).inputs(torch.bfloat16, gpu)
    check_equal(forward(q, k, v, causal=True), forward(q, k, v, causal=False))
    assert fa3.explain(q, k, v, causal=True).kernel == fa3.explain(q, k, v, causal=False).kernel


def test_strides_beyond_32_bits():
    needs_memory(6)
    inputs = far_apart()[:3]
    assert not fa3.explain(*inputs).copies
    for causal in (False, True):
        got = forward(*inputs, causal=causal)
        assert got.out.isfinite().all()
        check_equal(got, forward(*packed(*inputs), causal=causal))


def test_output_beyond_32_bits(gpu):
    """More than 2^31 elements of out, from inputs that are one batch in memory."""
    needs_memory(16)
    shape = (1, 1000, 16, 128)
    batch = FAR // math.prod(shape) + 2
    q, k, v = (torch.randn(shape, device=gpu).bfloat16() for _ in range(3))
    k, v = k[:, :70], v[:, :70]
    expected = forward(q, k, v)
    got = forward(*(x.expand(batch, -1, -1, -1) for x in (q, k, v)))
    assert got.out.numel() > FAR
    for name, x in got.items():
        one = getattr(expected, name)
        assert all(torch.equal(part, one.expand_as(part)) for part in x.split(64)), name


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(1100, 3, 5, 64, 8), (1, 3, 5, 66000, 1000), (70000, 2, 3, 1, 1)])
def test_more_than_65535_heads(sizes, causal, gpu):
    check_case(Case(*sizes, head_dim=64, causal=causal), torch.bfloat16, gpu)


# --- scores


@pytest.mark.parametrize(
    ("dtype", "magnitude"),
    [(torch.bfloat16, 1e4), (torch.bfloat16, 1e9), (torch.bfloat16, 3e30), (torch.float16, 1e4), (torch.float16, 1e8)],
    **ids,
)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_scores_of_any_size_stay_finite(head_dim, dtype, magnitude, gpu):
    q, k, v = Case(seqlen_k=300, head_dim=head_dim).inputs(dtype, gpu)
    q, k = (x.abs() * magnitude**0.5 for x in (q, k))
    assert q.isfinite().all()
    assert k.isfinite().all()
    for sign in (1, -1):
        options = {"causal": True, "softmax_scale": 0.5}
        got = forward(q, sign * k, v, **options)
        for name, x in got.items():
            assert x.isfinite().all(), name
        truth = reference.truth(q, sign * k, v, **options)
        torch.testing.assert_close(got.lse.double(), truth.lse, rtol=1e-5, atol=1e-3)
        # In float16 the scores of the baseline would be infinite.
        baseline = reference.run(reference.attention, q, sign * k, v, dtype=torch.bfloat16, **options)
        check_close("out", got.out, truth.out, baseline.out)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", HALF_DTYPES, **ids)
def test_very_low_score_keeps_its_weight(dtype, causal, gpu):
    """A visible key with a raw score of -524288, alone, has weight 1: alone in the call, or as the first causal key."""
    for seqlen in (1, 300) if causal else (1,):
        q = torch.full((1, seqlen, 1, 8), 256.0, dtype=dtype, device=gpu)
        k, v = -q, torch.randn_like(q)
        got = forward(q, k, v, softmax_scale=1.0, causal=causal)
        assert torch.equal(got.out[:, 0], v[:, 0])
        assert got.lse[0, 0, 0].item() == -524288
        assert got.out.isfinite().all()


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("causal", [False, True])
def test_nan_propagates_to_the_rows_that_see_it(causal, where, gpu):
    q, k, v = Case(seqlen_q=300, seqlen_k=260, num_heads_q=6, causal=causal).inputs(torch.bfloat16, gpu)
    {"q": q, "k": k, "v": v}[where][0, 117, 1, 3] = math.nan
    got, expected = (reference.Results(*f(q, k, v, causal=causal)) for f in (fa3_with_lse, reference.attention))
    assert got.out.isnan().any()
    if where == "v" and causal:  # 0 x NaN: a hidden NaN of V may reach the rows that share a key block with it
        assert got.out[0, 117 + 40 :, 3:, 3].isnan().all()
        assert not got.out[0, :, :3].isnan().any()
        assert not got.out[1].isnan().any()
        assert not got.lse.isnan().any()
        return
    for name, x in got.items():
        assert torch.equal(x.isnan(), getattr(expected, name).isnan()), name


# --- repeats, streams, graphs, devices


@pytest.mark.parametrize("case", ONE_PER_KERNEL, **ids)
def test_repeats_are_bit_equal(case, gpu, busy_stream):
    q, k, v = case.inputs(torch.bfloat16, gpu)
    first = forward(q, k, v, causal=case.causal)
    differs = torch.zeros((), dtype=torch.bool, device=gpu)
    for repeat in range(100):
        if repeat % 2:
            busy_stream()
        for name, x in forward(q, k, v, causal=case.causal).items():
            differs |= (x != getattr(first, name)).any()
    assert not differs


def test_two_streams(gpu):
    """Calls that run at the same time, with shapes and values of their own."""
    cases = [Case(4, 1000, 900, 8, 2, 128, True), Case(3, 700, 1100, 8, 8, 64)]
    inputs = [case.inputs(torch.bfloat16, gpu) for case in cases]
    expected = [forward(*x, causal=case.causal) for case, x in zip(cases, inputs, strict=True)]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    results = []
    for _ in range(30):
        for i, (case, stream) in enumerate(zip(cases, streams, strict=True)):
            with torch.cuda.stream(stream):
                results.append((i, forward(*inputs[i], causal=case.causal)))
    torch.cuda.synchronize()
    for i, got in results:
        check_equal(got, expected[i])


@pytest.mark.parametrize("layout", ["contiguous", "fused_qkv", "unaligned"])
@pytest.mark.parametrize("causal", [False, True])
def test_cuda_graph(causal, layout, gpu):
    """Captured once and replayed with other values: the same to the bit as calls without a graph."""
    case = Case(3, 500, 500, 6, 2, 72, causal, layout)
    inputs = case.inputs(torch.bfloat16, gpu)
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        forward(*inputs, causal=causal)
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = forward(*inputs, causal=causal)
    for _ in range(3):
        for x in inputs:
            x.copy_(torch.randn_like(x))
        got.out.fill_(math.nan)
        got.lse.fill_(math.nan)
        graph.replay()
        check_equal(got, forward(*inputs, causal=causal))


def test_another_device_than_the_current_one(gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", (gpu.index + 1) % torch.cuda.device_count())
    case = Case(seqlen_k=300, num_heads_q=6, causal=True, layout="unaligned")
    inputs = case.inputs(torch.bfloat16, gpu)
    expected = forward(*inputs, causal=True)
    got = forward(*(x.to(other) for x in inputs), causal=True)
    assert torch.cuda.current_device() == gpu.index
    assert got.out.device == got.lse.device == other
    check_equal(reference.Results(got.out.to(gpu), got.lse.to(gpu)), expected)


def test_no_call_waits_for_the_gpu(gpu):
    """Asked of CUDA: it raises where a call of torch's synchronizes."""
    inputs = Case(layout="unaligned").inputs(torch.bfloat16, gpu)
    forward(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- torch.compile


@pytest.mark.parametrize("case", [*ONE_PER_KERNEL[:2], *STRIDED[:2], Case(seqlen_k=0)], **ids)
def test_opcheck(case, gpu):
    inputs = [x.detach().requires_grad_() for x in case.inputs(torch.bfloat16, gpu)]
    torch.library.opcheck(ops.fwd, (*inputs, 0.25, *case.op_mask, True))


@pytest.mark.parametrize("causal", [False, True])
def test_compiled_forward(causal, gpu):
    torch._dynamo.reset()
    compiled = torch.compile(functools.partial(fa3_with_lse, causal=causal), fullgraph=True)
    for seqlen_q, seqlen_k in ((100, 200), (300, 130), (65, 64)):
        q, k, v = Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads_q=4).inputs(torch.bfloat16, gpu)
        check_equal(reference.Results(*compiled(q, k, v)), forward(q, k, v, causal=causal))


# --- drawn at random, and under compute-sanitizer


def test_randomized(seed, gpu):
    """Cases for half a minute; the failing one is the last that is printed."""
    rng = random.Random(seed)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        case, dtype = draw(rng, max_seqlen=rng.choice([150, 700, 1500])), rng.choice(HALF_DTYPES)
        torch.manual_seed(rng.randrange(2**32))
        print(case, dtype)
        check_case(case, dtype, gpu, softmax_scale=rng.choice([None, 0.05, 1.0]))


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_compute_sanitizer(tool):
    run_sanitizer(tool, "forward")
