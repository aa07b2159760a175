"""FP8 attention from 16-bit tensors: the quantizer with the paper's recipe, the attention, and a check of its accuracy.

The recipe is section 3.3 of Shah et al., "FlashAttention-3" (2024), arXiv:2407.08608. Block quantization: one scale for
each 128 rows. Incoherent processing: q and k are multiplied by the same orthogonal matrix, random signs times a
Hadamard matrix, which leaves q k^T and spreads outliers over all channels; the idea is from Chee et al., "QuIP:
2-Bit Quantization of Large Language Models With Guarantees" (2023), arXiv:2307.13304, the fast Hadamard form from Tseng
et al., "QuIP#" (2024), arXiv:2402.04396. `smooth_k` is from Zhang et al., "SageAttention" (2024), arXiv:2410.02367.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fa3._backend import op_of_path
from fa3.arguments import (
    Call,
    QuantizeOptions,
    argument_error,
    as_bool,
    check_call,
    check_quantizer_inputs,
    check_quantizer_options,
)
from fa3.fp8_format import FP8_SCALE_ROWS
from fa3.interface import attend, flash_attn_func
from fa3.mask import Mask
from fa3.portable.fp8 import rotate

# Sizes of the Hadamard transform: powers of 2 that are head_dims of the kernels.
_HADAMARD_SIZES = (64, 128, 256)


@dataclass(frozen=True, eq=False)
class Fp8Transform:
    """What quantize_fp8 did to q and k before rounding: what the writer of a KV cache does to each further key.

    A key is rotated (where rotary was given), k_mean is subtracted, and it is padded with zeros to the length of
    signs(), multiplied by them, and Hadamard transformed. Values are only padded.
    """

    seed: int
    """Of the random signs."""
    incoherent: bool
    """Whether signs and Hadamard transform were applied."""
    head_dim: int
    """The caller's, before padding: softmax_scale is 1 / sqrt(head_dim), and out[..., :head_dim] is the output."""
    k_mean: Tensor | None
    """(batch, num_heads_kv, head_dim) float32, the mean of the rotated k over its rows; None without smooth_k."""

    def signs(self, device: torch.device | str = "cpu") -> Tensor | None:
        """The random signs, float32, of length 64, 128 or 256; None without incoherent. Equal on every device."""
        return _signs(self.seed, _hadamard_size(self.head_dim), torch.device(device)) if self.incoherent else None


