"""Who is measured. Every provider computes the same function on q, k, v of shape (batch, seqlen, heads, head_dim)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
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


def _fa3_deterministic() -> Provider:
    import fa3

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        return fa3.flash_attn_func(q, k, v, causal=causal, deterministic=True)

    return Provider("fa3-deterministic", fa3.__version__, forward)


def _torch_sdpa() -> Provider:
    return Provider("torch-sdpa", torch.__version__, _sdpa(None))


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


def _flash_attn_4() -> Provider:
    from flash_attn.cute import flash_attn_func

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        return flash_attn_func(q, k, v, causal=causal)[0]  # (out, lse)

    return Provider("flash-attn-4", version("flash-attn-4"), forward)


def _sdpa(backend: SDPBackend | None) -> Forward:
    """torch's attention by one backend, or by the one that torch chooses."""

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # views: (batch, heads, seqlen, head_dim) of the same memory
        grouped = q.shape[1] != k.shape[1]
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)

    return forward


LOADERS: dict[str, Callable[[], Provider]] = {
    "fa3": _fa3,
    "fa3-deterministic": _fa3_deterministic,
    "torch-sdpa": _torch_sdpa,
    "torch-cudnn": _torch_cudnn,
    "torch-fa2": _torch_fa2,
    "fa3-fwd": _fa3_fwd,
    "flash-attn-4": _flash_attn_4,
}


def load_providers(names: list[str]) -> tuple[list[Provider], dict[str, str]]:
    """The providers that are installed, and the reason for each one that is not."""
    loaded, missing = [], {}
    for name in names:
        try:
            loaded.append(LOADERS[name]())
        except Exception as error:  # a package that does not fit this torch or driver fails in many ways
            missing[name] = str(error)
    return loaded, missing
