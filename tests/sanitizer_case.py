"""A few small calls that reach every forward kernel, for compute-sanitizer. Run by tests/test_forward_gpu.py."""

from __future__ import annotations

import torch
from tiles import FWD_TILES, UNLIMITED

import fa3

SHAPES = ((130, 200), (100, 70), (70, 1))  # (seqlen_q, seqlen_k): ragged tiles, rows without keys, one key


def main() -> None:
    for tile in FWD_TILES.values():
        for causal in (False, True):
            limit = tile.max_seqlen_k(causal)
            past_limit = ((70, limit + 1),) if limit != UNLIMITED else ()  # for the kernel that takes over there
            for seqlen_q, seqlen_k in SHAPES + past_limit:
                # Inputs from the host, so that no kernel runs but ours. Head_dim 8 less than the kernel's, GQA.
                q = torch.randn(1, seqlen_q, 2, tile.head_dim - 8).bfloat16().cuda()
                k, v = (torch.randn(1, seqlen_k, 1, tile.head_dim - 8).bfloat16().cuda() for _ in range(2))
                out, lse = fa3.flash_attn_func(q, k, v, causal=causal, return_lse=True)
                assert not out.cpu().isnan().any()
                assert not lse.cpu().isnan().any()
    print("all calls returned")


if __name__ == "__main__":
    main()
