"""Which path a call takes: the Hopper kernels ("hopper") or plain PyTorch ("portable")."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fa3 import _library

BACKENDS = ("auto", "portable", "hopper")


def _checked(name: str, source: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source} must be one of {', '.join(BACKENDS)}, got {name!r}")
    return name


# A module's variable and no ContextVar: torch.compile follows it in every torch from 2.11 on.
_choice = _checked(os.environ.get("FA3_BACKEND", "auto"), "FA3_BACKEND")


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Chooses the path of the calls inside: `with fa3.backend("portable"): ...`

    Args:
        name: "auto", the default: CPU tensors take the portable path, CUDA tensors the Hopper kernels. "portable":
            plain PyTorch, on any device. "hopper": the Hopper kernels; what they cannot run raises, CPU tensors too.

    Blocks nest, the inner one wins, and on leaving the outer choice is back. The choice holds for the whole process,
    other threads too. The environment variable FA3_BACKEND, read when fa3 is imported, sets what holds outside of any
    block. The choice is made by the forward; a backward follows its forward.

    Raises:
        ValueError: for another name.
    """
    global _choice
    outer, _choice = _choice, _checked(name, "backend: name")
    try:
        yield
    finally:
        _choice = outer


def current_backend() -> str:
    """The backend that is chosen here: "auto", "portable" or "hopper"."""
    return _choice


def choose_path(device: torch.device, function: str = "flash_attn_func") -> str:
    """ "portable" or "hopper", for tensors on this device; `function` is whom an error names.

    Raises:
        RuntimeError: the call would need the Hopper kernels and they cannot run on this device. There is no fallback
            that the caller has not asked for.
    """
    choice = current_backend()
    if choice == "portable" or (choice == "auto" and device.type in ("cpu", "meta")):
        return "portable"
    if device.type != "cuda":
        refusal = f"the Hopper kernels need CUDA tensors, got a tensor on {device.type!r}"
    else:
        refusal = _hopper_refusal(device.index)
    if refusal is not None:
        raise RuntimeError(
            f"{function}: {refusal}. `python -m fa3` reports more; "
            f'`with fa3.backend("portable"):` runs the call in plain PyTorch on this device'
        )
    return "hopper"


def _hopper_refusal(device_index: int | None) -> str | None:
    """Why the kernels cannot run on this CUDA device; asked once per device. torch.compile takes it as a constant."""
    return _cached_refusal(device_index)


# What torch.compiler.assume_constant_result sets. That function imports torch._dynamo, which takes longer than torch.
_hopper_refusal._dynamo_marked_constant = True


@functools.cache
def _cached_refusal(device_index: int | None) -> str | None:
    return _library.unavailable_reason(device_index)
