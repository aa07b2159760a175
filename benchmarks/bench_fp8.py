"""TFLOP/s of the FP8 forward on the papers' grid, beside our bf16 and upstream's FP8. In the repository root, on a GPU:

python -m benchmarks.bench_fp8

fa3               FP8, one scale for each 128 rows of q, k and v; tensors and scales are there
fa3-transposed-v  the same, v as quantize_fp8 writes it with v_transposed, so that the kernel need not transpose it
fa3-bf16          the same values in bf16
fa3-from-bf16     fa3.flash_attn_fp8_func: bf16 in, quantized with incoherent processing, and attended
fa3-fwd           PyPI package fa3-fwd, upstream's FlashAttention-3, FP8 with one scale per batch and head
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib.metadata import version

import torch

import fa3
from benchmarks import cases, report, runner, timing
from benchmarks.cases import Case
from benchmarks.report import OURS, OURS_BF16, OURS_FROM_BF16, OURS_TRANSPOSED_V

UPSTREAM = "fa3-fwd"
TOLERANCE = 0.08  # relative RMS error of FP8; on independent normal values, whose average nearly cancels, about 0.05


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    return runner.parse(runner.grid_parser(__doc__, "fp8", [OURS], timing.DEFAULT_ROUNDS), argv)


def upstream() -> Callable | None:
    try:
        from fa3_fwd_interface import flash_attn_func
    except Exception as error:  # a package that does not fit this torch or driver fails in many ways
        print(f"not installed: {UPSTREAM} ({error})")
        return None
    return flash_attn_func


def all_calls(case: Case, attend_upstream: Callable | None) -> dict[str, Callable[[], torch.Tensor]]:
    q, k, v, _ = case.make_inputs()
    options = {"causal": case.causal}
    blocks = fa3.quantize_fp8(q, k, v, incoherent=False)
    transposed = fa3.quantize_fp8(q, k, v, incoherent=False, v_transposed=True)
    heads = fa3.quantize_fp8(q, k, v, incoherent=False, block_size=None)

    def call(attend: Callable, x: fa3.Fp8Inputs, **more: torch.Tensor | bool) -> Callable[[], torch.Tensor]:
        return lambda: attend(x.q, x.k, x.v, **more, **options)

    calls = {
        OURS: call(fa3.flash_attn_func, blocks, **scales_of(blocks)),
        OURS_TRANSPOSED_V: call(fa3.flash_attn_func, transposed, **scales_of(transposed), v_transposed=True),
        OURS_BF16: lambda: fa3.flash_attn_func(q, k, v, **options),
        OURS_FROM_BF16: lambda: fa3.flash_attn_fp8_func(q, k, v, **options),
    }
    if attend_upstream is not None:
        per_head = {name: scale[:, :, 0] for name, scale in scales_of(heads).items()}
        calls[UPSTREAM] = call(attend_upstream, heads, **per_head)
    return calls


def scales_of(x: fa3.Fp8Inputs) -> dict[str, torch.Tensor]:
    return {"q_descale": x.q_descale, "k_descale": x.k_descale, "v_descale": x.v_descale}


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    results, _, ours_failed = runner.start(args, "float64, of the values before quantization")
    attend_upstream = upstream()
    names = [OURS, OURS_TRANSPOSED_V, OURS_BF16, OURS_FROM_BF16]
    results["providers"] = dict.fromkeys(names, fa3.__version__)
    if attend_upstream is not None:
        results["providers"][UPSTREAM] = version(UPSTREAM)
    timer = timing.LaunchTimer(args.budget_ms)
    results["ceilings"] = timing.measure_ceilings(timer, args.rounds)
    print(f"ceilings: {results['ceilings']}\n\nTFLOP/s\n{report.table_header(list(results['providers']))}")

    problems = runner.Problems()
    for case in cases.grid("bf16", args.head_dims, args.seqlens, args.masks):
        q, k, v, _ = case.make_inputs()
        truth = cases.reference(q, k, v, case.causal)

        def error_of(out: torch.Tensor, truth: torch.Tensor = truth) -> float:
            return ((out.double() - truth).norm() / truth.norm()).item()

        calls, wrong = runner.checked_calls(all_calls(case, attend_upstream), error_of, TOLERANCE)
        timings = timing.time_in_turns(calls, args.rounds, timer)
        row = report.result_row({**case.as_row("fwd"), "dtype": "e4m3"}, case.flops("fwd"), timings)
        runner.add_row(args, results, row)
        print(report.table_row(row, list(results["providers"])), flush=True)
        problems.report(wrong)
    for ours in (OURS, OURS_TRANSPOSED_V):
        print(f"\n{ours} over {UPSTREAM}\n{report.summary(results['rows'], ours)}")
    return runner.finish(args, results, ours_failed or problems.are_ours())


if __name__ == "__main__":
    sys.exit(main())
