"""What a benchmark says of itself (machine, versions, commit), and how its results are printed and kept."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
from pathlib import Path
from statistics import geometric_mean

import torch

from benchmarks.timing import Timing

ROOT = Path(__file__).resolve().parent.parent
OURS = "fa3"
OURS_DETERMINISTIC = "fa3-deterministic"
OURS_BF16, OURS_FROM_BF16 = "fa3-bf16", "fa3-from-bf16"  # beside FP8
OURS_TRANSPOSED_V = "fa3-transposed-v"  # FP8
ALL_OURS = (OURS, OURS_DETERMINISTIC, OURS_BF16, OURS_FROM_BF16, OURS_TRANSPOSED_V)  # no peers


def measured_commit() -> str:
    """The commit of this tree, "-dirty" if tracked files differ from it; FA3_COMMIT for a copy without git."""
    if (ROOT / ".git").exists():
        changes = _output("git", "-C", str(ROOT), "status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results")
        sha = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
        if sha:
            return f"{sha}-dirty" if changes else sha
    if os.environ.get("FA3_COMMIT"):
        return os.environ["FA3_COMMIT"]
    raise SystemExit("no commit to record: git names none for this tree; pass --commit SHA or set FA3_COMMIT")


def environment(device: str = "cuda") -> dict[str, str | None]:
    if device == "cpu":
        return {"date": _now(), "gpu": "cpu", "driver": None, "torch": torch.__version__, "cuda": None}
    if not torch.cuda.is_available():
        raise SystemExit("a benchmark needs a CUDA GPU, torch finds none")
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return {
        "date": _now(),
        "gpu": torch.cuda.get_device_name(),
        "driver": driver[0] if driver else "unknown",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def gpu_slug(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def result_row(case_fields: dict, flops: int, timings: dict[str, Timing]) -> dict:
    """One row of the results file: the case, then milliseconds and TFLOP/s by provider."""
    return {
        **case_fields,
        "ms": {name: round(timing.ms, 5) for name, timing in timings.items()},
        "tflops": {name: round(flops / timing.ms / 1e9, 1) for name, timing in timings.items()},
        **spread(timings),
    }


def spread(timings: dict[str, Timing]) -> dict:
    return {
        "ms_p20": {name: round(timing.ms_p20, 5) for name, timing in timings.items()},
        "ms_p80": {name: round(timing.ms_p80, 5) for name, timing in timings.items()},
    }


def ratio(row: dict, ours: str = OURS) -> float | None:
    """Our speed over that of the best peer of the row; None without us or without peers."""
    peers = [ms for name, ms in row["ms"].items() if name not in ALL_OURS]
    return min(peers) / row["ms"][ours] if ours in row["ms"] and peers else None


def deterministic_cost(row: dict) -> float | None:
    """How much longer than the default mode our deterministic mode takes, as a part of 1; None without both."""
    ms = row["ms"]
    return ms[OURS_DETERMINISTIC] / ms[OURS] - 1 if OURS in ms and OURS_DETERMINISTIC in ms else None


def table_header(providers: list[str]) -> str:
    columns = "".join(f"{name:>{column_width(name)}}" for name in providers)
    return f"pass    dtype head_dim   mask seqlen batch heads |{columns} | fa3/best peer  deterministic"


def table_row(row: dict, providers: list[str]) -> str:
    columns = "".join(f"{row['tflops'].get(name, '-'):>{column_width(name)}}" for name in providers)
    case = f"{row['pass']:7} {row['dtype']:5} {row['head_dim']:8} {mask_name(row['causal']):>6} {row['seqlen']:6}"
    share, cost = ratio(row), deterministic_cost(row)
    ratios = f"{'-' if share is None else f'{share:.3f}':>13}  {'-' if cost is None else f'{cost:+.1%}':>13}"
    return f"{case} {row['batch']:5} {row['heads']:5} |{columns} | {ratios}"


def column_width(name: str) -> int:
    return max(13, len(name) + 1)


def summary(rows: list[dict], ours: str = OURS) -> str:
    """Geometric mean and minimum of the ratio to the best peer, per head_dim and over all."""
    lines = []
    for title, group in head_dim_groups(rows):
        ratios = [(share, row) for row in group if (share := ratio(row, ours)) is not None]
        if ratios:
            least, row = min(ratios, key=lambda pair: pair[0])
            mean = geometric_mean([share for share, _ in ratios])
            lines.append(f"{title}: geometric mean {mean:.3f}, minimum {least:.3f} ({where(row)}), {len(ratios)} cells")
    return "\n".join(lines) or f"no cell has both {ours} and a peer"


def deterministic_summary(rows: list[dict]) -> str:
    """Geometric mean and maximum of what the deterministic mode costs; empty where it was not measured."""
    lines = []
    for title, group in head_dim_groups(rows):
        costs = [(cost, row) for row in group if (cost := deterministic_cost(row)) is not None]
        if costs:
            most, row = max(costs, key=lambda pair: pair[0])
            mean = geometric_mean([1 + cost for cost, _ in costs]) - 1
            lines.append(f"{title}: geometric mean {mean:+.1%}, maximum {most:+.1%} ({where(row)}), {len(costs)} cells")
    return "\n".join(lines)


def head_dim_groups(rows: list[dict]) -> list[tuple[str, list[dict]]]:
    head_dims = sorted({row["head_dim"] for row in rows})
    groups = [(f"head_dim {head_dim}", [row for row in rows if row["head_dim"] == head_dim]) for head_dim in head_dims]
    return [(f"{title:>12}", group) for title, group in [*groups, ("all", rows)]]


def where(row: dict) -> str:
    return f"head_dim {row['head_dim']}, {mask_name(row['causal'])}, seqlen {row['seqlen']}"


def mask_name(causal: bool) -> str:
    return "causal" if causal else "full"


def write_json(path: Path, results: dict) -> None:
    """One row a line, so that a new measurement reads well as a diff."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {name: value for name, value in results.items() if name != "rows"}
    rows = ",\n  ".join(json.dumps(row) for row in results["rows"])
    path.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n')


def _output(*command: str) -> str:
    """What the command prints; empty if it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
