"""The public functions: documentation, argument checks, and the choice of the op."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from fa3 import ops
from fa3._backend import choose_path
from fa3.fp8_portable import E4M3, FP8_BLOCK, num_scales, num_transposed_keys

_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
_PORTABLE_DTYPES = (*_KERNEL_DTYPES, torch.float32, torch.float64)
_UNLIMITED = (-1, None)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int | None, int | None] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    v_transposed: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, softmax(softmax_scale * q k^T) v, in memory that grows with seqlen and not with its square.

    CUDA tensors run on the Hopper kernels, or raise where those cannot run. CPU tensors run in plain PyTorch, and so do
    all tensors inside `with fa3.backend("portable")`. `fa3.explain(q, k, v)` says what a call takes and why.
    Differentiable once in q, k and v, through out and lse; FP8 inputs have no gradients.

    Query head h reads KV head h // (num_heads_q // num_heads_kv): MHA, GQA and MQA at any ratio. Any strides will do
    whose last dimension is contiguous: transposed views, slices of a fused qkv, expanded (stride 0) K and V.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim), bfloat16 or float16; in plain PyTorch float32 or float64 too.
            head_dim is a multiple of 8 from 8 to 256. float8_e4m3fn, with the scales below, is the FP8 forward: P is
            rounded to e4m3 too, every sum is float32, and head_dim is a multiple of 16. fa3.quantize_fp8 makes such
            inputs, fa3.flash_attn_fp8_func takes 16-bit ones.
        k: (batch, seqlen_k, num_heads_kv, head_dim), dtype and device of q. num_heads_q is a multiple of num_heads_kv.
        v: (batch, seqlen_k, num_heads_kv, head_dim), dtype and device of q; another shape with v_transposed.
        softmax_scale: factor of the scores q k^T before softmax, above 0 and within float32: 1e-37 to 1e38.
            None: 1 / sqrt(head_dim).
        causal: True hides later keys. The mask is aligned to the bottom right corner, so that the last query sees every
            key: query i sees keys j <= i + seqlen_k - seqlen_q (1: visible, 0: hidden).

                seqlen_q = 2, seqlen_k = 5     seqlen_q = 5, seqlen_k = 2
                    1 1 1 1 0                      0 0
                    1 1 1 1 1                      0 0
                                                   0 0
                                                   1 0
                                                   1 1

        qv: must be None; not implemented.
        q_descale, k_descale, v_descale: the scales of FP8 inputs, float32: the value meant is the e4m3 one times its
            scale. All three are required for float8_e4m3fn (no scale is ever assumed) and refused for other dtypes.
            (batch, num_heads_kv): one per batch and KV head, for q too; or (batch, num_heads_kv, blocks), where blocks
            is 1 or ceil(seqlen / 128), one scale for each 128 rows of the sequence. q_descale may have num_heads_q in
            the place of num_heads_kv. Any strides, 0 among them.
        window_size: (left, right), in keys, both ends included: query i sees keys from
            i + seqlen_k - seqlen_q - left to i + seqlen_k - seqlen_q + right. -1 and None are unlimited. Only windows
            that are no limit, or that equal causal (right = 0), are implemented. causal=True is right = 0 whatever
            window_size says.
        attention_chunk: must be 0; not implemented.
        softcap: must be 0.0 (none); not implemented.
        num_splits: 1, or 0 for a heuristic, which takes 1. More splits of the keys are not implemented.
        pack_gqa: how the kernel lays out grouped heads. It has one layout, and no choice here changes the result.
        deterministic: True makes every gradient equal from run to run, to the bit. dk and dv always are. The Hopper
            kernels sum dq over blocks of keys in the order in which these finish, so that its last bits may differ;
            with True the blocks take turns in a fixed order, which costs some speed. True too where
            torch.use_deterministic_algorithms(True) is set. Plain PyTorch sums in a fixed order in any case (on a GPU
            as far as cuBLAS does: with several streams at work it asks for CUBLAS_WORKSPACE_CONFIG=:4096:8).
        sm_margin: must be 0; leaving multiprocessors free is not implemented.
        return_attn_probs: True returns lse as well. (The name is upstream's; probabilities are never returned.)
        return_lse: the same under a clearer name.
        out_dtype: for float8_e4m3fn inputs bfloat16 (None means it) or float16; None for all others.
        v_transposed: True, for float8_e4m3fn inputs only, takes v as fa3.quantize_fp8(..., v_transposed=True) writes
            it, so that the kernel need not transpose it: (batch, num_heads_kv, head_dim, n), where n is seqlen_k
            rounded up to a multiple of 128. A line holds one channel of all keys, every 16 of them in the order
            0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15, and zeros for those from seqlen_k on (NaN there may make out NaN).
            Nothing else changes, v_descale and the results included.

    Returns:
        out: (batch, seqlen_q, num_heads_q, head_dim), contiguous, dtype of q (of FP8 inputs, out_dtype).
        lse: with return_attn_probs or return_lse, (batch, num_heads_q, seqlen_q), contiguous, float32 (float64 for
            float64 inputs): the natural logarithm of the sum over visible keys of exp(softmax_scale * q k^T). Of FP8
            inputs the summands are those that out is made of, rounded to e4m3: each by at most a 16th of itself or
            2^-18 of the row's largest. So results for parts of the keys combine consistently.

        A row that sees no key (causal with seqlen_q > seqlen_k, or seqlen_k = 0) has out 0 and lse -inf, gets dq 0, and
        adds nothing to dk and dv. Sizes of 0 in batch, seqlen_q and seqlen_k are fine. NaN in v at a key that causal
        hides may reach rows that share a block of keys with it (0 x NaN), as in a matrix product with P; so may NaN in
        q or in the gradient of out reach dk and dv of hidden keys, and NaN in k reach dq.

    Memory: nothing grows with seqlen_q x seqlen_k. For the backward, q, k, v, out and lse are kept. On the Hopper
    kernels it needs, while it runs, a float32 accumulator of dq, batch x num_heads_q x seqlen_q x head_dim with
    seqlen_q rounded up to a tile and head_dim to the kernel's, two float32 per query and head, and where deterministic
    a few integers per tile. dk and dv of the query heads that share a KV head are summed in registers. An input that
    TMA cannot address is copied (`explain` says which), and so is such a gradient of out.

    Raises:
        TypeError: an argument of the wrong type, or q, k and v of different or non-floating dtypes.
        ValueError: devices, strides or shapes that do not fit together, a value out of range, FP8 inputs without their
            scales, scales without FP8 inputs.
        NotImplementedError: a value whose meaning this version does not compute, such as a gradient of FP8 inputs.
            Nothing is ignored silently.
        RuntimeError: CUDA tensors on a GPU that is not Hopper, or no compiled kernels. The message says which.

    Source: Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision" (2024),
    arXiv:2407.08608. The online softmax is Milakov and Gimelshein's, arXiv:1805.02867.
    """
    check_tensors(q, k, v, v_transposed=v_transposed)
    if softmax_scale is None:
        softmax_scale = q.shape[3] ** -0.5
    elif not isinstance(softmax_scale, (int, float)) or isinstance(softmax_scale, bool):
        raise _error(TypeError, "softmax_scale", "be a float or None", type(softmax_scale).__name__)
    elif not 1e-37 <= softmax_scale <= 1e38:
        remedy = "; leave it out for 1 / sqrt(head_dim)" + (
            " (the fourth argument is softmax_scale: there is no dropout_p)" if softmax_scale == 0 else ""
        )
        raise _error(ValueError, "softmax_scale", "be from 1e-37 to 1e38", softmax_scale, remedy)
    for name, flag in (("causal", causal), ("deterministic", deterministic)):
        if not isinstance(flag, bool):
            raise _error(TypeError, name, "be a bool", type(flag).__name__)
    if qv is not None:
        raise _error(NotImplementedError, "qv", "be None", type(qv).__name__)
    if attention_chunk:
        raise _error(NotImplementedError, "attention_chunk", "be 0", attention_chunk)
    if softcap:
        raise _error(NotImplementedError, "softcap", "be 0.0", softcap)
    if num_splits not in (0, 1):
        raise _error(NotImplementedError, "num_splits", "be 0 or 1", num_splits)
    if sm_margin != 0:
        raise _error(NotImplementedError, "sm_margin", "be 0", sm_margin)
    causal = _resolve_window(window_size, causal, q.shape[1], k.shape[1])
    causal = causal and q.shape[1] > 1  # a single query sees every key
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()

    if q.dtype == E4M3:
        out, lse = _attend_fp8(q, k, v, q_descale, k_descale, v_descale, softmax_scale, causal, out_dtype, v_transposed)
    else:
        for name, x in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
            if x is not None:
                remedy = "; scales belong to float8_e4m3fn"
                raise _error(ValueError, name, f"be None for {q.dtype} inputs", type(x).__name__, remedy)
        if out_dtype is not None:
            raise _error(ValueError, "out_dtype", f"be None for {q.dtype} inputs", out_dtype)
        out, lse = ops.attend(op_of_path("fwd", q), q, k, v, softmax_scale, causal, deterministic)
    return (out, lse) if return_attn_probs or return_lse else out


