"""The FP8 forward kernels against float64, beside the simulation of their arithmetic in plain PyTorch."""

from __future__ import annotations

import itertools
import math

import pytest
import reference
import torch
from cases import FULL, ids
from fp8_helpers import Fp8Case, all_dequantized
from gpu_helpers import run_sanitizer
from tiles import FWD_FP8_TILES

import fa3
from fa3 import ops
from fa3.fp8_format import E4M3, FP8_SCALE_ROWS, transpose_v

pytestmark = pytest.mark.gpu

E4M3_NAN = 0x7F
SHAPES = [  # batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv
    (2, 129, 300, 4, 2),
    (1, 64, 128, 2, 2),
    (1, 1, 700, 2, 1),
    (2, 193, 65, 3, 1),  # causal: rows without keys
    (1, 600, 1023, 7, 1),
    (1, 5, 1, 2, 2),
]
CASES = [
    Fp8Case(*shape, head_dim, causal, scales=scales, q_scales_of=q_scales_of)
    for shape, head_dim, causal in itertools.product(SHAPES, (16, 64, 96, 128, 192, 256), (False, True))
    for scales, q_scales_of in (("blocks", "query heads"), ("heads", "KV heads"))
]
LAYOUTS = [
    Fp8Case(2, 130, 200, 4, 2, head_dim, True, layout)
    for head_dim in (64, 128, 256)
    for layout in ("transposed", "expanded_kv")
]
# Many tiles per CTA and many blocks: the rings go round often.
LARGE = [
    Fp8Case(batch, seqlen, seqlen, heads, heads, head_dim, causal)
    for head_dim in (64, 128, 256)
    for batch, seqlen, heads in ((4, 520, 40), (1, 3000, 2))
    for causal in (False, True)
]


def gpu_inputs(case: Fp8Case) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """e4m3 tensors and scales as Fp8Case has them, nearer to each other, so that no row is one key alone."""
    tensors = [x.to(E4M3) for x in case.inputs(torch.float32, "cuda")]
    _, scales = case.fp8_inputs()
    return tensors, {name: scale.sqrt().cuda() for name, scale in scales.items()}


def attend(tensors: list[torch.Tensor], scales: dict[str, torch.Tensor], *, v_transposed: bool = False, **options):
    """flash_attn_func, given V as it is or transposed."""
    q, k, v = tensors
    return fa3.flash_attn_func(
        q, k, transpose_v(v) if v_transposed else v, **scales, **options, v_transposed=v_transposed
    )


each_tile = pytest.mark.parametrize("tile", FWD_FP8_TILES.values(), ids=lambda tile: tile.name)


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def check_error(
    case: Fp8Case,
    tensors: list[torch.Tensor],
    scales: dict,
    *,
    v_transposed: bool = False,
    score_error: float = 2**-12,
) -> None:
    """At most a quarter more than that of the simulation: the tensor cores add the products of a score with 14 bits.

    score_error: that of a score, as a part of the largest that these norms allow. The rest of lse's error is that of P
    as it is rounded, and the simulation's.
    """
    options = {"causal": case.causal, "softmax_scale": case.head_dim**-0.5 / 4}
    out, lse = attend(tensors, scales, **options, v_transposed=v_transposed, return_lse=True)
    with fa3.backend("portable"):
        simulated, simulated_lse = fa3.flash_attn_func(*tensors, **scales, **options, return_lse=True)
    q, k, v = all_dequantized(tensors, scales)
    truth, true_lse = reference.attention(q, k, v, **options)
    assert out.shape == truth.shape
    assert out.dtype == torch.bfloat16
    assert out.is_contiguous()
    allowed = 1.25 * rms(simulated.double() - truth) + 2**-8 * rms(truth)
    assert rms(out.double() - truth) <= allowed
    largest_score = options["softmax_scale"] * (q.norm(dim=-1).max() * k.norm(dim=-1).max()).item()
    lse_error = score_error * largest_score + 1e-4
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-6, atol=lse_error + 0.065)
    has_keys = true_lse > -math.inf
    allowed = 1.25 * rms((simulated_lse - true_lse)[has_keys]) + lse_error
    assert rms((lse - true_lse)[has_keys]) <= allowed


