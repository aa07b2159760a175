"""The public attention functions: what they compute, and their arguments with defaults."""

from __future__ import annotations

import torch
from torch import Tensor

from fa3._backend import op_of_path
from fa3.arguments import Call, check_call


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
    Differentiable once in q, k and v, through out and lse, in reverse mode; a forward-mode derivative (jvp, jacfwd,
    dual numbers) raises. FP8 inputs have no gradients: a backward through them raises.

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
            None: 1 / sqrt(head_dim). Like all numbers and flags it may be Python's or numpy's, but no tensor.
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
            i + seqlen_k - seqlen_q - left to i + seqlen_k - seqlen_q + right. -1 and None are unlimited. causal=True
            is right = 0 whatever window_size says. Blocks of keys that no query of a block sees are never read. FP8
            inputs take only windows that hide no key, or that equal causal.
        attention_chunk: the length of a chunk of keys, 0 or None for none: query i, at position
            p = i + seqlen_k - seqlen_q among the keys, sees only keys j with j // attention_chunk = p //
            attention_chunk, of those that causal and window_size leave (Llama 4's chunked attention). Not for FP8.
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
        adds nothing to dk and dv. Sizes of 0 in batch, seqlen_q and seqlen_k are fine. NaN in v at a key that the
        mask hides may reach rows that share a block of keys with it (0 x NaN), as in a matrix product with P; so may
        NaN in q or in the gradient of out reach dk and dv of hidden keys, and NaN in k reach dq.

    Accuracy: in bfloat16 and float16 the errors of out, lse and the gradients are at most twice those of plain PyTorch
    at the same dtype, for scaled scores up to about 1e6. Beyond, lse in float32 has no digits left for the logarithm of
    a sum. Results are finite where the scaled scores are.

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
    call = check_call(
        "flash_attn_func",
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        qv=qv,
        descales=(q_descale, k_descale, v_descale),
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        sm_margin=sm_margin,
        deterministic=deterministic,
        out_dtype=out_dtype,
        v_transposed=v_transposed,
    )
    out, lse = attend(call)
    return (out, lse) if return_attn_probs or return_lse else out


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """out and lse of the op that the call takes."""
    q, k, v, mask = call.q, call.k, call.v, call.mask
    if call.descales is None:
        forward = op_of_path("fwd", q, call.function)
        return forward(q, k, v, call.softmax_scale, mask.left, mask.right, mask.chunk, call.deterministic)
    forward = op_of_path("fwd_fp8", q, call.function)
    options = (mask.left, mask.right, mask.chunk, call.out_dtype == torch.float16, call.v_transposed)
    return forward(q, k, v, *call.descales, call.softmax_scale, *options)