def check_tensors(
    q: Tensor, k: Tensor, v: Tensor, function: str = "flash_attn_func", *, v_transposed: bool = False
) -> None:
    """Raises unless q, k and v belong together. The order is type, dtype, device, layout, shape."""
    error = functools.partial(_error, function=function)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise error(TypeError, name, "be a torch.Tensor", type(x).__name__)
    if not isinstance(v_transposed, bool):
        raise error(TypeError, "v_transposed", "be a bool", type(v_transposed).__name__)

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
        rule = f"equal ceil({seqlen_k} / {FP8_BLOCK}) * {FP8_BLOCK} = {num_transposed_keys(seqlen_k)}"
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
    if x.layout is not torch.strided:
        raise error(ValueError, f"{name}.layout", "be torch.strided", x.layout, f"; use {name}.to_dense()")
    if x.dim() != 4:
        raise error(ValueError, name, f"have 4 dimensions (batch, {dimensions})", f"shape {tuple(x.shape)}")
    if x.stride(3) != 1 and x.numel() != 0:
        rule = "have a contiguous last dimension (stride 1)"
        raise error(ValueError, name, rule, f"stride {x.stride(3)}", f"; use {name}.contiguous()")


def check_kernel_dtype(q: Tensor, function: str = "flash_attn_func") -> None:
    """Raises unless the Hopper kernels compute the dtype of q."""
    if q.dtype not in _KERNEL_DTYPES:
        remedy = '; cast q, k and v, or use `with fa3.backend("portable")`'
        rule = "be bfloat16 or float16 on CUDA"
        raise _error(NotImplementedError, "q.dtype", rule, q.dtype, remedy, function=function)