@pytest.mark.parametrize("case", CASES + LAYOUTS + LARGE, **ids)
def test_error_is_that_of_the_arithmetic(case):
    check_error(case, *gpu_inputs(case))


@each_tile
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", ["all", "every other"])
def test_negative_scores(tile, causal, rows):
    """Rows whose scores are all below 0: a kernel that compares scores as integers has a second way for these."""
    case = Fp8Case(2, 300, 700, 4, 2, tile.head_dim, causal)
    tensors, scales = gpu_inputs(case)
    q, k, _ = (x.view(torch.uint8) for x in tensors)
    q &= 0x7F
    k |= 0x80
    if rows == "every other":
        q[:, ::2] |= 0x80
    # The products of a score have one sign, and the tensor cores cut all of them off in the same direction, once more
    # for every 32 channels.
    score_error = 2**-9 if tile.head_dim == 256 else 2**-10
    check_error(case, tensors, scales, v_transposed=tile.v_transposed, score_error=score_error)


@pytest.mark.parametrize("case", CASES + LAYOUTS + LARGE, **ids)
def test_transposed_v_is_the_same_v(case):
    """To the bit: the products and sums are the same, in the same order."""
    tensors, scales = gpu_inputs(case)
    options = {"causal": case.causal, "return_lse": True}
    expected = attend(tensors, scales, **options)
    got = attend(tensors, scales, v_transposed=True, **options)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_adds_no_error_of_its_own(head_dim):
    """In the setting of the paper's table, outliers in a thousandth of the entries: within 2 % of the simulation."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw() -> torch.Tensor:
        x, outlier, probability = (
            f((1, 2048, 4, head_dim), device="cuda", generator=generator)
            for f in (torch.randn, torch.randn, torch.rand)
        )
        return (x + 10 * outlier * (probability < 1e-3)).half()

    q, k, v = draw(), draw(), draw()
    truth, _ = reference.attention(q.double(), k.double(), v.double(), causal=False)
    out = fa3.flash_attn_fp8_func(q, k, v)
    with fa3.backend("portable"):
        simulated = fa3.flash_attn_fp8_func(q, k, v)
    assert rms(out.double() - truth) == pytest.approx(rms(simulated.double() - truth), rel=0.02)


def test_output_in_fp16():
    tensors, scales = gpu_inputs(Fp8Case(seqlen_k=300))
    out = fa3.flash_attn_func(*tensors, **scales, out_dtype=torch.float16)
    assert out.dtype == torch.float16
    expected = fa3.flash_attn_func(*tensors, **scales)
    torch.testing.assert_close(out.float(), expected.float(), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_scales_of_heads_are_scales_of_equal_blocks(head_dim):
    """Also as a (batch, num_heads_kv) view of one number, as upstream's users pass them."""
    case = Fp8Case(2, 300, 400, 4, 2, head_dim)
    tensors = [x.to(E4M3) for x in case.inputs(torch.float32, "cuda")]
    one = torch.full((), 0.5, device="cuda")
    per_head = {f"{name}_descale": one.expand(2, 2) for name in "qkv"}
    blocks = {"q": (4, 3), "k": (2, 4), "v": (2, 4)}
    per_block = {f"{name}_descale": one.expand(2, *shape).contiguous() for name, shape in blocks.items()}
    assert torch.equal(fa3.flash_attn_func(*tensors, **per_head), fa3.flash_attn_func(*tensors, **per_block))


@each_tile
def test_long_sums_do_not_drift(tile):
    """131,072 equal scores return V: the tensor cores' short sums end with each tile."""
    head_dim = tile.head_dim
    seqlen_k = 131072
    q, k = (torch.zeros(1, s, 1, head_dim, device="cuda").to(E4M3) for s in (70, seqlen_k))
    v = torch.rand(head_dim, device="cuda").to(E4M3).expand(1, seqlen_k, 1, head_dim)
    scales = {f"{name}_descale": torch.ones(1, 1, device="cuda") for name in "qkv"}
    out = attend([q, k, v], scales, v_transposed=tile.v_transposed)
    torch.testing.assert_close(out.float(), v[:, :1].float().expand(out.shape), rtol=2**-8, atol=0)


