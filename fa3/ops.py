"""The operators in namespace fa3: schemas, shape-only (fake) implementations, autograd and FLOP formulas.

    fwd           Hopper kernels; schema and implementation are in the compiled library (csrc/api.cpp)
    portable_fwd  plain PyTorch, any device
    portable_bwd  plain PyTorch, any device; the backward of both

All are functional: outputs are new tensors. Shapes: q and out (b, sq, h, d), k and v
(b, sk, hk, d), lse (b, h, sq).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import flop_counter

from fa3 import _library, portable

_FORWARD_SCHEMA = "(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal) -> (Tensor out, Tensor lse)"
_BACKWARD_SCHEMA = (
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float softmax_scale, "
    "bool causal) -> (Tensor dq, Tensor dk, Tensor dv)"
)

_definitions = torch.library.Library("fa3", "FRAGMENT")
_definitions.define("portable_fwd" + _FORWARD_SCHEMA, tags=[torch.Tag.pt2_compliant_tag])
_definitions.define("portable_bwd" + _BACKWARD_SCHEMA, tags=[torch.Tag.pt2_compliant_tag])
_definitions.impl("portable_fwd", portable.forward, "CompositeExplicitAutograd")
_definitions.impl("portable_bwd", portable.backward, "CompositeExplicitAutograd")

_library.load()

portable_fwd = torch.ops.fa3.portable_fwd.default
portable_bwd = torch.ops.fa3.portable_bwd.default
# None where the library is not loaded.
fwd = torch.ops.fa3.fwd.default if _library.is_loaded() else None


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
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
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_for_backward(ctx, inputs, output) -> None:
    q, k, v, ctx.softmax_scale, ctx.causal = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.set_materialize_grads(False)  # a missing gradient of lse costs nothing


def _backward(ctx, dout: Tensor | None, dlse: Tensor | None):
    q, k, v, out, lse = ctx.saved_tensors
    if dout is None:
        if dlse is None:
            return None, None, None, None, None
        dout = torch.zeros_like(out)
    return *portable_bwd(dout, dlse, q, k, v, out, lse, ctx.softmax_scale, ctx.causal), None, None


def _refuse_second_backward(ctx, *grads):
    raise NotImplementedError("flash_attn_func: second derivatives are not implemented (create_graph=True)")


torch.library.register_fake("fa3::portable_bwd", _fake_backward, lib=_definitions)
torch.library.register_autograd("fa3::portable_bwd", _refuse_second_backward, lib=_definitions)
for _name in ("portable_fwd", "fwd") if _library.is_loaded() else ("portable_fwd",):
    torch.library.register_fake(f"fa3::{_name}", _fake_forward, lib=_definitions)
    torch.library.register_autograd(f"fa3::{_name}", _backward, setup_context=_save_for_backward, lib=_definitions)


def checkpoint_save_ops() -> list[torch._ops.OpOverload]:
    """The forward ops, for selective activation checkpointing: their outputs cost more to recompute than to keep.

    >>> from torch.utils import checkpoint
    >>> keep = functools.partial(checkpoint.create_selective_checkpoint_contexts, fa3.checkpoint_save_ops())
    >>> checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=keep)
    """
    return [portable_fwd] if fwd is None else [portable_fwd, fwd]


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


def backward_flops(
    dout_shape, dlse_shape, q_shape, k_shape, v_shape, out_shape_, lse_shape, softmax_scale, causal, *args, **kwargs
) -> int:
    """5 matrix products: S and dP again, dV, dQ, dK."""
    batch, seqlen_q, num_heads_q, head_dim = q_shape
    pairs = batch * num_heads_q * visible_pairs(seqlen_q, k_shape[1], causal)
    return 2 * pairs * (3 * head_dim + 2 * v_shape[3])


flop_counter.register_flop_formula([op.overloadpacket for op in checkpoint_save_ops()])(forward_flops)
flop_counter.register_flop_formula(portable_bwd.overloadpacket)(backward_flops)
