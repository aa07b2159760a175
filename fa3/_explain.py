"""`explain`: which path and kernel a call takes, and why."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fa3 import _library, ops
from fa3._backend import current_backend, op_of_path
from fa3.arguments import argument_error, as_bool, check_tensors
from fa3.fp8_format import E4M3, FP8_SCALE_ROWS
from fa3.mask import Mask
from fa3.portable import attention

_TMA_ALIGNMENT_BYTES = 16


@dataclass
class Explanation:
    """What flash_attn_func would do with its arguments. `print` it, or read the fields."""

    path: str
    """"hopper": the compiled kernels; "sdpa-cpu": torch's CPU attention; "portable": tiles in plain PyTorch;
    "refused": the call raises."""
    backward: str | None
    """The path of the gradients: "hopper" or "portable"; "refused": only the backward raises; None: the call does."""
    reasons: list[str]
    kernel: dict[str, Any] | None = None
    """Hopper: the row of the kernel table (see `python -m fa3`) that runs."""
    backward_kernel: dict[str, Any] | None = None
    """Hopper: the row of the kernel table that the backward runs."""
    tile: tuple[int, int] | None = None
    """(queries, keys) per step."""
    num_m_blocks: int | None = None
    """Hopper: query tiles per batch and head."""
    num_tiles: int | None = None
    """Hopper: query tiles in all."""
    grid: int | None = None
    """Hopper: CTAs launched. They are persistent: min(multiprocessors, num_tiles)."""
    copies: list[str] = field(default_factory=list)
    """Hopper: the inputs that TMA cannot address, which are copied first, in the backward again."""

    def __str__(self) -> str:
        rows = [("path", self.path), ("backward", self.backward)]
        for kernel in filter(None, (self.kernel, self.backward_kernel)):
            facts = {key: value for key, value in kernel.items() if key not in ("name", "symbol")}
            rows.append(("kernel", kernel["name"]))
            rows.append(("", ", ".join(f"{key} {value}" for key, value in facts.items())))
            rows.append(("symbol", kernel.get("symbol")))
        rows += [("tile", self.tile and f"{self.tile[0]} queries x {self.tile[1]} keys")]
        if self.grid is not None:
            work = f"{self.num_tiles} tiles ({self.num_m_blocks} per batch and head)"
            rows.append(("grid", f"{self.grid} CTAs over {work}"))
        rows += [("copy", copy) for copy in self.copies]
        rows += [("because", reason) for reason in self.reasons]
        return "\n".join(f"{name:<9} {value}" for name, value in rows if value)


def explain(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, v_transposed: bool = False) -> Explanation:
    """What `flash_attn_func(q, k, v, causal=causal)` takes, here and now; nothing is computed.

    Args:
        q, k, v, causal, v_transposed: as for flash_attn_func. Strides and device matter, values do not. FP8 inputs
            need no scales here.

    Raises:
        TypeError, ValueError, NotImplementedError: as flash_attn_func does for arguments that are wrong. A machine that
            cannot run the call is an answer instead: path "refused".
    """
    function = "flash_attn_func"
    error = functools.partial(argument_error, function)
    v_transposed = as_bool(v_transposed, "v_transposed", error)
    check_tensors(q, k, v, error, v_transposed=v_transposed)
    mask = Mask.resolve(as_bool(causal, "causal", error)).simplified(q.shape[1], k.shape[1])
    try:
        forward = op_of_path("fwd_fp8" if q.dtype == E4M3 else "fwd", q, function)
    except (RuntimeError, NotImplementedError) as refusal:
        return Explanation("refused", None, [str(refusal)])
    if forward is ops.portable_fwd_fp8:
        return _explain_portable_fp8(q)
    if forward is ops.portable_fwd:
        return _explain_portable(q, k, mask)
    return _explain_hopper(q, k, v, mask, v_transposed)


def _selected_rows(q: Tensor, k: Tensor, v: Tensor, mask: Mask, v_transposed: bool) -> tuple[int, int]:
    """Rows of the kernel table that the library takes for a forward and its backward, each -1 if it has none."""
    library = ctypes.CDLL(str(_library.LIBRARY))
    dtype = {torch.float16: 0, torch.bfloat16: 1, E4M3: 2}[q.dtype]
    head_dim, head_dim_v = q.shape[3], v.shape[2 if v_transposed else 3]
    lengths_and_mask = (q.shape[1], k.shape[1], mask.left, mask.right, mask.chunk)
    return (
        library.fa3_select_fwd_kernel(dtype, head_dim, head_dim_v, *lengths_and_mask, ctypes.c_bool(v_transposed)),
        library.fa3_select_bwd_kernel(dtype, head_dim, head_dim_v),
    )


def _why_portable(q: Tensor) -> str:
    return 'the backend is "portable"' if current_backend() == "portable" else f"the tensors are on {q.device.type}"


def _explain_portable_fp8(q: Tensor) -> Explanation:
    simulated = f"the FP8 kernel's arithmetic is simulated in float32, by blocks of {FP8_SCALE_ROWS} keys"
    return Explanation("portable", "refused", [_why_portable(q), simulated, "FP8 is a forward without a backward"])


def _explain_portable(q: Tensor, k: Tensor, mask: Mask) -> Explanation:
    reasons = [_why_portable(q)]
    backward = "the backward recomputes P from lse in tiles of plain PyTorch"
    if attention.sdpa_covers(q, k, mask):
        kind = "unmasked" if mask == Mask() else "square causal"
        reasons.append(f"torch's CPU attention computes {kind} attention exactly")
        return Explanation("sdpa-cpu", "portable", [*reasons, backward])
    if q.device.type == "cpu":
        reasons.append("torch's CPU attention covers neither empty tensors nor masks other than square causal")
    return Explanation("portable", "portable", [*reasons, backward], tile=attention.tile_sizes(q, k))


def _explain_hopper(q: Tensor, k: Tensor, v: Tensor, mask: Mask, v_transposed: bool) -> Explanation:
    batch, seqlen_q, num_heads_q, head_dim = q.shape
    row, backward_row = _selected_rows(q, k, v, mask, v_transposed)
    without_kernel = f"this build has no {{}} kernel for head_dim {head_dim} in {q.dtype}"
    without_kernel += " with v transposed" if v_transposed else ""
    if row < 0:
        return Explanation("refused", None, [without_kernel.format("forward")])
    backward = "hopper" if backward_row >= 0 else "refused"
    if q.numel() == 0 or k.numel() == 0:
        nothing = "no row has a key: out 0 and lse -inf are written without a kernel" if q.numel() else "out is empty"
        return Explanation("hopper", backward, [nothing])
    kernel = _library.kernel_table()[row]
    backward_kernel = _library.kernel_table()[backward_row] if backward_row >= 0 else None
    reasons = [f"{q.device} is {torch.cuda.get_device_name(q.device)}, and the kernels are loaded"]
    if kernel["head_dim"] != head_dim:
        reasons.append(f"head_dim {head_dim} runs as {kernel['head_dim']}, the next size built; TMA fills with zeros")
    if q.dtype == E4M3:
        reasons.append("FP8 is a forward without a backward")
    elif backward_kernel is None:
        reasons.append(without_kernel.format("backward"))
    else:
        tile = f"{backward_kernel['tile_m']} queries x {backward_kernel['tile_n']} keys"
        reasons.append(f"the backward recomputes P from lse in tiles of {tile}, head_dim {backward_kernel['head_dim']}")
    num_m_blocks = -(-seqlen_q // kernel["tile_m"])
    num_tiles = num_m_blocks * batch * num_heads_q
    return Explanation(
        path="hopper",
        backward=backward,
        reasons=reasons,
        kernel=kernel,
        backward_kernel=backward_kernel,
        tile=(kernel["tile_m"], kernel["tile_n"]),
        num_m_blocks=num_m_blocks,
        num_tiles=num_tiles,
        grid=min(torch.cuda.get_device_properties(q.device).multi_processor_count, num_tiles),
        copies=[copy for name, x in (("q", q), ("k", k), ("v", v)) if (copy := _copy_for_tma(name, x))],
    )


def _copy_for_tma(name: str, x: Tensor) -> str | None:
    """Why x is copied before the launch, or None: TMA wants base and strides in multiples of 16 bytes."""
    if x.numel() == 0:
        return None
    if x.data_ptr() % _TMA_ALIGNMENT_BYTES != 0:
        return f"{name}: its base address is not a multiple of {_TMA_ALIGNMENT_BYTES} bytes"
    for dim in range(x.dim() - 1):
        stride_bytes = x.stride(dim) * x.element_size()
        if x.shape[dim] > 1 and stride_bytes % _TMA_ALIGNMENT_BYTES != 0:
            return f"{name}: stride {stride_bytes} bytes of dimension {dim} is not a multiple of {_TMA_ALIGNMENT_BYTES}"
        if x.shape[dim] > 1 and stride_bytes >= 2**40:
            return f"{name}: stride {stride_bytes} bytes of dimension {dim} is not below 2^40"
    return None
