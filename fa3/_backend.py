"""Which path a call takes: the Hopper kernels ("hopper") or plain PyTorch ("portable")."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fa3 import _library, ops
from fa3.fp8_format import E4M3

BACKENDS = ("auto", "portable", "hopper")


def _checked(name: str, source: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source} must be one of {', '.join(BACKENDS)}, got {name!r}")
    return name


class _Choice:
    """A block that chooses a backend. Objects and not names: a block finds its own choice among equal ones."""

    def __init__(self, name: str) -> None:
        self.name = name


# The last choice holds. Blocks add and remove theirs, each in one step that no other thread interrupts. (A list of the
# module and no ContextVar: torch.compile follows it in every torch from 2.11 on.)
_choices = [_Choice(_checked(os.environ.get("FA3_BACKEND", "auto"), "FA3_BACKEND"))]


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Chooses the path of the calls inside: `with fa3.backend("portable"): ...`

    Args:
        name: "auto", the default: CPU tensors take the portable path, CUDA tensors the Hopper kernels. "portable":
            plain PyTorch, on any device. "hopper": the Hopper kernels; what they cannot run raises, CPU tensors too.

    Blocks nest: the one that was entered last holds, and each block takes back its own choice and no other. The choice
    holds for the whole process, other threads too. The environment variable FA3_BACKEND, read when fa3 is imported,
    sets what holds outside of any block. The choice is made by the forward; a backward follows its forward.

    Raises:
        ValueError: for another name.
    """
    choice = _Choice(_checked(name, "backend: name"))
    _choices.append(choice)
    try:
        yield
    finally:
        _choices.remove(choice)


def current_backend() -> str:
    """The backend that is chosen here: "auto", "portable" or "hopper"."""
    return _choices[-1].name


def op_of_path(name: str, q: Tensor, function: str) -> torch._ops.OpOverload:
    """The op `name` of ops.py, on the path that q takes; `function` is the public function that errors name.

    Raises:
        RuntimeError: the call would need the Hopper kernels and they cannot run on this device. There is no fallback
            that the caller has not asked for.
        NotImplementedError: the Hopper kernels do not compute the dtype of q.
    """
    if choose_path(q.device, function) == "portable":
        return getattr(ops, f"portable_{name}")
    if q.dtype not in (torch.bfloat16, torch.float16, E4M3):
        raise NotImplementedError(
            f"{function}: q.dtype must be bfloat16 or float16 on CUDA, got {q.dtype}; "
            'cast q, k and v, or use `with fa3.backend("portable")`'
        )
    return getattr(ops, name)


def choose_path(device: torch.device, function: str) -> str:
    """ "portable" or "hopper", for tensors on this device. Raises RuntimeError where the kernels cannot run on it."""
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