@each_tile
def test_equal_values_come_back(tile):
    """The weights are divided by their sum as e4m3 holds them: P is 243 for all keys but one, and rounded to 240."""
    q, k = (torch.zeros(1, s, 1, tile.head_dim, device="cuda") for s in (70, 1000))
    q[..., 0] = 1.0
    k[0, :-1, 0, 0] = -5 / 64
    tensors = [x.to(E4M3) for x in (q, k, torch.full_like(k, 1.5))]
    scales = {f"{name}_descale": torch.ones(1, 1, device="cuda") for name in "qkv"}
    out = attend(tensors, scales, v_transposed=tile.v_transposed, softmax_scale=math.log(2))
    assert (out == 1.5).all()


def test_many_small_weights_are_kept():
    """One key at score 0 among 4096 at -7, whose weight together is 3.7 times its own."""
    head_dim, others = 128, 4096
    q, k, v = (torch.zeros(1, s, 1, head_dim, device="cuda") for s in (1, others + 1, others + 1))
    q[..., 0] = 1.0
    k[:, 1:, :, 0], v[:, 1:] = -7.0, 1.0
    tensors = [x.to(E4M3) for x in (q, k, v)]
    scales = {f"{name}_descale": torch.ones(1, 1, device="cuda") for name in "qkv"}
    out = fa3.flash_attn_func(*tensors, **scales, softmax_scale=1.0)
    weight = others * math.exp(-7)
    torch.testing.assert_close(out.float(), torch.full_like(out, weight / (1 + weight)).float(), rtol=2**-4, atol=0)


@each_tile
@pytest.mark.parametrize("causal", [False, True])
def test_bytes_around_the_inputs_change_nothing(tile, causal):
    case = Fp8Case(2, 130, 200, 4, 2, tile.head_dim - 16, causal)
    (q, k, v), scales = gpu_inputs(case)
    tensors = [q, k, transpose_v(v) if tile.v_transposed else v]
    options = scales | {"causal": causal, "return_lse": True, "v_transposed": tile.v_transposed}

    def surrounded(x: torch.Tensor) -> torch.Tensor:
        batch, rows, columns, last = x.shape
        shape = (batch + 2, rows + 200, columns + 200, last + 64)
        buffer = torch.full(shape, E4M3_NAN, dtype=torch.uint8, device="cuda")
        inside = buffer[1:-1, 100:-100, 100:-100, 16:-48]
        inside.copy_(x.view(torch.uint8))
        return inside.view(E4M3)

    expected = fa3.flash_attn_func(*tensors, **options)
    got = fa3.flash_attn_func(*map(surrounded, tensors), **options)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


@pytest.mark.parametrize("v_transposed", [False, True])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_propagates(name, v_transposed):
    tensors, scales = gpu_inputs(Fp8Case(1, 70, 300, 1, 1, 128))
    tensors["qkv".index(name)].view(torch.uint8)[0, 5, 0, 3] = E4M3_NAN
    out = attend(tensors, scales, v_transposed=v_transposed)
    where = {"q": out[:, 5], "k": out, "v": out[..., 3]}[name]
    assert where.isnan().all()


@each_tile
def test_equal_from_run_to_run(tile):
    tensors, scales = gpu_inputs(Fp8Case(2, 700, 900, 8, 4, tile.head_dim, True))
    options = {"causal": True, "v_transposed": tile.v_transposed}
    first = attend(tensors, scales, **options)
    for _ in range(50):
        assert torch.equal(attend(tensors, scales, **options), first)