class Fp8Inputs(NamedTuple):
    """What quantize_fp8 returns: the inputs of flash_attn_func, and how q and k were transformed."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor
    transform: Fp8Transform


def quantize_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int | None = FP8_SCALE_ROWS,
    incoherent: bool = True,
    seed: int = 0,
    rotary: tuple[Tensor, Tensor] | None = None,
    rotary_interleaved: bool = False,
    smooth_k: bool = False,
    v_transposed: bool = False,
) -> Fp8Inputs:
    """FP8 inputs of flash_attn_func from 16-bit ones, in one pass over each tensor.

    >>> x = fa3.quantize_fp8(q, k, v)
    >>> scales = {"q_descale": x.q_descale, "k_descale": x.k_descale, "v_descale": x.v_descale}
    >>> out = fa3.flash_attn_func(x.q, x.k, x.v, softmax_scale=q.shape[3] ** -0.5, **scales)[..., : q.shape[3]]

    The steps, in float32: rotary, k minus its mean, signs and Hadamard transform of q and k, rounding to e4m3 with a
    scale such that the largest magnitude of a block becomes 448. NaN stays NaN and counts in no scale; an infinity
    makes its block NaN.

    Args:
        q, k, v: as for flash_attn_func, bfloat16 or float16; in plain PyTorch float32 too.
        block_size: 128, one scale for each 128 rows; or None, one for all rows of a batch and head.
        incoherent: q and k are multiplied by random signs and a Hadamard matrix over sqrt(n), n = 64, 128 or 256. It
            costs next to nothing, leaves q k^T, and spreads a large channel over all n. For another head_dim q, k and
            v are padded with zeros to the next n: pass softmax_scale = head_dim ** -0.5 and slice the output.
            Without it head_dim must be a multiple of 16, and stays.
        seed: of the signs, which are those of torch.randint with a torch.Generator of the CPU: the same everywhere.
            They are kept per seed, n and device; the first call with a new seed copies them to the GPU, which a CUDA
            graph cannot capture.
        rotary: (cos, sin), each (>= seqlen, rotary_dim / 2), float32 or dtype of q: rotary embedding of q and k, whose
            row i takes row i of both. Needs seqlen_q = seqlen_k.
        rotary_interleaved: False turns the pairs of channel i and i + rotary_dim / 2, True those of 2 i and 2 i + 1.
        smooth_k: subtracts from k its mean over rows, per batch, head and channel: all scores of a query change by the
            same amount, which softmax does not see, and a k with an offset keeps more digits. lse does see it: that
            of flash_attn_func is the one of the smoothed scores, less by softmax_scale * (q . k_mean).
        v_transposed: True writes v as flash_attn_func(..., v_transposed=True) reads it, which is faster.

    Returns:
        q, k, v: float8_e4m3fn, contiguous, shapes as given with head_dim padded as above. With v_transposed v is
            (batch, num_heads_kv, head_dim, ceil(seqlen_k / 128) * 128), as flash_attn_func says.
        q_descale: (batch, num_heads_q, blocks) float32. k_descale, v_descale: (batch, num_heads_kv, blocks).
            blocks is ceil(seqlen / 128), or 1 for block_size None.
        transform: an Fp8Transform, for whoever adds keys later.

    Raises:
        TypeError, ValueError, NotImplementedError: as flash_attn_func. Inputs may require gradients, but a
            backward through the results raises.
        RuntimeError: CUDA tensors without a Hopper GPU or without the compiled kernels.
    """
    function = "quantize_fp8"
    check_quantizer_inputs(function, q, k, v)
    options = QuantizeOptions(block_size, incoherent, seed, rotary, rotary_interleaved, smooth_k)
    options = check_quantizer_options(function, q, k, options)
    v_transposed = as_bool(v_transposed, "v_transposed", functools.partial(argument_error, function))
    return _quantize(function, q, k, v, options, v_transposed)


def _quantize(
    function: str, q: Tensor, k: Tensor, v: Tensor, options: QuantizeOptions, v_transposed: bool
) -> Fp8Inputs:
    """quantize_fp8 of checked arguments, for the public function whose name errors carry."""
    cos, sin = options.rotary or (None, None)
    head_dim = q.shape[3]
    quantize = op_of_path("quantize_fp8", q, function)
    signs, v_padding = None, 0
    if options.incoherent:
        size = _hadamard_size(head_dim)
        signs, v_padding = _signs(options.seed, size, q.device), size - head_dim
    rows = options.block_size or 0
    q8, q_descale, _ = quantize(q, signs, cos, sin, options.rotary_interleaved, False, rows)
    k8, k_descale, k_mean = quantize(k, signs, cos, sin, options.rotary_interleaved, options.smooth_k, rows)
    padded_v = F.pad(v, (0, v_padding)) if v_padding else v
    v8, v_descale, _ = quantize(padded_v, None, None, None, False, False, rows, v_transposed)
    transform = Fp8Transform(options.seed, options.incoherent, head_dim, k_mean if options.smooth_k else None)
    return Fp8Inputs(q8, k8, v8, q_descale, k_descale, v_descale, transform)


def _hadamard_size(head_dim: int) -> int:
    return next(size for size in _HADAMARD_SIZES if size >= head_dim)


def _signs(seed: int, size: int, device: torch.device) -> Tensor:
    """`size` random signs, float32. torch.compile takes them as a constant."""
    return _cached_signs(seed, size, device)


# As in _backend.py: torch.compiler.assume_constant_result without the import of torch._dynamo.
_signs._dynamo_marked_constant = True


@functools.cache
def _cached_signs(seed: int, size: int, device: torch.device) -> Tensor:
    # A plain tensor, whatever mode the first caller is in: the cache outlives a trace and inference mode.
    with _disable_current_modes(), torch.inference_mode(False):
        bits = torch.randint(2, (size,), generator=torch.Generator().manual_seed(seed), device="cpu")
        return (1.0 - 2.0 * bits.float()).to(device)


def flash_attn_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    incoherent: bool = True,
    seed: int = 0,
    block_size: int | None = FP8_SCALE_ROWS,
    smooth_k: bool = False,
    rotary: tuple[Tensor, Tensor] | None = None,
    rotary_interleaved: bool = False,
    return_lse: bool = False,
    straight_through: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """FP8 attention of 16-bit tensors: quantize_fp8, then flash_attn_func.

    What it costs in accuracy depends on the tensors: `fa3.validate_fp8` compares with the 16-bit attention.

    Args:
        q, k, v: as for flash_attn_func, bfloat16 or float16; in plain PyTorch float32 too.
        softmax_scale: as for flash_attn_func. None: 1 / sqrt(head_dim), whatever head_dim is padded to.
        causal: as for flash_attn_func.
        incoherent, seed, block_size, smooth_k, rotary, rotary_interleaved: as for quantize_fp8.
        return_lse: True returns lse as well: that of the scores q k^T, also with smooth_k.
        straight_through: FP8 has no backward: one through the results raises. With True the gradients are those of the
            16-bit attention at the same q, k and v, as if rounding were the identity; the forward stays FP8. The
            backward first computes the 16-bit forward, whose out and lse it needs; rotary is undone in it, and cos and
            sin get no gradient. Differentiable once.

    Returns:
        out: (batch, seqlen_q, num_heads_q, head_dim), contiguous, dtype of q. (It has passed through bfloat16, or
            float16 for float16 inputs.)
        lse: with return_lse, (batch, num_heads_q, seqlen_q) float32, rounded as flash_attn_func says of FP8.

        Rows that see no key are as in flash_attn_func: 0 and -inf.

    Raises:
        TypeError, ValueError, NotImplementedError: as flash_attn_func and quantize_fp8.
        RuntimeError: CUDA tensors without a Hopper GPU or without the compiled kernels.
    """
    function = "flash_attn_fp8_func"
    error = functools.partial(argument_error, function)
    return_lse = as_bool(return_lse, "return_lse", error)
    straight_through = as_bool(straight_through, "straight_through", error)
    check_quantizer_inputs(function, q, k, v)
    call = check_call(function, q, k, v, softmax_scale=softmax_scale, causal=causal)
    options = QuantizeOptions(block_size, incoherent, seed, rotary, rotary_interleaved, smooth_k)
    options = check_quantizer_options(function, q, k, options)
    attend_fp8 = _StraightThrough.apply if straight_through else _attend_fp8
    exact_lse = return_lse and options.smooth_k
    out, lse = attend_fp8(q, k, v, call.softmax_scale, call.mask, call.deterministic, options, exact_lse)
    return (out, lse) if return_lse else out


def _attend_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    mask: Mask,
    deterministic: bool,
    options: QuantizeOptions,
    exact_lse: bool,
) -> tuple[Tensor, Tensor]:
    """out and lse of checked arguments; without exact_lse, lse is that of the smoothed scores."""
    function = "flash_attn_fp8_func"
    q8, k8, v8, *descales, transform = _quantize(function, q, k, v, options, v_transposed=True)
    out_dtype = torch.float16 if q.dtype == torch.float16 else torch.bfloat16
    call = Call(function, q8, k8, v8, softmax_scale, mask, deterministic, tuple(descales), out_dtype, v_transposed=True)
    out, lse = attend(call)
    if out.shape[3] != q.shape[3]:
        out = out[..., : q.shape[3]].contiguous()
    if exact_lse:
        # Each score q . (k - k_mean) is less than q . k by q . k_mean.
        rotated_q = _rotate(q.float(), options)
        k_mean = transform.k_mean.repeat_interleave(q.shape[2] // k.shape[2], dim=1)  # (b, h, d)
        lse = lse + softmax_scale * torch.einsum("bshd,bhd->bhs", rotated_q, k_mean)
    return out.to(q.dtype), lse


def _rotate(x: Tensor, options: QuantizeOptions, *, back: bool = False) -> Tensor:
    """x rotated, in float32, as the options say; or back."""
    if options.rotary is None:
        return x
    cos, sin = options.rotary
    return rotate(x.float(), cos, -sin if back else sin, options.rotary_interleaved).to(x.dtype)


class _StraightThrough(torch.autograd.Function):
    """_attend_fp8 with the gradients of the 16-bit attention."""

    @staticmethod
    def forward(ctx, q, k, v, softmax_scale, mask, deterministic, options, exact_lse):
        ctx.save_for_backward(q, k, v)
        ctx.arguments = (softmax_scale, mask.left, mask.right, mask.chunk, deterministic)
        ctx.options = options
        # A backward runs where its forward ran.
        ctx.ops = [op_of_path(name, q, "flash_attn_fp8_func") for name in ("fwd", "bwd")]
        ctx.set_materialize_grads(False)
        return _attend_fp8(q, k, v, softmax_scale, mask, deterministic, options, exact_lse)

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v = ctx.saved_tensors
        q, k = (_rotate(x, ctx.options) for x in (q, k))
        forward, backward = ctx.ops
        out, lse = forward(q, k, v, *ctx.arguments)
        dout = torch.zeros_like(out) if dout is None else dout
        dq, dk, dv = backward(dout, dlse, q, k, v, out, lse, *ctx.arguments)
        dq, dk = (_rotate(x, ctx.options, back=True) for x in (dq, dk))  # the transpose of a rotation
        return dq, dk, dv, None, None, None, None, None


@dataclass(frozen=True, eq=False)
class Fp8Report:
    """How far FP8 attention is from the 16-bit attention, per head."""

    rmse: Tensor
    """(num_heads_q,) float32: root-mean-square difference of the outputs, relative to that of the 16-bit output."""
    threshold: float
    """The largest rmse of a head that is accepted."""

    @property
    def failing_heads(self) -> list[int]:
        """The query heads whose rmse is above the threshold, or NaN."""
        return (~(self.rmse <= self.threshold)).nonzero().flatten().tolist()

    def __str__(self) -> str:
        failing = self.failing_heads
        lines = [
            f"FP8 against 16 bits: relative RMSE {self.rmse.mean():.2e} on average, at most {self.rmse.max():.2e} "
            f"(head {int(self.rmse.argmax())})",
            f"{len(failing)} of {len(self.rmse)} heads above the threshold {self.threshold:g}",
        ]
        return "\n".join(lines + [f"  head {head}: {self.rmse[head]:.2e}" for head in failing])


@torch.no_grad()
def validate_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    threshold: float = 0.01,
    incoherent: bool = True,
    seed: int = 0,
    block_size: int | None = FP8_SCALE_ROWS,
    smooth_k: bool = False,
    rotary: tuple[Tensor, Tensor] | None = None,
    rotary_interleaved: bool = False,
) -> Fp8Report:
    """Compares flash_attn_fp8_func with flash_attn_func on the same tensors: which heads can run in FP8?

    >>> print(fa3.validate_fp8(q, k, v, causal=True))

    Args:
        q, k, v, causal, softmax_scale: as for flash_attn_fp8_func. The tensors of a real model: the error of FP8
            depends on them. (On independent normal values, whose average nearly cancels, it is about 0.05.)
        threshold: the relative error that is accepted.
        incoherent, seed, block_size, smooth_k, rotary, rotary_interleaved: as for quantize_fp8.

    Returns:
        An Fp8Report: print it, or read `rmse` and `failing_heads`. Reading those waits for the GPU, the call does not.

    Raises:
        As flash_attn_fp8_func.
    """
    options = QuantizeOptions(block_size, incoherent, seed, rotary, rotary_interleaved, smooth_k)
    fp8 = flash_attn_fp8_func(q, k, v, softmax_scale, causal, **options._asdict()).float()
    expected = flash_attn_func(_rotate(q, options), _rotate(k, options), v, softmax_scale, causal).float()
    error, size = (x.square().sum((0, 1, 3)) for x in (fp8 - expected, expected))  # (num_heads_q,)
    return Fp8Report(torch.where(error == 0, 0.0, (error / size).sqrt()), threshold)