def op_of_path(name: str, q: Tensor, function: str = "flash_attn_func") -> torch._ops.OpOverload:
    """The op `name` of ops.py, on the path that q takes; raises where that path cannot run it."""
    if choose_path(q.device, function) == "portable":
        return getattr(ops, f"portable_{name}")
    if q.dtype != E4M3:
        check_kernel_dtype(q, function)
    op = getattr(ops, name)
    if op is None:
        raise RuntimeError(
            f"{function}: the compiled library has no op fa3::{name}; build the kernels again. "
            '`with fa3.backend("portable"):` runs the call in plain PyTorch on this device'
        )
    return op


def refuse_gradients(tensors: dict[str, Tensor], function: str = "flash_attn_func") -> None:
    """Raises if a gradient of one of these would be asked of the FP8 forward, which has none."""
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if x.requires_grad:
            rule = "not require a gradient: FP8 is a forward without a backward"
            remedy = "; use torch.no_grad(), or flash_attn_fp8_func(..., straight_through=True)"
            raise _error(NotImplementedError, name, rule, "requires_grad=True", remedy, function=function)


def _attend_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    softmax_scale: float,
    causal: bool,
    out_dtype: torch.dtype | None,
    v_transposed: bool,
) -> tuple[Tensor, Tensor]:
    """The FP8 forward, after the checks of what only FP8 inputs have."""
    seqlen_q, num_heads_q, seqlen_k, num_heads_kv = *q.shape[1:3], *k.shape[1:3]
    descales = {
        "q_descale": _check_descale("q_descale", q_descale, q, (num_heads_kv, num_heads_q), seqlen_q),
        "k_descale": _check_descale("k_descale", k_descale, q, (num_heads_kv,), seqlen_k),
        "v_descale": _check_descale("v_descale", v_descale, q, (num_heads_kv,), seqlen_k),
    }
    if out_dtype not in (None, *_KERNEL_DTYPES):
        raise _error(ValueError, "out_dtype", "be None, bfloat16 or float16", out_dtype)
    refuse_gradients({"q": q, "k": k, "v": v, **descales})
    forward = op_of_path("fwd_fp8", q)
    return forward(q, k, v, *descales.values(), softmax_scale, causal, out_dtype == torch.float16, v_transposed)


