"""Windows and chunks on the Hopper kernels, forward and backward, against float64."""

from __future__ import annotations

import random

import pytest
import reference
import torch
from cases import HALF_DTYPES, WINDOWED, Case, draw, fa3_with_lse, ids
from compare import check_results
from gpu_helpers import check_equal

pytestmark = pytest.mark.gpu

HEAD_DIMS = (64, 96, 128, 192, 256)
# Around the sizes of the tiles: 64 to 192 queries, 64 to 176 keys.
BOUNDS = (0, 1, 63, 64, 65, 79, 80, 81, 95, 96, 97, 127, 128, 129, 175, 176, 177, 191, 192, 193)
MASKS = [
    *((False, (left, right), 0) for left, right in zip(BOUNDS, reversed(BOUNDS), strict=True)),
    *((True, (left, -1), 0) for left in BOUNDS[::3]),
    *((False, (-1, right), 0) for right in BOUNDS[1::5]),
    *((False, (left, -1), 0) for left in BOUNDS[2::5]),
    *((causal, (-1, -1), chunk) for causal in (False, True) for chunk in (1, 63, 64, 128, 176, 200)),
    (True, (100, -1), 160),
    (False, (30, 40), 90),
]
AT_BOUNDS = [
    Case(1, seqlen_q, seqlen_k, 2, 1, head_dim, causal, window_size=window, attention_chunk=chunk)
    for head_dim in HEAD_DIMS
    for seqlen_q, seqlen_k in ((530, 530), (300, 700), (700, 300))
    for causal, window, chunk in MASKS
]
# Many key blocks, so that long-sequence kernels run, and many tiles per CTA.
MANY = [
    Case(batch, seqlen, seqlen, num_heads, 2, head_dim, causal, window_size=window, attention_chunk=chunk)
    for head_dim in HEAD_DIMS
    for batch, seqlen, num_heads in ((1, 5000, 4), (8, 600, 16))
    for causal, window, chunk in (
        (True, (4200, -1), 0),
        (False, (700, 300), 0),
        (False, (-1, 900), 0),
        (False, (900, -1), 0),
        (True, (-1, -1), 512),
    )
]


def run(case: Case, dtype: torch.dtype, device: torch.device, deterministic: bool = False):
    q, k, v = case.inputs(dtype, device)
    dout, dlse = case.output_grads(dtype, device)
    grads = {"dout": dout, "dlse": dlse}
    got = reference.run(fa3_with_lse, q, k, v, **grads, **case.mask_options, deterministic=deterministic)
    return (q, k, v), grads, got


def check_case(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    inputs, grads, got = run(case, dtype, device)
    truth, baseline = (f(*inputs, **grads, **case.mask_options) for f in (reference.truth, reference.baseline))
    check_results(got, truth, baseline)


@pytest.mark.parametrize("case", (*WINDOWED, *AT_BOUNDS, *MANY), **ids)
def test_against_float64(case, gpu):
    check_case(case, torch.bfloat16, gpu)


@pytest.mark.parametrize("case", (*WINDOWED, *AT_BOUNDS[::7], *MANY), **ids)
def test_float16(case, gpu):
    check_case(case, torch.float16, gpu)


@pytest.mark.parametrize("case", (*AT_BOUNDS[::11], *MANY), **ids)
def test_deterministic(case, gpu):
    torch.manual_seed(0)
    inputs, grads, got = run(case, torch.bfloat16, gpu, deterministic=True)
    check_results(got, *(f(*inputs, **grads, **case.mask_options) for f in (reference.truth, reference.baseline)))
    for _ in range(2):
        torch.manual_seed(0)
        check_equal(run(case, torch.bfloat16, gpu, deterministic=True)[2], got)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_window_that_covers_everything_is_none(head_dim, causal, gpu):
    case = Case(2, 300, 200, 4, 2, head_dim, causal)
    q, k, v = case.inputs(torch.bfloat16, gpu)
    expected = fa3_with_lse(q, k, v, causal=causal)
    for window in ((199, -1), (-1, 299), (199, 299), (2**40, 2**40)):
        got = fa3_with_lse(q, k, v, causal=causal, window_size=window)
        assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


def draw_masked(rng: random.Random) -> Case:
    case = draw(rng, max_seqlen=700)
    side = lambda: rng.choice([-1, rng.randint(0, 20), rng.randint(0, 300), rng.choice(BOUNDS)])  # noqa: E731
    chunk = rng.choice([0, 0, 0, rng.randint(1, 50), rng.randint(1, 400), 64, 128])
    window = (side(), side())
    return Case(**vars(case) | {"window_size": window, "attention_chunk": chunk})


@pytest.mark.parametrize("seed", range(60))
def test_randomized(seed, gpu):
    rng = random.Random(seed)
    for _ in range(8):
        case = draw_masked(rng)
        print(case)
        torch.manual_seed(seed)
        check_case(case, rng.choice(HALF_DTYPES), gpu)
