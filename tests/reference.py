"""The reference: attention written naively, in one function for every precision, differentiated by autograd."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


def visible(
    seqlen_q: int,
    seqlen_k: int,
    *,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    attention_chunk: int = 0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Which keys each query sees, by the definition of each mask: bool (seqlen_q, seqlen_k)."""
    position = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k, device=device)
    left, right = window_size
    sees = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left not in (-1, None):
        sees &= key >= position - left
    if right not in (-1, None):
        sees &= key <= position + right
    if causal:
        sees &= key <= position
    if attention_chunk:
        sees &= torch.div(key, attention_chunk, rounding_mode="floor") == torch.div(
            position, attention_chunk, rounding_mode="floor"
        )
    return sees


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    attention_chunk: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(softmax_scale q k^T) v at the dtype of its arguments.

    q (b, sq, h, d), k and v (b, sk, hk, d) -> out (b, sq, h, d), lse (b, h, sq). Masks are aligned to the bottom right.
    A row that sees no key has out 0 and lse -inf, and gives no gradient.
    """
    seqlen_q, seqlen_k, head_dim = q.shape[1], k.shape[1], q.shape[3]
    group_size = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group_size, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (head_dim**-0.5 if softmax_scale is None else softmax_scale)
    mask = {"causal": causal, "window_size": window_size, "attention_chunk": attention_chunk}
    sees = visible(seqlen_q, seqlen_k, **mask, device=q.device)
    scores = scores.masked_fill(~sees, -math.inf)
    has_key = sees.any(-1)  # (sq,)
    # Scores of rows without keys are replaced before softmax, whose gradient would be NaN there.
    scores = scores.masked_fill(~has_key[:, None], 0.0)
    if seqlen_k == 0:
        return torch.zeros_like(q), scores.new_full(scores.shape[:3], -math.inf)
    p = torch.softmax(scores, dim=-1).masked_fill(~has_key[:, None], 0.0)
    lse = torch.logsumexp(scores, dim=-1).masked_fill(~has_key, -math.inf)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


@dataclass
class Results:
    """What a call gave. Gradients are None where the call was a forward alone."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor | None = None
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None

    def items(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, x) for name, x in vars(self).items() if x is not None]


def run(
    function,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    dout: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
    **options,
) -> Results:
    """Results of function(q, k, v, **options) -> (out, lse) at dtype, with gradients if dout (and dlse) are given.

    Strides are kept where dtype is None.
    """
    inputs = [x.detach() if dtype is None else x.detach().to(dtype) for x in (q, k, v)]
    if dout is None:
        return Results(*function(*inputs, **options))
    for x in inputs:
        x.requires_grad_()
    out, lse = function(*inputs, **options)
    outputs, grads = [out], [dout.to(out.dtype)]
    if dlse is not None:
        outputs.append(lse)
        grads.append(dlse.to(lse.dtype))
    if not any(x.requires_grad for x in outputs):  # nothing depends on the inputs: no keys
        return Results(out, lse, *(torch.zeros_like(x) for x in inputs))
    found = torch.autograd.grad(outputs, inputs, grads, allow_unused=True)
    return Results(
        out.detach(),
        lse.detach(),
        *(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)),
    )


def truth(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> Results:
    """The float64 results."""
    return run(attention, q, k, v, dtype=torch.float64, **options)


def baseline(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> Results:
    """The same computation in PyTorch at the input dtype: the error that everyone accepts."""
    return run(attention, q, k, v, dtype=q.dtype, **options)
