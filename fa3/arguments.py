"""Every check of the public functions' arguments. What passes becomes one frozen description of the call.

Checks come in a fixed order: type, dtype, device, layout, shape, then the options. An error names function, argument,
rule and value. The ops and kernels trust what is checked here.
"""

from __future__ import annotations

import functools
import numbers
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fa3 import ops
from fa3.fp8_format import E4M3, FP8_SCALE_ROWS, num_scales, num_transposed_keys
from fa3.mask import UNLIMITED, Mask

_HALF_DTYPES = (torch.bfloat16, torch.float16)
_PORTABLE_DTYPES = (*_HALF_DTYPES, torch.float32, torch.float64)
_QUANTIZER_DTYPES = (*_HALF_DTYPES, torch.float32)
_FP8_MASKS = (Mask(), Mask(right=0))


@dataclass(frozen=True)
class Call:
    """An attention call whose arguments have passed every check; defaults are filled in."""

    function: str
    """The public function that was called, for errors that come later."""
    q: Tensor
    k: Tensor
    v: Tensor
    softmax_scale: float
    mask: Mask
    deterministic: bool
    descales: tuple[Tensor, Tensor, Tensor] | None
    """FP8: the scales of q, k and v, each (batch, heads, blocks). None for other dtypes."""
    out_dtype: torch.dtype
    v_transposed: bool


def check_call(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None,
    causal: bool,
    qv: Tensor | None = None,
    descales: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    window_size: tuple[int | None, int | None] = (UNLIMITED, UNLIMITED),
    attention_chunk: int | None = 0,
    softcap: float | None = 0.0,
    num_splits: int = 1,
    sm_margin: int = 0,
    deterministic: bool = False,
    out_dtype: torch.dtype | None = None,
    v_transposed: bool = False,
) -> Call:
    """The call that these arguments of a dense attention function describe; raises unless they are right."""
    error = functools.partial(argument_error, function)
    v_transposed = as_bool(v_transposed, "v_transposed", error)
    check_tensors(q, k, v, error, v_transposed=v_transposed)
    ops.refuse_forward_mode(function, q, k, v)
    softmax_scale = _softmax_scale(softmax_scale, q.shape[3], error)
    causal = as_bool(causal, "causal", error)
    deterministic = as_bool(deterministic, "deterministic", error)
    if qv is not None:
        raise error(NotImplementedError, "qv", "be None", type(qv).__name__)
    if softcap:
        raise error(NotImplementedError, "softcap", "be 0.0", softcap)
    if num_splits not in (0, 1):
        raise error(NotImplementedError, "num_splits", "be 0 or 1", num_splits)
    if sm_margin != 0:
        raise error(NotImplementedError, "sm_margin", "be 0", sm_margin)
    mask = Mask.resolve(causal, _window(window_size, error), _chunk(attention_chunk, error))
    # Lengths are compared with the window only where it has a limit: a compiler may not know them.
    if q.dtype == E4M3 and mask not in _FP8_MASKS and mask.simplified(q.shape[1], k.shape[1]) not in _FP8_MASKS:
        rule = "be unlimited, as (-1, -1), or causal, as (-1, 0), and attention_chunk 0, for float8_e4m3fn"
        raise error(NotImplementedError, "window_size", rule, f"{window_size} and attention_chunk {attention_chunk}")
    checked_descales = _check_fp8(q, k, descales, out_dtype, error)
    if out_dtype is None:
        out_dtype = torch.bfloat16 if q.dtype == E4M3 else q.dtype
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    return Call(function, q, k, v, softmax_scale, mask, deterministic, checked_descales, out_dtype, v_transposed)


# --- numbers and flags


def _as_python(value: object) -> object:
    """Python's number or bool where the value is numpy's; all others as they are. numpy need not be installed."""
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0 else value


def as_bool(value: object, name: str, error: Callable[..., Exception]) -> bool:
    """Python's bool, of it or of numpy's."""
    flag = _as_python(value)
    if not isinstance(flag, bool):
        remedy = f"; pass bool({name}), which waits for its device" if isinstance(value, Tensor) else ""
        raise error(TypeError, name, "be a bool", type(value).__name__, remedy)
    return flag


