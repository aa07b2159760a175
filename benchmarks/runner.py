"""What the benchmarks share: arguments, the check before the timing, the grid of the papers, the results file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import torch

from benchmarks import cases, report, timing
from benchmarks.cases import Case
from benchmarks.providers import LOADERS, Provider, load_providers
from benchmarks.report import ALL_OURS, OURS

Tensors = tuple[torch.Tensor, ...]


def argument_parser(description: str, name: str, providers: Sequence[str], rounds: int) -> argparse.ArgumentParser:
    """The arguments of every benchmark that times; `name` as in add_results_arguments, `providers` the default ones."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--budget-ms", type=float, default=timing.DEFAULT_BUDGET_MS, help="per provider and round")
    if len(providers) > 1:
        parser.add_argument("--providers", nargs="+", choices=LOADERS, default=list(providers))
    parser.set_defaults(providers=list(providers))
    add_results_arguments(parser, name)
    return parser


def add_results_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Where the results go, and the commit that they name; `name` is that of the results file."""
    parser.add_argument("--out-dir", type=Path, default=report.ROOT / "benchmarks" / "results")
    parser.add_argument("--json", type=Path, help=f"results file (default: <out-dir>/<gpu>/{name}.json)")
    parser.add_argument("--commit", help="commit of the measured code (default: from git, else FA3_COMMIT)")
    parser.set_defaults(name=name)


def grid_parser(description: str, name: str, providers: Sequence[str], rounds: int) -> argparse.ArgumentParser:
    parser = argument_parser(description, name, providers, rounds)
    parser.add_argument("--head-dims", type=int, nargs="+", default=cases.HEAD_DIMS)
    parser.add_argument("--seqlens", type=int, nargs="+", default=cases.SEQLENS)
    parser.add_argument("--causal", action="store_true", help="the causal mask (default: both masks)")
    parser.add_argument("--full", action="store_true", help="no mask (default: both masks)")
    parser.add_argument("--dtype", choices=cases.DTYPES, default="bf16")
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    args = parser.parse_args(argv)
    if args.rounds < timing.MIN_ROUNDS:
        parser.error(f"--rounds must be at least {timing.MIN_ROUNDS}, got {args.rounds}")
    if hasattr(args, "full"):
        args.masks = [causal for causal, asked in ((False, args.full), (True, args.causal)) if asked] or [False, True]
    return args


def start(args: argparse.Namespace, checked_against: str) -> tuple[dict, list[Provider], bool]:
    """The results without their rows, the providers, and whether one of ours is missing; prints all of it."""
    providers, missing = load_providers(args.providers)
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
    print(f"checked against {checked_against} before timing")
    print("providers: " + ", ".join(f"{name} {number}" for name, number in results["providers"].items()))
    for name, reason in missing.items():
        print(f"not installed: {name} ({reason})")
    return results, providers, OURS in missing


def results_path(args: argparse.Namespace, results: dict) -> Path:
    return args.json or args.out_dir / report.gpu_slug(results["gpu"]) / f"{args.name}.json"


def add_row(args: argparse.Namespace, results: dict, row: dict) -> None:
    """Adds the row, also to <results file>.partial, which is what a run that is stopped leaves."""
    results["rows"].append(row)
    path = results_path(args, results)
    report.write_json(path.with_name(f"{path.name}.partial"), results)


def finish(args: argparse.Namespace, results: dict, ours_failed: bool) -> int:
    """Writes the file; the exit status."""
    path = results_path(args, results)
    path.with_name(f"{path.name}.partial").unlink(missing_ok=True)
    if ours_failed:
        print("fa3 is missing, refused a case or was wrong: no results written", file=sys.stderr)
        return 1
    report.write_json(path, results)
    print(f"written: {path}")
    return 0


def checked_calls(
    calls: dict[str, Callable[[], object]], error_of: Callable[[object], float], tolerance: float
) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """The calls whose result is right, and what is wrong with each other one."""
    right, problems = {}, {}
    for name, call in calls.items():
        try:
            error = error_of(call())
        except Exception as refusal:  # each peer has its own way to refuse, assertions among them
            problems[name] = f"refuses: {(str(refusal) or repr(refusal)).splitlines()[0]}"
            continue
        if error <= tolerance:  # false for NaN
            right[name] = call
        else:
            problems[name] = f"is WRONG: error {error:.2e}, allowed {tolerance:.2e}"
    return right, problems


class Problems:
    """Prints each problem once, though many cells may have it, and remembers whether one is ours."""

    def __init__(self):
        self.reported: set[tuple[str, str]] = set()

    def report(self, problems: dict[str, str]) -> None:
        for name, problem in problems.items() - self.reported:
            print(f"     {name} {problem}")
        self.reported |= problems.items()

    def are_ours(self) -> bool:
        return any(name in ALL_OURS for name, _ in self.reported)


def pass_call(pass_name: str, provider: Provider, q, k, v, dout, causal: bool) -> Callable[[], Tensors]:
    """What is timed: the forward without gradients, all that autograd runs for them after a forward, or both."""
    if pass_name == "fwd":
        return torch.no_grad()(lambda: (provider.forward(q, k, v, causal),))
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    forward = partial(provider.forward, *inputs, causal)
    if pass_name == "fwd+bwd":
        return lambda: torch.autograd.grad(forward(), inputs, dout)
    kept = cache(forward)  # it runs with the first call, where a refusal is expected
    return lambda: torch.autograd.grad(kept(), inputs, dout, retain_graph=True)


def checked_pass(pass_name: str, case: Case, providers: list[Provider]):
    """checked_calls of one cell, compared with float64."""
    q, k, v, dout = case.make_inputs()
    if pass_name == "fwd":
        rows, expected = 1, (cases.reference(q, k, v, case.causal),)
    else:
        rows, expected = cases.GRADIENT_ROWS, cases.reference_gradients(q, k, v, dout, case.causal)

    def error_of(results: Tensors) -> float:
        errors = [cases.worst_error(x, truth, rows) for x, truth in zip(results, expected, strict=True)]
        return float(torch.tensor(errors).max())  # NaN stays NaN

    calls = {provider.name: pass_call(pass_name, provider, q, k, v, dout, case.causal) for provider in providers}
    return checked_calls(calls, error_of, cases.tolerance(case.dtype))


def run_grid(args: argparse.Namespace, passes: Sequence[str]) -> int:
    """Measures the passes on the grid, prints the table and the summary, and writes the results file."""
    results, providers, ours_failed = start(args, "float64")
    print(f"FLOPs: {cases.FLOP_FORMULA}; inputs: standard normal")
    names = [provider.name for provider in providers]
    timer = timing.LaunchTimer(args.budget_ms)
    results["ceilings"] = timing.measure_ceilings(timer, args.rounds)
    print(f"ceilings: {results['ceilings']}\n\nTFLOP/s\n{report.table_header(names)}")

    problems = Problems()
    for pass_name in passes:
        for case in cases.grid(args.dtype, args.head_dims, args.seqlens, args.masks):
            calls, wrong = checked_pass(pass_name, case, providers)
            timings = timing.time_in_turns(calls, args.rounds, timer)
            row = report.result_row(case.as_row(pass_name), case.flops(pass_name), timings)
            add_row(args, results, row)
            print(report.table_row(row, names), flush=True)
            problems.report(wrong)

    for pass_name in passes:
        rows = [row for row in results["rows"] if row["pass"] == pass_name]
        print(f"\n{pass_name}: fa3 over the best peer\n{report.summary(rows)}")
        if cost := report.deterministic_summary(rows):
            print(f"{pass_name}: time that the deterministic mode adds\n{cost}")
    return finish(args, results, ours_failed or problems.are_ours())
