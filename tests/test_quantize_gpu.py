"""The quantizer to e4m3 against float64, and against everything else that a call on a GPU promises."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from cases import HALF_DTYPES
from gpu_helpers import (
    FAR,
    in_nan,
    nan_in_new_memory,
    needs_memory,
    offset_by_one,
    packed,
    run_sanitizer,
    wider_by_four,
)
from torch import Tensor
from torch.nn import functional

from fa3 import _library
from fa3.fp8_format import FP8_SCALE_ROWS, transpose_v

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BLOCK = FP8_SCALE_ROWS  # rows that share a scale
LARGEST = 448.0  # of e4m3
HEAD_DIMS = (16, 64, 72, 96, 128, 192, 256)
LENGTHS = (1, 127, 128, 129, 300)


@dataclass(frozen=True)
class Case:
    """One call of fa3::quantize_fp8."""

    head_dim: int = 128
    seqlen: int = 300
    batch: int = 2
    num_heads: int = 3
    rotary_dim: int = 0
    interleaved: bool = False
    float_tables: bool = True  # else of x's dtype
    smooth: bool = False
    width: int = 0  # of the Hadamard transform; 0: none
    block_size: int = BLOCK

    @property
    def name(self) -> str:
        parts = [f"b{self.batch}-s{self.seqlen}-h{self.num_heads}-d{self.head_dim}"]
        if self.rotary_dim:
            kind = ("interleaved" if self.interleaved else "halves") + ("" if self.float_tables else "-16bit")
            parts.append(f"rotary{self.rotary_dim}-{kind}")
        parts += ["smooth"] * self.smooth + [f"hadamard{self.width}"] * (self.width > 0)
        return "-".join([*parts, f"block{self.block_size}"])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.seqlen, self.num_heads, self.head_dim)

    def arguments(self, dtype: torch.dtype = torch.bfloat16) -> dict:
        """Those of the op. A few channels are far from zero, and the heads of different size."""
        x = torch.randn(self.shape, device=DEVICE)
        x[..., 3::20] += 5
        x *= torch.linspace(0.5, 4, self.num_heads, device=DEVICE)[:, None]
        arguments = {"x": x.to(dtype), "signs": None, "cos": None, "sin": None}
        if self.width:
            arguments["signs"] = torch.randint(0, 2, (self.width,), device=DEVICE).float() * 2 - 1
        if self.rotary_dim:
            angles = torch.rand(self.seqlen + 3, self.rotary_dim // 2, device=DEVICE) * 2 * math.pi
            tables = angles.cos(), angles.sin()
            arguments["cos"], arguments["sin"] = (t if self.float_tables else t.to(dtype) for t in tables)
        options = {"rotary_interleaved": self.interleaved, "smooth": self.smooth, "block_size": self.block_size}
        return arguments | options


ids = {"ids": lambda x: x.name if isinstance(x, Case) else str(x).removeprefix("torch.")}


def width_of(head_dim: int) -> int:
    return next(width for width in (64, 128, 256) if width >= head_dim)


def options_of(head_dim: int) -> list[Case]:
    """A case without options, one for each option, and some with all."""
    case = Case(head_dim)
    whole, part = head_dim // 16 * 16, max(16, head_dim // 32 * 16)
    halves = replace(case, rotary_dim=whole)
    transform = {"smooth": True, "width": width_of(head_dim)}
    return [
        case,
        halves,
        replace(case, rotary_dim=part, float_tables=False),
        replace(case, rotary_dim=whole, interleaved=True, float_tables=False),
        replace(case, rotary_dim=part, interleaved=True),
        replace(case, smooth=True),
        replace(case, width=width_of(head_dim)),
        replace(halves, **transform),
        replace(halves, width=width_of(head_dim)),
        replace(halves, width=width_of(head_dim), float_tables=False),
        replace(halves, **transform, interleaved=True),
        replace(case, **transform, rotary_dim=part),
    ]


OPTIONS = [case for head_dim in HEAD_DIMS for case in options_of(head_dim)]
BOTH_SCALES = [replace(case, block_size=block_size) for case in OPTIONS for block_size in (BLOCK, 0)]
EVERYTHING = [
    Case(d, rotary_dim=d, smooth=smooth, width=d, block_size=block_size)
    for smooth in (True, False)  # without, one step does rotary embedding, signs and a stage of the transform
    for d in (64, 128, 256)
    for block_size in (BLOCK, 0)
]
RAGGED = [replace(case, seqlen=seqlen) for case in EVERYTHING for seqlen in LENGTHS]
ODD = [Case(72, rotary_dim=48, smooth=True), Case(16)]
WIDER = [Case(40, width=64), Case(64, width=256), Case(64, width=128, rotary_dim=64, smooth=True), Case(8), Case(248)]


def quantize(**arguments) -> tuple[Tensor, Tensor, Tensor]:
    """x8, descale and mean."""
    _library.load()
    return torch.ops.fa3.quantize_fp8(**arguments)


# --- the reference, step by step, in float64


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    dim = 2 * cos.shape[1]
    cos, sin = (t[: x.shape[1], None].double() for t in (cos, sin))
    first, second = (slice(0, dim, 2), slice(1, dim, 2)) if interleaved else (slice(0, dim // 2), slice(dim // 2, dim))
    a, b = x[..., first], x[..., second]
    out = x.clone()
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def hadamard(width: int) -> Tensor:
    """Sylvester's matrix, orthonormal."""
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64, device=DEVICE)
    matrix = torch.ones(1, 1, dtype=torch.float64, device=DEVICE)
    while len(matrix) < width:
        matrix = torch.kron(pair, matrix)
    return matrix / width**0.5