def _softmax_scale(value: object, head_dim: int, error: Callable[..., Exception]) -> float:
    if value is None:
        return head_dim**-0.5
    number = _as_python(value)
    if not isinstance(number, numbers.Real) or isinstance(number, bool):
        remedy = ""
        if isinstance(value, Tensor):
            remedy = "; multiply q by it and pass 1.0, or pass float(softmax_scale), which waits for its device"
        raise error(TypeError, "softmax_scale", "be a float or None", type(value).__name__, remedy)
    number = float(number)
    if not 1e-37 <= number <= 1e38:
        remedy = "; leave it out for 1 / sqrt(head_dim)" + (
            " (the fourth argument is softmax_scale: there is no dropout_p)" if number == 0 else ""
        )
        raise error(ValueError, "softmax_scale", "be from 1e-37 to 1e38", number, remedy)
    return number


def _window(
    window_size: tuple[int | None, int | None], error: Callable[..., Exception]
) -> tuple[int | None, int | None]:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise error(TypeError, "window_size", "be a pair (left, right)", window_size)
    left, right = map(_as_python, window_size)
    for side in (left, right):
        if side is not None and (not isinstance(side, int) or isinstance(side, bool)):
            raise error(TypeError, "window_size", "hold integers or None", window_size)
        if side is not None and side < UNLIMITED:
            raise error(ValueError, "window_size", "hold lengths of at least 0, or -1 for unlimited", window_size)
    return left, right


def _chunk(value: object, error: Callable[..., Exception]) -> int:
    chunk = 0 if value is None else _as_python(value)
    if not isinstance(chunk, int) or isinstance(chunk, bool):
        raise error(TypeError, "attention_chunk", "be an integer or None", type(value).__name__)
    if chunk < 0:
        raise error(ValueError, "attention_chunk", "be a length, or 0 or None for no chunks", chunk)
    return chunk


# --- tensors


