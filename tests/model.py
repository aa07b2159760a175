"""A small model around the attention, and how tests train it and count its ops."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

import fa3


class Block(torch.nn.Module):
    """Attention as a model uses it: projections, a fused qkv, grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(64, (4 + 2 * 2) * 16)
        self.out = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (8, 16)).split([4, 2, 2], dim=2)
        attended, lse = fa3.flash_attn_func(q, k, v, causal=True, deterministic=True, return_lse=True)
        return self.out(attended.flatten(2)) + lse.mean()


def train_step(block: torch.nn.Module, x: torch.Tensor, call: Callable | None = None) -> list[torch.Tensor]:
    """Loss and gradients of the block, or of another way to call it."""
    block.zero_grad()
    loss = (call or block)(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in block.parameters())]


class Calls(TorchDispatchMode):
    """How often each op of fa3 ran."""

    def __init__(self) -> None:
        super().__init__()
        self.count = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fa3":
            self.count[func] += 1
        return func(*args, **(kwargs or {}))


def checkpointed_train_step(block: torch.nn.Module, x: torch.Tensor, saves: bool) -> list[torch.Tensor]:
    """train_step under activation checkpointing, with or without fa3.checkpoint_save_ops()."""
    options = {}
    if saves:
        save_ops = fa3.checkpoint_save_ops()
        options["context_fn"] = functools.partial(checkpoint.create_selective_checkpoint_contexts, save_ops)
    return train_step(block, x, functools.partial(checkpoint.checkpoint, block, use_reentrant=False, **options))
