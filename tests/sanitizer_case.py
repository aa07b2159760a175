"""A few small calls that reach every kernel, for compute-sanitizer: `sanitizer_case.py forward`, and so on."""

from __future__ import annotations

import itertools
import os
import sys

import torch
from tiles import BWD_HEAD_DIMS, FWD_FP8_TILES, FWD_TILES, UNLIMITED

import fa3

SHAPES = ((130, 200), (100, 70), (70, 1))  # (seqlen_q, seqlen_k): ragged tiles, rows without keys, one key


def inputs(seqlen_q: int, seqlen_k: int, head_dim: int, num_heads_q: int = 2) -> list[torch.Tensor]:
    """From the host, so that no kernel runs but ours. Head_dim 8 less than the kernel's, GQA."""
    shapes = (1, seqlen_q, num_heads_q, head_dim - 8), *((1, seqlen_k, 1, head_dim - 8),) * 2
    return [torch.randn(shape).bfloat16().cuda() for shape in shapes]


def check(*outputs: torch.Tensor) -> None:
    for x in outputs:
        assert not x.cpu().isnan().any()


def forward() -> None:
    for tile, causal in itertools.product(FWD_TILES.values(), (False, True)):
        limit = tile.max_seqlen_k(causal)
        past_limit = ((70, limit + 1),) if limit != UNLIMITED else ()  # for the kernel that takes over there
        for seqlen_q, seqlen_k in SHAPES + past_limit:
            q, k, v = inputs(seqlen_q, seqlen_k, tile.head_dim)
            check(*fa3.flash_attn_func(q, k, v, causal=causal, return_lse=True))


def backward() -> None:
    flags = (False, True)
    for head_dim, shape, causal, deterministic in itertools.product(BWD_HEAD_DIMS, SHAPES, flags, flags):
        leaves = [x.requires_grad_() for x in inputs(*shape, head_dim)]
        outputs = fa3.flash_attn_func(*leaves, causal=causal, deterministic=deterministic, return_lse=True)
        output_grads = [torch.randn(x.shape).to(x.dtype).cuda() for x in outputs]
        check(*torch.autograd.grad(outputs, leaves, output_grads))


def fp8() -> None:
    """The quantizer and the FP8 forward, also with more tiles than CTAs, which go from one to the next."""
    many_heads = torch.cuda.get_device_properties(0).multi_processor_count + 4
    cases = [(*shape, 2) for shape in SHAPES] + [(70, 200, many_heads)]
    for tile, case, causal in itertools.product(FWD_FP8_TILES.values(), cases, (False, True)):
        seqlen_q, seqlen_k, num_heads_q = case
        x = fa3.quantize_fp8(*inputs(seqlen_q, seqlen_k, tile.head_dim, num_heads_q), v_transposed=tile.v_transposed)
        scales = {"q_descale": x.q_descale, "k_descale": x.k_descale, "v_descale": x.v_descale}
        options = {"causal": causal, "v_transposed": tile.v_transposed, "return_lse": True}
        check(*fa3.flash_attn_func(x.q, x.k, x.v, **scales, **options))


def quantize() -> None:
    """Rotary halves of all columns and of some, and interleaved; tables of both types; with and without the rest."""
    modes = ((False, False, 128), (True, False, 128), (True, True, 128), (True, True, 0))
    for width, seqlen, interleaved, (transform, smooth, block_size) in itertools.product(
        (64, 128, 256), (130, 1), (False, True), modes
    ):
        for rotary_dim in (0, width // 2, width):
            x = torch.randn(2, seqlen, 3, width).bfloat16().cuda()
            cos, sin = torch.randn(2, seqlen, rotary_dim // 2).cuda() if rotary_dim else (None, None)
            if rotary_dim == width // 2:
                cos, sin = cos.bfloat16(), sin.bfloat16()
            signs = torch.ones(width).cuda() if transform else None
            x8, descale, mean = torch.ops.fa3.quantize_fp8(x, signs, cos, sin, interleaved, smooth, block_size)
            check(x8.cpu().float(), descale, mean)
    for width, seqlen, block_size in itertools.product((64, 128, 256), (130, 1), (128, 0)):
        v = torch.randn(2, seqlen, 3, width).bfloat16().cuda()
        v8, descale, _ = torch.ops.fa3.quantize_fp8(v, None, None, None, False, False, block_size, True)
        check(v8.cpu().float(), descale)


if __name__ == "__main__":
    {"forward": forward, "backward": backward, "fp8": fp8, "quantize": quantize}[sys.argv[1]]()
    print("all calls returned", flush=True)
    os._exit(0)  # under the sanitizer, torch's threads may outlive the interpreter, which then ends by std::terminate