def check_tensors(
    q: Tensor, k: Tensor, v: Tensor, error: Callable[..., Exception], *, v_transposed: bool = False
) -> None:
    """Raises unless q, k and v belong together. The order is type, dtype, device, layout, shape."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise error(TypeError, name, "be a torch.Tensor", type(x).__name__)

    dtype = q.dtype
    if dtype not in (*_PORTABLE_DTYPES, E4M3):
        rule = "be bfloat16, float16 or float8_e4m3fn"
        if dtype.is_floating_point:
            raise error(NotImplementedError, "q.dtype", rule, dtype, "; cast q, k and v")
        raise error(TypeError, "q.dtype", rule, dtype)
    if k.dtype != dtype:
        raise error(TypeError, "k.dtype", f"equal q.dtype = {dtype}", k.dtype)
    if v.dtype != dtype:
        raise error(TypeError, "v.dtype", f"equal q.dtype = {dtype}", v.dtype)
    if v_transposed and dtype != E4M3:
        raise error(ValueError, "v_transposed", f"be False for {dtype} inputs", v_transposed)

    device = q.device
    if k.device != device:
        raise error(ValueError, "k.device", f"equal q.device = {device}", k.device)
    if v.device != device:
        raise error(ValueError, "v.device", f"equal q.device = {device}", v.device)

    _check_layout("q", q, "seqlen_q, num_heads_q, head_dim", error)
    _check_layout("k", k, "seqlen_k, num_heads_kv, head_dim", error)
    v_dimensions = "num_heads_kv, head_dim, keys" if v_transposed else "seqlen_k, num_heads_kv, head_dim"
    _check_layout("v", v, v_dimensions, error)

    batch, _, num_heads_q, head_dim = q.shape
    k_batch, seqlen_k, num_heads_kv, k_head_dim = k.shape
    if v_transposed:
        v_batch, v_num_heads_kv, v_head_dim, v_seqlen_k = v.shape
    else:
        v_batch, v_seqlen_k, v_num_heads_kv, v_head_dim = v.shape
    v_heads_dim = 1 if v_transposed else 2
    step = 16 if dtype == E4M3 else 8
    if head_dim % step != 0 or not step <= head_dim <= 256:
        remedy = "; zero-pad the last dimension and pass softmax_scale" if head_dim < 256 else ""
        rule = f"be a multiple of {step} from {step} to 256" + (f" for {E4M3}" if dtype == E4M3 else "")
        raise error(ValueError, "q.shape[3] (head_dim)", rule, head_dim, remedy)
    if k_batch != batch:
        raise error(ValueError, "k.shape[0] (batch)", f"equal q.shape[0] = {batch}", k_batch)
    if k_head_dim != head_dim:
        raise error(ValueError, "k.shape[3] (head_dim)", f"equal q.shape[3] = {head_dim}", k_head_dim)
    if num_heads_kv == 0 or num_heads_q == 0 or num_heads_q % num_heads_kv != 0:
        rule = f"divide q.shape[2] (num_heads_q) = {num_heads_q}, both above 0"
        raise error(ValueError, "k.shape[2] (num_heads_kv)", rule, num_heads_kv)
    if v_batch != batch:
        raise error(ValueError, "v.shape[0] (batch)", f"equal q.shape[0] = {batch}", v_batch)
    if v_transposed and v_seqlen_k != num_transposed_keys(seqlen_k):
        rule = f"equal ceil({seqlen_k} / {FP8_SCALE_ROWS}) * {FP8_SCALE_ROWS} = {num_transposed_keys(seqlen_k)}"
        remedy = "; fa3.quantize_fp8(..., v_transposed=True) writes it"
        raise error(ValueError, "v.shape[3] (keys)", rule, v_seqlen_k, remedy)
    if not v_transposed and v_seqlen_k != seqlen_k:
        raise error(ValueError, "v.shape[1] (seqlen_k)", f"equal k.shape[1] = {seqlen_k}", v_seqlen_k)
    if v_num_heads_kv != num_heads_kv:
        rule = f"equal k.shape[2] = {num_heads_kv}"
        raise error(ValueError, f"v.shape[{v_heads_dim}] (num_heads_kv)", rule, v_num_heads_kv)
    if v_head_dim != head_dim:
        remedy = "; zero-pad v and slice the output" if v_head_dim < head_dim else ""
        rule = f"equal q.shape[3] = {head_dim}"
        raise error(NotImplementedError, f"v.shape[{v_heads_dim + 1}] (head_dim_v)", rule, v_head_dim, remedy)


def _check_layout(name: str, x: Tensor, dimensions: str, error: Callable[..., Exception]) -> None:
    if x.is_nested:
        remedy = f"; call once per sequence, with x[None] for x in {name}.unbind()"
        raise error(ValueError, name, "not be a nested tensor", x.layout, remedy)
    if x.layout is not torch.strided:
        raise error(ValueError, f"{name}.layout", "be torch.strided", x.layout, f"; use {name}.to_dense()")
    if x.dim() != 4:
        raise error(ValueError, name, f"have 4 dimensions (batch, {dimensions})", f"shape {tuple(x.shape)}")
    if x.stride(3) != 1 and x.numel() != 0:
        rule = "have a contiguous last dimension (stride 1)"
        raise error(ValueError, name, rule, f"stride {x.stride(3)}", f"; use {name}.contiguous()")


def _check_fp8(
    q: Tensor,
    k: Tensor,
    descales: tuple[Tensor | None, Tensor | None, Tensor | None],
    out_dtype: torch.dtype | None,
    error: Callable[..., Exception],
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The scales of FP8 inputs; raises unless FP8 inputs have what they need, and others nothing of it."""
    q_descale, k_descale, v_descale = descales
    if q.dtype != E4M3:
        for name, x in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
            if x is not None:
                remedy = "; scales belong to float8_e4m3fn"
                raise error(ValueError, name, f"be None for {q.dtype} inputs", type(x).__name__, remedy)
        if out_dtype is not None:
            raise error(ValueError, "out_dtype", f"be None for {q.dtype} inputs", out_dtype)
        return None
    seqlen_q, num_heads_q, seqlen_k, num_heads_kv = *q.shape[1:3], *k.shape[1:3]
    checked = (
        _check_descale("q_descale", q_descale, q, (num_heads_kv, num_heads_q), seqlen_q, error),
        _check_descale("k_descale", k_descale, q, (num_heads_kv,), seqlen_k, error),
        _check_descale("v_descale", v_descale, q, (num_heads_kv,), seqlen_k, error),
    )
    if out_dtype not in (None, *_HALF_DTYPES):
        raise error(ValueError, "out_dtype", "be None, bfloat16 or float16", out_dtype)
    return checked


def _check_descale(
    name: str, x: Tensor | None, q: Tensor, heads: tuple[int, ...], seqlen: int, error: Callable[..., Exception]
) -> Tensor:
    """The scales with all 3 dimensions, (batch, heads, blocks); raises unless they fit q and these sizes."""
    if x is None:
        raise error(ValueError, name, "be given for float8_e4m3fn inputs", x, "; no scale is ever assumed")
    if not isinstance(x, Tensor):
        raise error(TypeError, name, "be a torch.Tensor", type(x).__name__)
    if x.dtype != torch.float32:
        raise error(TypeError, f"{name}.dtype", "be float32", x.dtype)
    if x.device != q.device:
        raise error(ValueError, f"{name}.device", f"equal q.device = {q.device}", x.device)
    blocks = (1, num_scales(seqlen))
    descale = x.unsqueeze(-1) if x.dim() == 2 else x
    fits = descale.dim() == 3 and descale.shape[0] == q.shape[0]
    if not (fits and descale.shape[1] in heads and descale.shape[2] in blocks):
        rule = (
            f"have shape (batch, heads) or (batch, heads, blocks), batch {q.shape[0]}, heads "
            f"{' or '.join(map(str, heads))}, blocks 1 or ceil({seqlen} / {FP8_SCALE_ROWS}) = {blocks[1]}"
        )
        raise error(ValueError, name, rule, tuple(x.shape))
    return descale


