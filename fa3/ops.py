"""The operators in namespace fa3: schemas, shape-only (fake) implementations, autograd and FLOP formulas.

    fwd, bwd                    Hopper kernels; schemas and implementations are in the compiled library (csrc/api.cpp)
    fwd_fp8, quantize_fp8       the same for FP8 (e4m3), without a backward
    portable_<any of these>     plain PyTorch, any device, with the same schema

All are functional: outputs are new tensors. Shapes: q and out (b, sq, h, d), k and v (b, sk, hk, d), lse (b, h, sq).
A backward runs where its forward ran. `deterministic` is for the backward: the forward hands it on, and is bit-equal
from run to run in any case. The ops for FP8 are described at their portable twins in fp8_portable.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import flop_counter

from fa3 import _library, fp8_portable, portable

_definitions = torch.library.Library("fa3", "FRAGMENT")
_definitions.define(
    "portable_fwd(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal, bool deterministic=False) "
    "-> (Tensor out, Tensor lse)",
    tags=[torch.Tag.pt2_compliant_tag],
)
_definitions.define(
    "portable_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "float softmax_scale, bool causal, bool deterministic) -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=[torch.Tag.pt2_compliant_tag],
)
_definitions.define(
    "portable_fwd_fp8(Tensor q, Tensor k, Tensor v, Tensor q_descale, Tensor k_descale, Tensor v_descale, "
    "float softmax_scale, bool causal, bool out_fp16, bool v_transposed=False) -> (Tensor out, Tensor lse)",
    tags=[torch.Tag.pt2_compliant_tag],
)
_definitions.define(
    "portable_quantize_fp8(Tensor x, Tensor? signs, Tensor? cos, Tensor? sin, bool rotary_interleaved, bool smooth, "
    "int block_size, bool transpose=False) -> (Tensor x8, Tensor descale, Tensor mean)",
    tags=[torch.Tag.pt2_compliant_tag],
)
_definitions.impl("portable_fwd", portable.forward, "CompositeExplicitAutograd")
_definitions.impl("portable_bwd", portable.backward, "CompositeExplicitAutograd")
_definitions.impl("portable_fwd_fp8", fp8_portable.forward, "CompositeExplicitAutograd")
_definitions.impl("portable_quantize_fp8", fp8_portable.quantize, "CompositeExplicitAutograd")

_library.load()


def _compiled(name: str) -> torch._ops.OpOverload | None:
    """The op of the compiled library, or None where that is not loaded or has no such op."""
    packet = getattr(torch.ops.fa3, name, None)
    return None if packet is None else packet.default


portable_fwd = torch.ops.fa3.portable_fwd.default
portable_bwd = torch.ops.fa3.portable_bwd.default
portable_fwd_fp8 = torch.ops.fa3.portable_fwd_fp8.default
portable_quantize_fp8 = torch.ops.fa3.portable_quantize_fp8.default
fwd, bwd, fwd_fp8, quantize_fp8 = (_compiled(name) for name in ("fwd", "bwd", "fwd_fp8", "quantize_fp8"))

# Forward and backward ops of each path.
_PATHS = [(portable_fwd, portable_bwd)] + ([(fwd, bwd)] if _library.is_loaded() else [])
_FP8_FORWARDS = [op for op in (portable_fwd_fp8, fwd_fp8) if op is not None]
_FP8_QUANTISERS = [op for op in (portable_quantize_fp8, quantize_fp8) if op is not None]


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, deterministic: bool = False
) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, num_heads_q, _ = q.shape
    out = q.new_empty((batch, seqlen_q, num_heads_q, v.shape[3]))
    return out, q.new_empty((batch, num_heads_q, seqlen_q), dtype=portable.accumulate_dtype(q.dtype))


def _fake_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    causal: bool,
    deterministic: bool,
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
    causal: bool,
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
        x8_shape = (batch, num_heads, x8_head_dim, fp8_portable.num_transposed_keys(seqlen))
    x8 = x.new_empty(x8_shape, dtype=fp8_portable.E4M3)
    num_blocks = fp8_portable.num_scales(seqlen, block_size)
    descale = x.new_empty((batch, num_heads, num_blocks), dtype=torch.float32)
    return x8, descale, x.new_empty((batch, num_heads, head_dim) if smooth else (0,), dtype=torch.float32)


def _save_for_backward(ctx, inputs, output) -> None:
    q, k, v, ctx.softmax_scale, ctx.causal, ctx.deterministic = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.set_materialize_grads(False)  # a missing gradient of lse costs nothing


def _backward_with(op: torch._ops.OpOverload):
    """The backward of the forward whose gradients `op` computes."""

    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        q, k, v, out, lse = ctx.saved_tensors
        if dout is None:
            if dlse is None:
                return None, None, None, None, None, None
            dout = torch.zeros_like(out)
        grads = op(dout, dlse, q, k, v, out, lse, ctx.softmax_scale, ctx.causal, ctx.deterministic)
        return *grads, None, None, None

    return backward


def _refuse_second_backward(ctx, *grads):
    raise NotImplementedError("flash_attn_func: second derivatives are not implemented (create_graph=True)")


def _autograd_function(forward: torch._ops.OpOverload, backward: torch._ops.OpOverload) -> type:
    class FlashAttention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs) -> tuple[Tensor, Tensor]:
            output = forward(*inputs)
            _save_for_backward(ctx, inputs, output)
            return output

    FlashAttention.backward = staticmethod(_backward_with(backward))
    return FlashAttention


for _forward, _backward in _PATHS:
    torch.library.register_fake(_forward, _fake_forward, lib=_definitions)
    torch.library.register_fake(_backward, _fake_backward, lib=_definitions)
    torch.library.register_autograd(
        _forward, _backward_with(_backward), setup_context=_save_for_backward, lib=_definitions
    )
    torch.library.register_autograd(_backward, _refuse_second_backward, lib=_definitions)

for _forward in _FP8_FORWARDS:
    torch.library.register_fake(_forward, _fake_forward_fp8, lib=_definitions)
for _quantiser in _FP8_QUANTISERS:
    torch.library.register_fake(_quantiser, _fake_quantize_fp8, lib=_definitions)

_FUNCTIONS = {forward: _autograd_function(forward, backward) for forward, backward in _PATHS}


def attend(
    forward: torch._ops.OpOverload,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    causal: bool,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """The forward op `forward`, differentiable. In eager mode through an autograd.Function: the formula that
    register_autograd gave the op, which graphs and callers of the op use, costs several times as much host time.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return forward(q, k, v, softmax_scale, causal, deterministic)
    return _FUNCTIONS[forward].apply(q, k, v, softmax_scale, causal, deterministic)


