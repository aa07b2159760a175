"""fa3: exact attention (FlashAttention-3) for NVIDIA Hopper GPUs, and the same calls in plain PyTorch on any machine.

    out = fa3.flash_attn_func(q, k, v, causal=True)

`python -m fa3` reports what this installation can run, `fa3.explain(q, k, v)` what a call would take.
"""

from fa3._backend import backend
from fa3._explain import Explanation, explain
from fa3._library import unavailable_reason
from fa3.fp8 import Fp8Inputs, Fp8Report, Fp8Transform, flash_attn_fp8_func, quantize_fp8, validate_fp8
from fa3.interface import flash_attn_func
from fa3.ops import checkpoint_save_ops

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "Fp8Inputs",
    "Fp8Report",
    "Fp8Transform",
    "backend",
    "checkpoint_save_ops",
    "explain",
    "flash_attn_fp8_func",
    "flash_attn_func",
    "is_available",
    "quantize_fp8",
    "unavailable_reason",
    "validate_fp8",
]


def is_available() -> bool:
    """Whether the Hopper kernels can run on the current CUDA device; `unavailable_reason()` says why not."""
    return unavailable_reason() is None