# --- the quantizer


class QuantizeOptions(NamedTuple):
    """The options of quantize_fp8 but for the layout of v."""

    block_size: int | None
    incoherent: bool
    seed: int
    rotary: tuple[Tensor, Tensor] | None
    rotary_interleaved: bool
    smooth_k: bool


def check_quantizer_inputs(function: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises unless q, k and v belong together and have a dtype that is quantized."""
    error = functools.partial(argument_error, function)
    check_tensors(q, k, v, error)
    if q.dtype not in _QUANTIZER_DTYPES:
        rule = "be bfloat16 or float16 (in plain PyTorch float32 too)"
        raise error(NotImplementedError, "q.dtype", rule, q.dtype)
    ops.refuse_forward_mode(function, q, k, v)


def check_quantizer_options(function: str, q: Tensor, k: Tensor, options: QuantizeOptions) -> QuantizeOptions:
    """The options with Python's numbers and flags; raises unless they are right and fit q and k."""
    error = functools.partial(argument_error, function)
    block_size, incoherent, seed, rotary, rotary_interleaved, smooth_k = options
    block_size, seed = _as_python(block_size), _as_python(seed)
    if block_size not in (FP8_SCALE_ROWS, None):
        raise error(ValueError, "block_size", f"be {FP8_SCALE_ROWS} or None", block_size)
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise error(TypeError, "seed", "be an int", type(seed).__name__)
    incoherent = as_bool(incoherent, "incoherent", error)
    rotary_interleaved = as_bool(rotary_interleaved, "rotary_interleaved", error)
    smooth_k = as_bool(smooth_k, "smooth_k", error)
    head_dim = q.shape[3]
    if not incoherent and head_dim % 16 != 0:
        raise error(ValueError, "q.shape[3] (head_dim)", "be a multiple of 16 where incoherent is False", head_dim)
    if rotary is not None:
        _check_rotary(rotary, q, k, error)
        ops.refuse_forward_mode(function, *rotary)
    # operator.index makes a constant of a seed that torch.compile has made a variable.
    return QuantizeOptions(block_size, incoherent, operator.index(seed), rotary, rotary_interleaved, smooth_k)


def _check_rotary(rotary: tuple[Tensor, Tensor], q: Tensor, k: Tensor, error: Callable[..., Exception]) -> None:
    seqlen_q, head_dim = q.shape[1], q.shape[3]
    if not isinstance(rotary, (tuple, list)) or len(rotary) != 2 or not all(isinstance(x, Tensor) for x in rotary):
        raise error(TypeError, "rotary", "be a pair of tensors (cos, sin) or None", type(rotary).__name__)
    cos, sin = rotary
    for name, x in (("rotary[0] (cos)", cos), ("rotary[1] (sin)", sin)):
        if x.dtype not in (torch.float32, q.dtype):
            raise error(TypeError, f"{name}.dtype", f"be float32 or q.dtype = {q.dtype}", x.dtype)
        if x.device != q.device:
            raise error(ValueError, f"{name}.device", f"equal q.device = {q.device}", x.device)
        if x.dim() != 2 or x.shape[0] < seqlen_q or not 0 < 2 * x.shape[1] <= head_dim or x.shape != cos.shape:
            rule = (
                "have shape (seqlen, rotary_dim / 2) with at least seqlen_q = "
                f"{seqlen_q} rows and rotary_dim at most head_dim = {head_dim}, the same for cos and sin"
            )
            raise error(ValueError, name, rule, tuple(x.shape))
    if cos.dtype != sin.dtype:
        raise error(TypeError, "rotary[1] (sin).dtype", f"equal that of cos, {cos.dtype}", sin.dtype)
    if k.shape[1] != seqlen_q:
        remedy = "; which row a query takes is not decided then: rotate q and k before the call"
        raise error(
            NotImplementedError, "rotary", f"be None unless seqlen_k = seqlen_q = {seqlen_q}", k.shape[1], remedy
        )


def argument_error(
    function: str, kind: type[Exception], argument: str, rule: str, got: object, remedy: str = ""
) -> Exception:
    return kind(f"{function}: {argument} must {rule}, got {got}{remedy}")