def reference(
    x: Tensor,
    signs: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    rotary_interleaved: bool,
    smooth: bool,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """What is cast to x8, descale and mean."""
    y = x.double()
    if cos is not None:
        y = rotated(y, cos, sin, rotary_interleaved)
    mean = y.mean(1) if smooth else y.new_empty(0)
    if smooth:
        y = y - mean[:, None]
    if signs is not None:
        y = functional.pad(y, (0, len(signs) - y.shape[3])) * signs.double() @ hadamard(len(signs))
    seqlen = y.shape[1]
    rows = block_size or seqlen
    blocks = functional.pad(y, (0, 0, 0, 0, 0, -seqlen % rows)).unflatten(
        1, (-1, rows)
    )  # (b, blocks, rows, h, columns)
    magnitude = torch.where(blocks.isnan(), 0.0, blocks.abs())
    amax = magnitude.amax((2, 4))
    descale = torch.where(amax == 0, 1.0, amax / LARGEST)
    scaled = (blocks / descale[:, :, None, :, None]).flatten(1, 2)[:, :seqlen]
    return scaled, descale.transpose(1, 2), mean


def ordinal(x8: Tensor) -> Tensor:
    """Numbers that are one apart for neighboring values of e4m3; 0 for both zeros."""
    code = x8.view(torch.uint8).int()
    return torch.where(code < 128, code, 128 - code)


def check(arguments: dict, got: tuple[Tensor, Tensor, Tensor] | None = None) -> None:
    """Asserts that the results are the reference's, but for values that float32 puts on the other side of a tie."""
    x8, descale, mean = quantize(**arguments) if got is None else got
    x, signs = arguments["x"], arguments["signs"]
    batch, seqlen, num_heads, head_dim = x.shape
    assert x8.shape == (batch, seqlen, num_heads, head_dim if signs is None else len(signs))
    assert x8.dtype == torch.float8_e4m3fn
    assert x8.is_contiguous()
    assert descale.dtype == mean.dtype == torch.float32
    assert descale.is_contiguous()
    assert mean.shape == ((batch, num_heads, head_dim) if arguments["smooth"] else (0,))

    scaled, expected_descale, expected_mean = reference(**arguments)
    torch.testing.assert_close(descale.double(), expected_descale, rtol=1e-6, atol=0)
    scale_of_x = x.double().abs().nan_to_num().max().item()
    torch.testing.assert_close(mean.double(), expected_mean, rtol=0, atol=1e-6 * scale_of_x, equal_nan=True)
    expected = scaled.clamp(-LARGEST, LARGEST).float().to(torch.float8_e4m3fn)  # keeps NaN
    is_nan = expected.float().isnan()
    assert torch.equal(x8.float().isnan(), is_nan)
    steps = torch.where(is_nan, 0, ordinal(x8) - ordinal(expected)).abs()
    assert steps.max() <= 1
    assert (steps > 0).float().mean() <= 1e-3


def check_equal(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """To the bit."""
    for name, x, y in zip(("x8", "descale", "mean"), got, expected, strict=True):
        assert x.shape == y.shape, name
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), name


# --- values


@pytest.mark.parametrize("dtype", HALF_DTYPES, **ids)
@pytest.mark.parametrize("case", (*BOTH_SCALES, *RAGGED, *WIDER), **ids)
def test_against_float64(case, dtype):
    check(case.arguments(dtype))


@pytest.mark.parametrize("sizes", [(5, 2000, 40), (1, 10_000, 8), (3, 70, 200)])
@pytest.mark.parametrize("case", EVERYTHING, **ids)
def test_many_tiles_per_cta(case, sizes):
    batch, seqlen, num_heads = sizes
    check(replace(case, batch=batch, seqlen=seqlen, num_heads=num_heads).arguments())


@pytest.mark.parametrize("case", [Case(d, width=d) for d in (64, 128, 256)], **ids)
def test_transform_of_single_columns(case):
    """Each column of x alone gives its row of the Hadamard matrix: no column is in another's place."""
    arguments = replace(case, batch=1, num_heads=1, seqlen=case.head_dim).arguments()
    arguments["x"] = torch.eye(case.head_dim, device=DEVICE).bfloat16()[None, :, None]
    x8, descale, _ = quantize(**arguments)
    columns = arguments["signs"].double()[:, None] * hadamard(case.head_dim)
    assert torch.equal(x8[0, :, 0].double(), LARGEST * columns.sign())
    torch.testing.assert_close(descale, torch.full_like(descale, case.head_dim**-0.5 / LARGEST))


def test_dequantized_values_are_near():
    arguments = Case(rotary_dim=128, smooth=True).arguments()
    x8, descale, mean = quantize(**arguments)
    y = x8.double() * descale.repeat_interleave(BLOCK, 2)[:, :, :300].transpose(1, 2)[..., None] + mean[:, None]
    expected = rotated(arguments["x"].double(), arguments["cos"], arguments["sin"], False)
    assert (y - expected).norm() <= 0.04 * expected.norm()


# --- special values


@pytest.mark.parametrize("block_size", [BLOCK, 0])
@pytest.mark.parametrize(
    "case",
    [
        Case(64),
        Case(128, width=128),
        Case(128, width=128, rotary_dim=128),
        Case(256, smooth=True),
        Case(96, rotary_dim=96),
    ],
    **ids,
)
def test_nan_propagates(case, block_size):
    """To the elements that depend on it, and not to the scale."""
    arguments = replace(case, block_size=block_size).arguments()
    arguments["x"][0, 140, 1, 7] = math.nan
    arguments["x"][1, :, 2] = math.nan  # all of a head
    check(arguments)


def test_block_of_zeros():
    for block_size in (BLOCK, 0):
        arguments = Case(width=128, block_size=block_size).arguments()
        arguments["x"][:, :BLOCK] = 0
        arguments["x"][:, :, 1] = 0
        check(arguments)
        x8, descale, _ = quantize(**arguments)
        assert (descale[:, 1] == 1).all()
        assert (x8[:, :, 1].float() == 0).all()


def test_largest_value_is_448():
    """And not NaN, as what rounds to more would be without saturation."""
    arguments = Case(seqlen=4000, num_heads=8).arguments()
    x8, _, _ = quantize(**arguments)
    assert x8.float().abs().amax((1, 3)).eq(LARGEST).all()
    assert not x8.float().isnan().any()


@pytest.mark.parametrize("dtype", HALF_DTYPES, **ids)
def test_infinity(dtype):
    """Over an infinite scale, what is finite is 0."""
    arguments = Case().arguments(dtype)
    arguments["x"][0, 5, 1, 3] = math.inf
    check(arguments)


@pytest.mark.parametrize("exponent", [-133, -128, -126, -120, -100, 100, 120])
def test_tiny_and_huge_values(exponent):
    """Where amax / 448 has no reciprocal in float32, the scale is the least that has one."""
    arguments = Case(batch=1, num_heads=1).arguments()
    arguments["x"] = (torch.randn(1, 300, 1, 128, device=DEVICE).double() * 2.0**exponent).bfloat16()
    x8, descale, _ = quantize(**arguments)
    least = torch.finfo(torch.float32).tiny
    _, expected, _ = reference(**arguments)
    torch.testing.assert_close(descale.double(), expected.clamp(min=least), rtol=1e-6, atol=0)
    y = x8.double() * descale.double().repeat_interleave(BLOCK, 2)[0, :, :300, None, None]
    x = arguments["x"].double()
    # Half a step: 2^-4 of the value, or, below 2^-6 of a descale, 2^-10 of it.
    assert ((y - x).abs() <= x.abs() / 16 * 1.0001 + descale.max().item() * 2**-10).all()


@pytest.mark.parametrize("view", [lambda x: x, offset_by_one, in_nan], ids=["contiguous", "offset", "in_nan"])
@pytest.mark.parametrize("block_size", [BLOCK, 0])
@pytest.mark.parametrize("seqlen", [*LENGTHS, 5000])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_transposed(head_dim, seqlen, block_size, view):
    """The same values and scales, elsewhere, and zeros after the last row; every byte is written."""
    arguments = Case(head_dim, seqlen, block_size=block_size).arguments()
    x8, descale, _ = quantize(**arguments)
    with nan_in_new_memory():
        transposed = quantize(**arguments | {"x": view(arguments["x"]), "transpose": True})
    expected = transpose_v(x8)
    assert transposed[0].is_contiguous()
    assert torch.equal(transposed[0].view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(transposed[1], descale)


# --- memory around the inputs and outputs


@pytest.mark.parametrize("case", [*EVERYTHING, *ODD], **ids)
def test_nan_around_the_inputs_changes_nothing(case):
    arguments = case.arguments()
    expected = quantize(**arguments)
    arguments["x"] = in_nan(arguments["x"])
    if case.rotary_dim:
        for name in ("cos", "sin"):
            arguments[name][case.seqlen :] = math.nan
    check_equal(quantize(**arguments), expected)


@pytest.mark.parametrize(
    "case", [*EVERYTHING, Case(72, rotary_dim=48, smooth=True), Case(16), Case(8, seqlen=1)], **ids
)
def test_every_element_is_written(case):
    """Outputs and scratch memory hold NaN before the call."""
    arguments = case.arguments()
    expected = quantize(**arguments)
    with nan_in_new_memory():
        got = quantize(**arguments)
    check_equal(got, expected)


VIEWS = {
    "heads_first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sequence_first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "fused_qkv": lambda x: torch.cat([x, x + 1, x - 1], dim=2)[:, :, : x.shape[2]],
    "one_row": lambda x: x[:, :1].expand(x.shape),
    "one_head": lambda x: x[:, :, :1].expand(x.shape),
    "one_batch": lambda x: x[:1].expand(x.shape),
    "offset_by_one": offset_by_one,
    "wider_by_four": wider_by_four,
    "every_other_row": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("case", [EVERYTHING[0], EVERYTHING[3], Case(72)], **ids)
def test_strides_do_not_change_results(case, view):
    arguments = case.arguments()
    x = view(arguments["x"])
    got = quantize(**(arguments | {"x": x}))
    check_equal(got, quantize(**(arguments | {"x": packed(x)[0]})))


def test_strides_of_the_other_arguments():
    arguments = EVERYTHING[2].arguments()
    expected = quantize(**arguments)
    strided = {name: arguments[name].repeat_interleave(2, dim=-1)[..., ::2] for name in ("signs", "sin")}
    strided["cos"] = offset_by_one(arguments["cos"])
    check_equal(quantize(**(arguments | strided)), expected)


def test_odd_strides_of_dimensions_of_size_1():
    arguments = Case(batch=1, seqlen=1, num_heads=1).arguments()
    strided = arguments["x"].as_strided((1, 1, 1, 128), (7, 7, 7, 1))
    check_equal(quantize(**(arguments | {"x": strided})), quantize(**arguments))


# --- sizes


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("block_size", [BLOCK, 0])
@pytest.mark.parametrize("empty", ["batch", "seqlen", "num_heads"])
def test_empty(empty, block_size, smooth):
    case = replace(Case(smooth=smooth, block_size=block_size, width=128), **{empty: 0})
    arguments = case.arguments()
    with nan_in_new_memory():
        x8, descale, mean = quantize(**arguments)
    assert x8.shape == case.shape
    blocks = 1 if block_size == 0 else math.ceil(case.seqlen / BLOCK)
    assert descale.shape == (case.batch, case.num_heads, blocks)
    assert mean.shape == ((case.batch, case.num_heads, case.head_dim) if smooth else (0,))
    assert (descale == 1).all()
    assert (mean == 0).all()


@pytest.mark.parametrize("block_size", [BLOCK, 0])
@pytest.mark.parametrize("sizes", [(70_000, 1, 1), (2, 3, 66_000), (700, 2, 100)])
def test_more_than_65535_heads(sizes, block_size):
    batch, seqlen, num_heads = sizes
    check(Case(64, seqlen, batch, num_heads, rotary_dim=64, smooth=True, width=64, block_size=block_size).arguments())


@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_strides_beyond_32_bits(dimension):
    needs_memory(8)
    shape = (2, 130, 2, 64)
    strides = [130 * 2 * 64, 2 * 64, 64, 1]
    strides[dimension] = FAR // (shape[dimension] - 1) // 64 * 64 + 64
    buffer = torch.full((FAR + FAR // 32,), math.nan, dtype=torch.bfloat16, device=DEVICE)
    arguments = Case(64, 130, 2, 2, rotary_dim=64, smooth=True, width=64).arguments()
    x = buffer.as_strided(shape, strides).copy_(arguments["x"])
    check_equal(quantize(**(arguments | {"x": x})), quantize(**arguments))


@pytest.mark.parametrize("block_size", [BLOCK, 0])
def test_output_beyond_32_bits(block_size):
    """More than 2^31 elements, from an input that is one batch in memory."""
    needs_memory(16)
    arguments = Case(128, 1000, 1, 16, rotary_dim=128, smooth=True, width=128, block_size=block_size).arguments()
    batch = FAR // (1000 * 16 * 128) + 2
    x8, descale, mean = quantize(**(arguments | {"x": arguments["x"].expand(batch, -1, -1, -1)}))
    assert x8.numel() > FAR
    one = quantize(**arguments)
    for x, y in zip((x8, descale, mean), one, strict=True):
        assert all(torch.equal(part.view(torch.uint8), y.expand_as(part).view(torch.uint8)) for part in x.split(64))


# --- repeats, streams, graphs, devices


@pytest.mark.parametrize("case", [replace(c, seqlen=1500, num_heads=8) for c in EVERYTHING], **ids)
def test_repeats_are_bit_equal(case, busy_stream):
    arguments = case.arguments()
    first = quantize(**arguments)
    for repeat in range(100):
        if repeat % 2:
            busy_stream()
        check_equal(quantize(**arguments), first)


@pytest.mark.parametrize("case", EVERYTHING, **ids)
def test_runs_on_the_current_stream(case):
    """After what that stream still has to do, which other streams do not wait for."""
    arguments, later = case.arguments(), case.arguments()["x"]
    expected = quantize(**(arguments | {"x": later}))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # clock cycles, about 10 ms
        arguments["x"].copy_(later)
        got = quantize(**arguments)
    stream.synchronize()
    check_equal(got, expected)


@pytest.mark.parametrize("case", EVERYTHING, **ids)
def test_cuda_graph(case):
    """Captured once, and replayed with other values."""
    arguments = case.arguments()
    quantize(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = quantize(**arguments)
    for _ in range(3):
        arguments["x"].copy_(torch.randn_like(arguments["x"]))
        for x in got:
            x.view(torch.uint8).fill_(255)
        graph.replay()
        check_equal(got, quantize(**arguments))


def test_another_device_than_the_current_one(gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", (gpu.index + 1) % torch.cuda.device_count())
    arguments = EVERYTHING[3].arguments()
    got = quantize(**{name: x.to(other) if isinstance(x, Tensor) else x for name, x in arguments.items()})
    assert torch.cuda.current_device() == gpu.index
    assert all(x.device == other for x in got)
    check_equal([x.to(gpu) for x in got], quantize(**arguments))


def test_no_call_waits_for_the_gpu():
    """Asked of CUDA: it raises where a call of torch's synchronizes."""
    arguments = [case.arguments() for case in EVERYTHING]
    for each in arguments:
        quantize(**each)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for each in arguments:
            quantize(**each)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_compute_sanitizer(tool):
    run_sanitizer(tool, "quantize")


# --- checks


def tables(rows: int, half: int, **options) -> dict:
    return {name: torch.ones(rows, half, device=DEVICE, **options) for name in ("cos", "sin")}


def signs(size: int, **options) -> dict:
    return {"signs": torch.ones(size, device=DEVICE, **options)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {"x": x.float()}, "x must be float16 or bfloat16"),
        (lambda x: {"x": x[0]}, r"x must have 4 dimensions .*, got \(300, 3, 128\)"),
        (lambda x: {"x": x.mT}, "x must have a contiguous last dimension, got stride 128"),
        (lambda x: {"x": x[..., :100]}, "x must have a head_dim that is a multiple of 8 from 8 to 256, got 100"),
        (lambda x: {"x": x.repeat(1, 1, 1, 3)}, "x must have a head_dim .*, got 384"),
        (lambda x: {"block_size": 64}, "block_size must be 0 or 128, got 64"),
        (lambda x: signs(64), r"signs must have 64, 128 or 256 entries, at least x's head_dim 128, got \(64\)"),
        (lambda x: signs(192), r"signs must have 64, 128 or 256 entries, .* got \(192\)"),
        (lambda x: signs(128, dtype=x.dtype), "signs must be float32"),
        (lambda x: {"signs": torch.ones(128)}, "signs must be on a CUDA device"),
        (lambda x: signs(128) | {"transpose": True}, "transpose must be false with signs, cos or smooth"),
        (lambda x: {"smooth": True, "transpose": True}, "transpose must be false with signs, cos or smooth"),
        (lambda x: {"cos": tables(300, 64)["cos"]}, "sin must be given with cos, and only then, got cos alone"),
        (lambda x: {"sin": tables(300, 64)["sin"]}, "sin must be given with cos, and only then, got sin alone"),
        (lambda x: tables(299, 64), r"cos must have the shape \(at least 300, rotary_dim / 2\), got \(299, 64\)"),
        (lambda x: tables(300, 60), "cos must have a rotary_dim that is a multiple of 16 .* 128, got 120"),
        (lambda x: tables(300, 72), "cos must have a rotary_dim that is a multiple of 16 .* 128, got 144"),
        (lambda x: tables(300, 64, dtype=torch.float64), "cos must be float32 or have x's dtype"),
        (lambda x: tables(300, 64) | {"sin": torch.ones(300, 64)}, "sin must be on a CUDA device"),
        (lambda x: tables(300, 64) | {"sin": tables(301, 64)["sin"]}, "sin must have cos's shape"),
        (lambda x: tables(300, 64) | {"sin": tables(300, 64, dtype=x.dtype)["sin"]}, "sin must have cos's dtype"),
    ],
)
def test_checks(change, message):
    arguments = Case().arguments()
    with pytest.raises(RuntimeError, match=f"quantize_fp8: {message}"):
        quantize(**(arguments | change(arguments["x"])))