def test_graph_replays_with_other_values():
    tensors, scales = gpu_inputs(Fp8Case(2, 300, 400, 4, 2, 128))
    fa3.flash_attn_func(*tensors, **scales)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fa3.flash_attn_func(*tensors, **scales)
    others, other_scales = gpu_inputs(Fp8Case(2, 300, 400, 4, 2, 128))
    for x, y in zip((*tensors, *scales.values()), (*others, *other_scales.values()), strict=True):
        x.copy_(y)
    graph.replay()
    assert torch.equal(out, fa3.flash_attn_func(*others, **other_scales))


@pytest.mark.parametrize("v_transposed", [False, True])
@pytest.mark.parametrize("sizes", [(0, 5, 7), (2, 0, 7), (2, 5, 0)])
def test_empty(sizes, v_transposed):
    batch, seqlen_q, seqlen_k = sizes
    tensors = [torch.zeros(batch, s, 2, 64, device="cuda").to(E4M3) for s in (seqlen_q, seqlen_k, seqlen_k)]
    scales = {f"{name}_descale": torch.ones(batch, 2, device="cuda") for name in "qkv"}
    out, lse = attend(tensors, scales, return_lse=True, v_transposed=v_transposed)
    assert out.shape == (batch, seqlen_q, 2, 64)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_wrong_scales_are_refused_by_the_op():
    tensors, scales = gpu_inputs(Fp8Case())
    wrong = scales | {"k_descale": scales["k_descale"][:, :1]}
    with pytest.raises(RuntimeError, match=r"fwd_fp8: k_descale must have the shape \(2, 2, 2 or 1\), got \(2, 1, 2\)"):
        ops.fwd_fp8(*tensors, *wrong.values(), 1.0, *FULL, False)


def test_wrong_transposed_v_is_refused_by_the_op():
    (q, k, v), scales = gpu_inputs(Fp8Case())
    with pytest.raises(RuntimeError, match=r"fwd_fp8: v must have the shape \(batch, num_heads_kv, head_dim, whole"):
        ops.fwd_fp8(q, k, v, *scales.values(), 1.0, *FULL, False, True)


def test_explain_names_the_kernel():
    (q, k, v), _ = gpu_inputs(Fp8Case(head_dim=96))
    explanation = fa3.explain(q, k, v)
    assert (explanation.path, explanation.backward) == ("hopper", "refused")
    assert explanation.kernel["name"] == "fwd_e4m3_hdim128"
    assert explanation.tile[1] == FP8_SCALE_ROWS


@each_tile
def test_explain_names_every_kernel(tile):
    (q, k, v), _ = gpu_inputs(Fp8Case(head_dim=tile.head_dim))
    explanation = fa3.explain(q, k, transpose_v(v) if tile.v_transposed else v, v_transposed=tile.v_transposed)
    assert explanation.kernel["name"] == f"fwd_e4m3_{tile.name}"
    assert not explanation.copies


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_from_16_bits(head_dim, dtype):
    """Quantized and attended on the GPU, as on the CPU and near the 16-bit attention; gradients straight through."""
    case = Fp8Case(2, 300, 300, 4, 2, head_dim, True)
    q, k, v = case.inputs(dtype, "cuda")
    out = fa3.flash_attn_fp8_func(q, k, v, causal=True, smooth_k=True)
    with fa3.backend("portable"):
        simulated = fa3.flash_attn_fp8_func(q, k, v, causal=True, smooth_k=True)
    exact = fa3.flash_attn_func(q, k, v, causal=True)
    assert out.dtype == dtype
    assert out.shape == exact.shape
    assert rms(out - simulated) <= 0.02 * rms(exact)
    assert rms(out - exact) <= 0.06 * rms(exact)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    dout = torch.randn_like(q)
    grads = torch.autograd.grad(fa3.flash_attn_fp8_func(*leaves, causal=True, straight_through=True), leaves, dout)
    expected = torch.autograd.grad(fa3.flash_attn_func(*leaves, causal=True), leaves, dout)
    for x, y in zip(grads, expected, strict=True):
        assert rms(x - y) <= 0.01 * rms(y)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_compute_sanitizer(tool):
    run_sanitizer(tool, "fp8")
