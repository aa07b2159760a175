"""What `python -m fa3` shows: versions, GPUs, whether the kernels can run, and the kernels that were built."""

from __future__ import annotations

import platform
import subprocess
from typing import Any

import torch

import fa3
from fa3 import _library

KERNEL_COLUMNS = {
    "pass": lambda row: row["pass"],
    "dtype": lambda row: row["dtype"],
    "head_dim": lambda row: row["head_dim"],
    "tile": lambda row: f"{row['tile_m']} x {row['tile_n']}",
    "stages": lambda row: row["stages"],
    "warpgroups": lambda row: f"1 + {row['consumer_warpgroups']}",
    "registers": lambda row: row.get("registers", "-"),
    "shared memory": lambda row: f"{row['smem_bytes'] / 1024:.1f} KB",
    "spills": lambda row: _spills(row),
}


def collect() -> dict[str, Any]:
    """Everything the report says, as values that JSON can hold."""
    reason = _library.unavailable_reason()
    build = _library.build_report()
    return {
        "fa3": fa3.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": _cudnn_version(),
        "driver": _driver_version(),
        "gpus": _gpus(),
        "available": reason is None,
        "unavailable_reason": reason,
        "library_loaded": _library.is_loaded(),
        "build": {key: build.get(key) for key in ("built", "nvcc", "torch_headers", "cutlass", "ptxas_messages")},
        "kernels": _library.kernel_table(),
    }


def render(report: dict[str, Any]) -> str:
    """The report as plain text."""
    lines = [
        _field("fa3", report["fa3"]),
        _field("python", report["python"]),
        _field("torch", f"{report['torch']} (CUDA {report['cuda'] or '-'}, cuDNN {report['cudnn'] or '-'})"),
        _field("driver", report["driver"] or "none found"),
    ]
    for gpu in report["gpus"]:
        lines.append(_field(f"cuda:{gpu['index']}", f"{gpu['name']}, compute capability {gpu['capability']}"))
    available, reason = report["available"], report["unavailable_reason"]
    lines.append(_field("kernels", "available" if available else f"not available: {reason}"))
    build = report["build"]
    if build["built"]:
        built_with = f"nvcc {build['nvcc']}, torch {build['torch_headers']} headers, CUTLASS {build['cutlass']}"
        lines.append(_field("built with", built_with))
        lines += [_field("ptxas", message) for message in build["ptxas_messages"]]
    if report["kernels"]:
        lines += ["", *_table(report["kernels"])]
    return "\n".join(lines)


def _field(name: str, value: str) -> str:
    return f"{name:<12}{value}"


def _table(kernels: list[dict[str, Any]]) -> list[str]:
    rows = [list(KERNEL_COLUMNS), *([str(cell(row)) for cell in KERNEL_COLUMNS.values()] for row in kernels)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(KERNEL_COLUMNS))]
    return ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]


def _spills(row: dict[str, Any]) -> str:
    if "spill_stores_bytes" not in row:
        return "-"
    stores, loads = row["spill_stores_bytes"], row["spill_loads_bytes"]
    return "none" if stores == loads == 0 else f"{stores} B out, {loads} B in"


def _gpus() -> list[dict[str, Any]]:
    return [
        {
            "index": index,
            "name": torch.cuda.get_device_name(index),
            "capability": "{}.{}".format(*_library.compute_capability(index)),
        }
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]


def _cudnn_version() -> str | None:
    try:
        version = torch.backends.cudnn.version()
    except RuntimeError:  # cuDNN is there but does not fit torch
        return None
    if version is None:
        return None
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    except (FileNotFoundError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return output.split("\n", 1)[0].strip() or None