def checkpoint_save_ops() -> list[torch._ops.OpOverload]:
    """The forward ops, for selective activation checkpointing: their outputs cost more to recompute than to keep.

    >>> from torch.utils import checkpoint
    >>> keep = functools.partial(checkpoint.create_selective_checkpoint_contexts, fa3.checkpoint_save_ops())
    >>> checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=keep)
    """
    return [forward for forward, _ in _PATHS] + _FP8_FORWARDS


def visible_pairs(seqlen_q: int, seqlen_k: int, causal: bool) -> int:
    """How many (query, key) pairs the mask leaves, per batch and query head."""
    if not causal:
        return seqlen_q * seqlen_k
    # The last `rows` queries see seqlen_k - rows + 1, ..., seqlen_k keys; those before them see none.
    rows = min(seqlen_q, seqlen_k)
    return rows * (2 * seqlen_k - rows + 1) // 2


def forward_flops(q_shape, k_shape, v_shape, softmax_scale, causal, *args, out_shape=None, **kwargs) -> int:
    """2 matrix products (QK^T, PV) over the visible pairs, 2 FLOPs per multiply-add."""
    batch, seqlen_q, num_heads_q, head_dim = q_shape
    pairs = batch * num_heads_q * visible_pairs(seqlen_q, k_shape[1], causal)
    return 2 * pairs * (head_dim + v_shape[3])


def fp8_forward_flops(
    q_shape, k_shape, v_shape, q_descale_shape, k_descale_shape, v_descale_shape, softmax_scale, causal, *args, **kwargs
) -> int:
    """As the 16-bit forward: scales and rounding are not counted. v has k's head_dim, but not last where transposed."""
    return forward_flops(q_shape, k_shape, k_shape, softmax_scale, causal)


def backward_flops(
    dout_shape, dlse_shape, q_shape, k_shape, v_shape, out_shape_, lse_shape, softmax_scale, causal, *args, **kwargs
) -> int:
    """5 matrix products: S and dP again, dV, dQ, dK."""
    batch, seqlen_q, num_heads_q, head_dim = q_shape
    pairs = batch * num_heads_q * visible_pairs(seqlen_q, k_shape[1], causal)
    return 2 * pairs * (3 * head_dim + 2 * v_shape[3])


for _forward, _backward in _PATHS:
    flop_counter.register_flop_formula(_forward.overloadpacket)(forward_flops)
    flop_counter.register_flop_formula(_backward.overloadpacket)(backward_flops)
for _forward in _FP8_FORWARDS:
    flop_counter.register_flop_formula(_forward.overloadpacket)(fp8_forward_flops)
