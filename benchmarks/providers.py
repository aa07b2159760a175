"""Who is measured. Every provider computes the same function on q, k, v of shape (batch, seqlen, heads, head_dim)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]


@dataclass(frozen=True)
class Provider:
    name: str
    version: str
    forward: Forward  # (q, k, v, causal) -> out


def _fa3() -> Provider:
    import fa3

    return Provider("fa3", fa3.__version__, lambda q, k, v, causal: fa3.flash_attn_func(q, k, v, causal=causal))


def _torch_cudnn() -> Provider:
    number = torch.backends.cudnn.version()
    if number is None:
        raise ImportError("this torch has no cuDNN")
    return Provider("torch-cudnn", f"{number // 10000}.{number % 10000 // 100}", _sdpa(SDPBackend.CUDNN_ATTENTION))


def _torch_fa2() -> Provider:
    return Provider("torch-fa2", torch.__version__, _sdpa(SDPBackend.FLASH_ATTENTION))


def _fa3_fwd() -> Provider:
    from fa3_fwd_interface import flash_attn_func

    return Provider("fa3-fwd", version("fa3-fwd"), lambda q, k, v, causal: flash_attn_func(q, k, v, causal=causal))


def _sdpa(backend: SDPBackend) -> Forward:
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # views: (batch, heads, seqlen, head_dim) of the same memory
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    return forward


LOADERS: dict[str, Callable[[], Provider]] = {
    "fa3": _fa3,
    "torch-cudnn": _torch_cudnn,
    "torch-fa2": _torch_fa2,
    "fa3-fwd": _fa3_fwd,
}


def load_providers(names: list[str]) -> tuple[list[Provider], dict[str, str]]:
    """The providers that are installed, and the reason for each one that is not."""
    loaded, missing = [], {}
    for name in names:
        try:
            loaded.append(LOADERS[name]())
        except (ImportError, OSError) as error:  # OSError: a shared library that does not fit this torch
            missing[name] = str(error)
    return loaded, missing
