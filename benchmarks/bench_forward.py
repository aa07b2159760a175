"""TFLOP/s of the attention forward on the papers' grid, fa3 beside its peers. From the repository root, on a GPU:

python -m benchmarks.bench_forward
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

from benchmarks import cases, report, timing
from benchmarks.cases import Case
from benchmarks.providers import LOADERS, Provider, load_providers
from benchmarks.report import OURS


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=cases.HEAD_DIMS)
    parser.add_argument("--seqlens", type=int, nargs="+", default=cases.SEQLENS)
    parser.add_argument("--causal", action="store_true", help="the causal mask (default: both masks)")
    parser.add_argument("--full", action="store_true", help="no mask (default: both masks)")
    parser.add_argument("--dtype", choices=cases.DTYPES, default="bf16")
    parser.add_argument("--rounds", type=int, default=timing.DEFAULT_ROUNDS)
    parser.add_argument("--budget-ms", type=float, default=timing.DEFAULT_BUDGET_MS, help="per provider and round")
    parser.add_argument("--providers", nargs="+", choices=LOADERS, default=list(LOADERS))
    parser.add_argument("--out-dir", type=Path, default=report.ROOT / "benchmarks" / "results")
    parser.add_argument("--json", type=Path, help="results file (default: <out-dir>/<gpu>/forward.json)")
    parser.add_argument("--commit", help="commit of the measured code (default: from git, else FA3_COMMIT)")
    args = parser.parse_args(argv)
    if args.rounds < timing.MIN_ROUNDS:
        parser.error(f"--rounds must be at least {timing.MIN_ROUNDS}, got {args.rounds}")
    args.masks = [causal for causal, asked in ((False, args.full), (True, args.causal)) if asked] or [False, True]
    return args


def checked_calls(case: Case, providers: list[Provider]) -> tuple[dict[str, partial], dict[str, str]]:
    """A call for each provider whose output is right, and what is wrong with each other one."""
    q, k, v = case.make_inputs()
    expected = cases.reference(q, k, v, case.causal)
    calls, problems = {}, {}
    for provider in providers:
        call = partial(provider.forward, q, k, v, case.causal)
        try:
            error = cases.worst_row_error(call(), expected)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as refusal:
            problems[provider.name] = f"refuses: {str(refusal).splitlines()[0]}"
            continue
        if error <= cases.tolerance(case.dtype):  # false for NaN
            calls[provider.name] = call
        else:
            problems[provider.name] = f"is WRONG: row error {error:.2e}, allowed {cases.tolerance(case.dtype):.2e}"
    return calls, problems


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    if not torch.cuda.is_available():
        raise SystemExit("bench_forward needs a CUDA GPU, torch finds none")
    providers, missing = load_providers(args.providers)
    names = [provider.name for provider in providers]
    results = {
        "commit": args.commit or report.measured_commit(),
        **report.environment(),
        "method": timing.method(args.rounds, args.budget_ms),
        "ceilings": {},
        "providers": {provider.name: provider.version for provider in providers},
        "rows": [],
    }
    print(f"{results['gpu']}, driver {results['driver']}, CUDA {results['cuda']}, torch {results['torch']}")
    print(f"commit {results['commit']}, {results['date']}")
    print(f"timer: {results['method']}")
    print(f"FLOPs: {cases.FLOP_FORMULA}; inputs: standard normal; outputs checked against float64 before timing")
    print("providers: " + ", ".join(f"{name} {number}" for name, number in results["providers"].items()))
    for name, reason in missing.items():
        print(f"not installed: {name} ({reason})")

    timer = timing.LaunchTimer(args.budget_ms)
    results["ceilings"] = timing.measure_ceilings(timer, args.rounds)
    print(f"ceilings: {results['ceilings']}\n\nTFLOP/s\n{report.table_header(names)}")

    ours_failed = OURS in missing
    reported: set[tuple[str, str]] = set()  # a problem of many cells is printed once
    for case in cases.grid(args.dtype, args.head_dims, args.seqlens, args.masks):
        calls, problems = checked_calls(case, providers)
        row = report.result_row(case.as_row(), case.flops, timing.time_in_turns(calls, args.rounds, timer))
        results["rows"].append(row)
        print(report.table_row(row, names), flush=True)
        for name, problem in problems.items() - reported:
            print(f"     {name} {problem}")
        reported |= problems.items()
        ours_failed |= OURS in problems

    print(f"\nfa3 over the best peer\n{report.summary(results['rows'])}")
    if ours_failed:
        print("fa3 is missing, refused a case or was wrong: no results written", file=sys.stderr)
        return 1
    path = args.json or args.out_dir / report.gpu_slug(results["gpu"]) / "forward.json"
    report.write_json(path, results)
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
