"""GB/s of the quantizer to e4m3 (fa3::quantize_fp8), for rotary embedding alone and with all that it can do besides.

From the repository root, on a GPU:

python -m benchmarks.bench_quantize

Bytes are those of the input, read once, and of the outputs. Subtracting the mean reads the input twice; the second time
is not counted. `copy` is a copy of as many bytes, both ways counted.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from functools import partial

import torch

from benchmarks import cases, report, runner, timing
from fa3 import _library
from fa3.fp8_format import untranspose_v

ROUNDS = 7
BLOCK = 128  # rows that share a scale
# Of a row. e4m3 has 3 bits after the first: roundings of up to 1 in 16, of 1 in 38 as the mean of their squares.
TOLERANCE = 0.06
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Variant:
    rotary: bool = True
    float_tables: bool = True
    smooth: bool = False
    hadamard: bool = False
    block_size: int = BLOCK
    transpose: bool = False


VARIANTS = {
    "cast": Variant(rotary=False),
    "transposed": Variant(rotary=False, transpose=True),  # as flash_attn_fp8_func does V
    "rotary": Variant(),
    "rotary-16bit": Variant(float_tables=False),
    "+hadamard": Variant(hadamard=True),
    "+smooth": Variant(hadamard=True, smooth=True),
    "head-scale": Variant(hadamard=True, block_size=0),
}


NAMES = [*VARIANTS, "copy"]


@dataclass(frozen=True)
class Case:
    batch: int
    seqlen: int
    hidden: int
    head_dim: int

    @property
    def heads(self) -> int:
        return self.hidden // self.head_dim

    def as_row(self) -> dict:
        return {"pass": "quantize", "dtype": "bf16", **asdict(self), "heads": self.heads}

    def inputs(self, device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, signs and the tables of a rotary embedding."""
        torch.manual_seed(0)
        x = torch.randn(self.batch, self.seqlen, self.heads, self.head_dim, device=device, dtype=torch.bfloat16)
        signs = torch.randint(0, 2, (self.head_dim,), device=device) * 2.0 - 1
        frequencies = 500_000.0 ** -(torch.arange(0, self.head_dim, 2, device=device) / self.head_dim)
        angles = torch.outer(torch.arange(self.seqlen, device=device), frequencies)
        return x, signs, angles.cos(), angles.sin()


SIZES = [(2, 8192, 2048), (8, 8192, 4096), (1, 131_072, 4096)]  # batch, seqlen, hidden
CASES = [Case(*size, head_dim) for size in SIZES for head_dim in cases.HEAD_DIMS]


def arguments(variant: Variant, x: torch.Tensor, signs: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> dict:
    """Those of the op."""
    cos, sin = ((t if variant.float_tables else t.to(x.dtype)) if variant.rotary else None for t in (cos, sin))
    return {
        "x": x,
        "signs": signs if variant.hadamard else None,
        "cos": cos,
        "sin": sin,
        "rotary_interleaved": False,
        "smooth": variant.smooth,
        "block_size": variant.block_size,
        "transpose": variant.transpose,
    }


def quantize(**arguments) -> Tensors:
    """x8, descale and mean."""
    _library.load()
    return torch.ops.fa3.quantize_fp8(**arguments)


def transformed(
    x: torch.Tensor,
    signs: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    smooth: bool,
    **others,
) -> torch.Tensor:
    """What is cast, in float64."""
    y = x.double()
    if cos is not None:
        (a, b), cos, sin = y.chunk(2, dim=-1), cos[:, None].double(), sin[:, None].double()
        y = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    if smooth:
        y -= y.mean(1, keepdim=True)
    if signs is not None:
        matrix = torch.ones(1, 1, dtype=torch.float64, device=x.device)
        while len(matrix) < len(signs):
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        y = y * signs.double() @ matrix / len(signs) ** 0.5
    return y


def worst_error(results: Tensors, expected: torch.Tensor, transpose: bool) -> float:
    """Largest relative error of a row of a head."""
    x8, descale, _ = results
    seqlen = expected.shape[1]
    x8 = untranspose_v(x8, seqlen) if transpose else x8
    descale = descale.expand(-1, -1, -(-seqlen // BLOCK)).repeat_interleave(BLOCK, dim=2)[:, :, :seqlen]
    return cases.worst_error(x8.double() * descale.transpose(1, 2)[..., None], expected)


def checked_variants(case: Case, device: str = "cuda") -> tuple[dict, dict[str, str], int]:
    """The calls whose results are right, what is wrong with each other one, and the bytes of a call."""
    inputs = case.inputs(device)
    calls, problems = {}, {}
    for name, variant in VARIANTS.items():
        given = arguments(variant, *inputs)
        error_of = partial(worst_error, expected=transformed(**given), transpose=variant.transpose)
        right, wrong = runner.checked_calls({name: partial(quantize, **given)}, error_of, TOLERANCE)
        calls, problems = calls | right, problems | wrong
    x = inputs[0]
    moved = x.nbytes + x.numel() + case.batch * case.heads * -(-case.seqlen // BLOCK) * 4  # x, x8, descale
    source, target = (torch.empty(moved // 2, dtype=torch.uint8, device=device) for _ in range(2))
    return calls | {"copy": lambda: target.copy_(source)}, problems, moved


def result_row(case: Case, moved: int, copy_gbps: float, timings: dict[str, timing.Timing]) -> dict:
    speeds = {name: moved / timing.ms / 1e6 for name, timing in timings.items()}
    return {
        **case.as_row(),
        "ms": {name: round(timing.ms, 5) for name, timing in timings.items()},
        "gbps": {name: round(speed) for name, speed in speeds.items()},
        "share_of_copy": {name: round(speed / copy_gbps, 3) for name, speed in speeds.items()},
        **report.spread(timings),
    }


def table_row(row: dict) -> str:
    shape = " ".join(f"{row[name]:{len(name)}}" for name in ("batch", "seqlen", "hidden", "head_dim"))
    speeds, shares = row["gbps"], row["share_of_copy"]
    columns = {name: f"{speeds[name]} {shares[name]:4.0%}" if name in speeds else "-" for name in NAMES}
    return f"{shape} |" + "".join(f"{text:>{report.column_width(name)}}" for name, text in columns.items())


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = runner.argument_parser(__doc__, "fp8_quantize", ["fa3"], ROUNDS)
    parser.add_argument("--head-dims", type=int, nargs="+", choices=cases.HEAD_DIMS, default=cases.HEAD_DIMS)
    return runner.parse(parser, argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    results, _, failed = runner.start(args, "float64, what x8 * descale is")
    timer = timing.LaunchTimer(args.budget_ms)
    results["ceilings"] = timing.measure_ceilings(timer, args.rounds)
    columns = "".join(f"{name:>{report.column_width(name)}}" for name in NAMES)
    print(f"ceilings: {results['ceilings']}\n\nGB/s, and share of the copy's above")
    print(f"batch seqlen hidden head_dim |{columns}")
    problems = runner.Problems()
    for case in CASES:
        if case.head_dim in args.head_dims:
            calls, wrong, moved = checked_variants(case)
            timings = timing.time_in_turns(calls, args.rounds, timer)
            row = result_row(case, moved, results["ceilings"]["copy_gbps"], timings)
            runner.add_row(args, results, row)
            print(table_row(row), flush=True)
            problems.report(wrong)
    return runner.finish(args, results, failed or bool(problems.reported))


if __name__ == "__main__":
    sys.exit(main())
