"""The operators in namespace fa3: schemas, shape-only (fake) implementations, autograd and FLOP formulas.

    fwd, bwd                    attention on the Hopper kernels
    fwd_fp8, quantize_fp8       the same for FP8 (e4m3), without a backward
    portable_<any of these>     plain PyTorch, any device, with the same schema
    no_gradient                 raises where a gradient through FP8 is asked for

The first four are defined where the compiled library is loaded, which holds their CUDA implementations alone. All are
functional: outputs are new tensors. Shapes: q and out (b, sq, h, d), k and v (b, sk, hk, d), lse (b, h, sq).
window_left, window_right and attention_chunk are the fields of a fa3.mask.Mask. The ops for FP8 are described at their
portable twins in fa3/portable/fp8.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import flop_counter

from fa3 import _library
from fa3.fp8_format import E4M3, num_scales, num_transposed_keys
from fa3.mask import Mask
from fa3.portable import attention, fp8

# `deterministic` is for the backward. fwd takes it because autograd and graphs know a call by the arguments of its op.
_SCHEMAS = {
    "fwd": "(Tensor q, Tensor k, Tensor v, float softmax_scale, int window_left, int window_right, "
    "int attention_chunk, bool deterministic=False) -> (Tensor out, Tensor lse)",
    "bwd": "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float softmax_scale, "
    "int window_left, int window_right, int attention_chunk, bool deterministic) "
    "-> (Tensor dq, Tensor dk, Tensor dv)",
    "fwd_fp8": "(Tensor q, Tensor k, Tensor v, Tensor q_descale, Tensor k_descale, Tensor v_descale, "
    "float softmax_scale, int window_left, int window_right, int attention_chunk, bool out_fp16, "
    "bool v_transposed=False) -> (Tensor out, Tensor lse)",
    "quantize_fp8": "(Tensor x, Tensor? signs, Tensor? cos, Tensor? sin, bool rotary_interleaved, bool smooth, "
    "int block_size, bool transpose=False) -> (Tensor x8, Tensor descale, Tensor mean)",
}
_PORTABLE = {
    "fwd": attention.forward,
    "bwd": attention.backward,
    "fwd_fp8": fp8.forward,
    "quantize_fp8": fp8.quantize,
}

_definitions = torch.library.Library("fa3", "FRAGMENT")
_library.load()


def _define(name: str, schema: str) -> torch._ops.OpOverload:
    _definitions.define(name + schema, tags=[torch.Tag.pt2_compliant_tag])
    return getattr(torch.ops.fa3, name).default


def _define_portable(name: str) -> torch._ops.OpOverload:
    op = _define(f"portable_{name}", _SCHEMAS[name])
    _definitions.impl(op, _PORTABLE[name], "CompositeExplicitAutograd")
    return op


portable_fwd, portable_bwd, portable_fwd_fp8, portable_quantize_fp8 = map(_define_portable, _SCHEMAS)
fwd, bwd, fwd_fp8, quantize_fp8 = (
    _define(name, schema) if _library.is_loaded() else None for name, schema in _SCHEMAS.items()
)


def _loaded(*ops: torch._ops.OpOverload | None) -> list[torch._ops.OpOverload]:
    return [op for op in ops if op is not None]


_FORWARDS = _loaded(portable_fwd, fwd)
_BACKWARDS = _loaded(portable_bwd, bwd)
_FP8_FORWARDS = _loaded(portable_fwd_fp8, fwd_fp8)
_FP8_QUANTIZERS = _loaded(portable_quantize_fp8, quantize_fp8)


# --- shapes


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *options) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, num_heads_q, _ = q.shape
    out = q.new_empty((batch, seqlen_q, num_heads_q, v.shape[3]))
    return out, q.new_empty((batch, num_heads_q, seqlen_q), dtype=attention.accumulate_dtype(q.dtype))


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *others
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _fake_forward_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor,
    k_descale: Tensor,
    v_descale: Tensor,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    attention_chunk: int,
    out_fp16: bool,
    v_transposed: bool = False,
) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, num_heads_q, _ = q.shape
    out = q.new_empty(q.shape, dtype=torch.float16 if out_fp16 else torch.bfloat16)
    return out, q.new_empty((batch, num_heads_q, seqlen_q), dtype=torch.float32)


def _fake_quantize_fp8(
    x: Tensor,
    signs: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    rotary_interleaved: bool,
    smooth: bool,
    block_size: int,
    transpose: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, seqlen, num_heads, head_dim = x.shape
    x8_head_dim = head_dim if signs is None else signs.shape[0]
    x8_shape = (batch, seqlen, num_heads, x8_head_dim)
    if transpose:
        x8_shape = (batch, num_heads, x8_head_dim, num_transposed_keys(seqlen))
    x8 = x.new_empty(x8_shape, dtype=E4M3)
    descale = x.new_empty((batch, num_heads, num_scales(seqlen, block_size)), dtype=torch.float32)
    return x8, descale, x.new_empty((batch, num_heads, head_dim) if smooth else (0,), dtype=torch.float32)


# --- derivatives


def refuse_forward_mode(function: str, *inputs: object) -> None:
    """Raises if one of the inputs has a tangent, which the ops would drop. Tangents exist only within a dual level."""
    if forward_ad._current_level < 0:
        return
    tensors = (x for x in inputs if isinstance(x, Tensor))
    # A compiler does not see the tangents of a graph's inputs.
    if torch.compiler.is_compiling() or any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            f"{function}: forward-mode derivatives (jvp, jacfwd, linearize, dual numbers) are not implemented; "
            "use reverse mode (grad, vjp, jacrev)"
        )


def _register_autograd(op: torch._ops.OpOverload, function: str, save: Callable, backward: Callable) -> None:
    """Gives the op its derivative, under the name of the public function that errors carry.

    save(ctx, inputs, output) runs after the forward; backward(ctx, *output_grads) returns the gradients of the first
    inputs, and the others get none. torch.library.register_autograd would do, but for two things: it drops forward-mode
    tangents without a word, and costs several times as much host time.
    """

    def run(keyset, inputs):
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)

    def forward_and_save(ctx, keyset, *inputs):
        output = run(keyset, inputs)
        ctx.set_materialize_grads(False)  # a missing gradient of lse costs nothing
        save(ctx, inputs, output)
        return output

    def backward_of_all(ctx, *output_grads):
        grads = backward(ctx, *output_grads)
        return None, *grads, *(None,) * (len(ctx.needs_input_grad) - 1 - len(grads))

    # The name is part of grad_fn's.
    methods = {"forward": staticmethod(forward_and_save), "backward": staticmethod(backward_of_all)}
    differentiable = type(f"fa3_{op._opname}", (torch.autograd.Function,), methods)

    def autograd_kernel(keyset, *inputs):
        refuse_forward_mode(function, *inputs)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            return differentiable.apply(keyset, *inputs)
        return run(keyset, inputs)

    _definitions.impl(op, autograd_kernel, "Autograd", with_keyset=True)


def _save_forward(ctx, inputs, output) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)


def _forward_derivative(backward_op: torch._ops.OpOverload, ctx, dout: Tensor | None, dlse: Tensor | None):
    q, k, v, out, lse = ctx.saved_tensors
    if dout is None:
        if dlse is None:
            return ()
        dout = torch.zeros_like(out)
    softmax_scale, window_left, window_right, attention_chunk, *deterministic = ctx.options
    mask = (window_left, window_right, attention_chunk)
    return backward_op(dout, dlse, q, k, v, out, lse, softmax_scale, *mask, *(deterministic or [False]))


def _save_nothing(ctx, inputs, output) -> None:
    pass


def _refuse_second_backward(ctx, *grads):
    raise NotImplementedError("flash_attn_func: second derivatives are not implemented (create_graph=True)")


def _save_inputs(ctx, inputs, output) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.is_tensor = [isinstance(x, Tensor) for x in inputs]


# As an op, so that a compiled backward raises when it runs, and not when it is compiled with its forward.
_no_gradient = _define("no_gradient", "(Tensor output_grad, Tensor input, str message) -> Tensor")


def _raise_no_gradient(output_grad: Tensor, input: Tensor, message: str) -> Tensor:
    raise NotImplementedError(message)


def _fake_no_gradient(output_grad: Tensor, input: Tensor, message: str) -> Tensor:
    return torch.empty_like(input)


_definitions.impl(_no_gradient, _raise_no_gradient, "CompositeExplicitAutograd")
torch.library.register_fake(_no_gradient, _fake_no_gradient, lib=_definitions)


def _refuse_fp8_backward(function: str, ctx, *output_grads: Tensor | None):
    output_grad = next((x for x in output_grads if x is not None), None)
    if output_grad is None:
        return ()
    message = (
        f"{function}: FP8 is a forward without a backward, and an input requires a gradient; detach it, or use "
        "fa3.flash_attn_fp8_func(..., straight_through=True), whose gradients are those of the 16-bit attention"
    )
    tensors = iter(ctx.saved_tensors)
    return [_no_gradient(output_grad, next(tensors), message) if is_tensor else None for is_tensor in ctx.is_tensor]


for _forward, _backward in zip(_FORWARDS, _BACKWARDS, strict=True):
    torch.library.register_fake(_forward, _fake_forward, lib=_definitions)
    torch.library.register_fake(_backward, _fake_backward, lib=_definitions)
    _derivative = functools.partial(_forward_derivative, _backward)
    _register_autograd(_forward, "flash_attn_func", _save_forward, _derivative)
    _register_autograd(_backward, "flash_attn_func", _save_nothing, _refuse_second_backward)
for _ops, _fake, _function in (
    (_FP8_FORWARDS, _fake_forward_fp8, "flash_attn_func"),
    (_FP8_QUANTIZERS, _fake_quantize_fp8, "quantize_fp8"),
):
    for _op in _ops:
        torch.library.register_fake(_op, _fake, lib=_definitions)
        _register_autograd(_op, _function, _save_inputs, functools.partial(_refuse_fp8_backward, _function))


def checkpoint_save_ops() -> list[torch._ops.OpOverload]:
    """The forward ops, for selective activation checkpointing: their outputs cost more to recompute than to keep.

    >>> from torch.utils import checkpoint
    >>> keep = functools.partial(checkpoint.create_selective_checkpoint_contexts, fa3.checkpoint_save_ops())
    >>> checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=keep)
    """
    return _FORWARDS + _FP8_FORWARDS


# --- FLOP formulas, over the (query, key) pairs that the mask leaves


def _pairs(q_shape, k_shape, mask: tuple[int, int, int]) -> int:
    batch, seqlen_q, num_heads_q, _ = q_shape
    return batch * num_heads_q * Mask(*mask).visible_pairs(seqlen_q, k_shape[1])


def forward_flops(q_shape, k_shape, v_shape, softmax_scale, left, right, chunk, *args, **kwargs) -> int:
    """2 matrix products (QK^T, PV), 2 FLOPs per multiply-add."""
    return 2 * _pairs(q_shape, k_shape, (left, right, chunk)) * (q_shape[3] + v_shape[3])


def fp8_forward_flops(
    q_shape, k_shape, v_shape, q_descale, k_descale, v_descale, softmax_scale, left, right, chunk, *args, **kwargs
) -> int:
    """As the 16-bit forward: scales and rounding are not counted. v has k's head_dim, but not last where transposed."""
    return 2 * _pairs(q_shape, k_shape, (left, right, chunk)) * 2 * q_shape[3]


def backward_flops(
    dout_shape, dlse_shape, q_shape, k_shape, v_shape, out, lse, softmax_scale, left, right, chunk, *args, **kwargs
) -> int:
    """5 matrix products: S and dP again, dV, dQ, dK."""
    return 2 * _pairs(q_shape, k_shape, (left, right, chunk)) * (3 * q_shape[3] + 2 * v_shape[3])


for _ops, _formula in (
    (_FORWARDS, forward_flops),
    (_BACKWARDS, backward_flops),
    (_FP8_FORWARDS, fp8_forward_flops),
):
    for _op in _ops:
        flop_counter.register_flop_formula(_op.overloadpacket)(_formula)