def _check_descale(name: str, x: Tensor | None, q: Tensor, heads: tuple[int, ...], seqlen: int) -> Tensor:
    """The scales with all 3 dimensions, (batch, heads, blocks); raises unless they fit q and these sizes."""
    if x is None:
        raise _error(ValueError, name, "be given for float8_e4m3fn inputs", x, "; no scale is ever assumed")
    if not isinstance(x, Tensor):
        raise _error(TypeError, name, "be a torch.Tensor", type(x).__name__)
    if x.dtype != torch.float32:
        raise _error(TypeError, f"{name}.dtype", "be float32", x.dtype)
    if x.device != q.device:
        raise _error(ValueError, f"{name}.device", f"equal q.device = {q.device}", x.device)
    blocks = (1, num_scales(seqlen, FP8_BLOCK))
    descale = x.unsqueeze(-1) if x.dim() == 2 else x
    fits = descale.dim() == 3 and descale.shape[0] == q.shape[0]
    if not (fits and descale.shape[1] in heads and descale.shape[2] in blocks):
        rule = (
            f"have shape (batch, heads) or (batch, heads, blocks), batch {q.shape[0]}, heads "
            f"{' or '.join(map(str, heads))}, blocks 1 or ceil({seqlen} / {FP8_BLOCK}) = {blocks[1]}"
        )
        raise _error(ValueError, name, rule, tuple(x.shape))
    return descale


def _resolve_window(window_size: tuple[int | None, int | None], causal: bool, seqlen_q: int, seqlen_k: int) -> bool:
    """Whether causal and window_size together mean the causal mask; raises if they mean neither it nor no mask."""
    if window_size == (-1, -1):
        return causal
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise _error(TypeError, "window_size", "be a pair (left, right)", window_size)
    left, right = window_size
    for side in (left, right):
        if side is not None and not isinstance(side, int):
            raise _error(TypeError, "window_size", "hold integers or None", window_size)
        if side is not None and side < -1:
            raise _error(ValueError, "window_size", "hold lengths of at least 0, or -1 for unlimited", window_size)
    # The last query reaches back to the first key, the first query forward to the last key.
    left_is_unlimited = left in _UNLIMITED or left >= seqlen_k - 1
    right_is_unlimited = right in _UNLIMITED or right >= seqlen_q - 1
    if left_is_unlimited and (causal or right == 0):
        return True
    if left_is_unlimited and right_is_unlimited:
        return False
    rule = "be unlimited, as (-1, -1), or causal, as (-1, 0)"
    raise _error(NotImplementedError, "window_size", rule, window_size)


def _error(
    kind: type[Exception], argument: str, rule: str, got: object, remedy: str = "", *, function: str = "flash_attn_func"
) -> Exception:
    return kind(f"{function}: {argument} must {rule}, got {got}{remedy}")
