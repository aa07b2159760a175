"""The compiled library: loads it, says why it cannot be used, and describes the kernels in it."""

from __future__ import annotations

import ctypes
import functools
import json
from pathlib import Path
from typing import Any

import torch

LIBRARY = Path(__file__).with_name("_C.abi3.so")
BUILD_REPORT = Path(__file__).with_name("build_report.json")
HOPPER = (9, 0)

_loaded = False
_load_error: str | None = None


@functools.cache
def load() -> None:
    """Loads fa3/_C.abi3.so if it is there: the CUDA implementations of the ops that fa3/ops.py defines.

    Never raises: see `unavailable_reason`.
    """
    global _loaded, _load_error
    if not LIBRARY.exists():
        return
    try:
        torch.ops.load_library(str(LIBRARY))
        _loaded = True
    except OSError as error:
        _load_error = str(error.__cause__ or error)  # the dynamic linker's own message; torch wraps it


def is_loaded() -> bool:
    """Whether the compiled library is in this process, with or without a GPU to run it on."""
    load()
    return _loaded


def unavailable_reason(device: torch.device | int | None = None) -> str | None:
    """Why the Hopper kernels cannot run on `device` (default: the current CUDA device), or None if they can."""
    load()
    if _load_error is not None:
        return f"the compiled library could not be loaded: {_load_error}"
    if not _loaded:
        reason = build_report().get("reason")
        return "the kernels were not built" + (f": {reason}" if reason else "")
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    index = _device_index(device)
    capability = compute_capability(index)
    if capability != HOPPER:
        return (
            f"the kernels need a Hopper GPU (compute capability 9.0), and cuda:{index} is "
            f"{torch.cuda.get_device_name(index)} with {capability[0]}.{capability[1]}"
        )
    return None


@functools.cache
def compute_capability(index: int) -> tuple[int, int]:
    """Compute capability of a CUDA device, such as (9, 0); asked of the driver once per device."""
    return torch.cuda.get_device_capability(index)


@functools.cache
def build_report() -> dict[str, Any]:
    """What the build recorded (fa3/build_report.json), or {} where the package was not installed by its build."""
    try:
        return json.loads(BUILD_REPORT.read_text())
    except FileNotFoundError:
        return {}


@functools.cache
def kernel_table() -> list[dict[str, Any]]:
    """One row per kernel file in the library, those of the forward first; [] where it is not loaded.

    Keys from the library: name (of the source file), pass ("fwd" or "bwd"), dtype, head_dim, head_dim_v, tile_m and
    tile_n (queries and keys of a step), stages (of the ring of K and V forward, of Q backward), consumer_warpgroups,
    smem_bytes.
    Keys from ptxas, as recorded by the build: symbol, registers, spill_stores_bytes, spill_loads_bytes, stack_bytes,
    barriers, smem_static_bytes. A file of the backward has small kernels besides, which run before and after: these
    keys are those of the main one.
    """
    if not is_loaded():
        return []
    describe = ctypes.CDLL(str(LIBRARY)).fa3_kernel_table
    describe.restype = ctypes.c_char_p
    from_ptxas = {kernel["name"]: kernel for kernel in build_report().get("kernels", [])}
    return [row | from_ptxas.get(row["name"], {}) for row in json.loads(describe())]


def _device_index(device: torch.device | int | None) -> int:
    if isinstance(device, int):
        return device
    if device is None or device.index is None:
        return torch.cuda.current_device()
    return device.index
