"""The FP8 format that the quantizer writes and the attention reads: e4m3, the rows of a scale, transposed V."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = torch.finfo(E4M3).max
FP8_SCALE_ROWS = 128
"""Rows (queries or keys) of one scale, and keys of one step of the forward. kFp8ScaleRows in C++."""


def num_scales(seqlen: int, scale_rows: int = FP8_SCALE_ROWS) -> int:
    """Scales per batch and head, one for each scale_rows rows; 0 is one scale for all rows."""
    return -(-seqlen // scale_rows) if scale_rows else 1


def num_transposed_keys(seqlen: int) -> int:
    """The length of a line of transposed V: all keys, and zeros to the end of the last step of the forward."""
    return num_scales(seqlen) * FP8_SCALE_ROWS


def transpose_v(v: Tensor) -> Tensor:
    """V (b, s, h, d), e4m3, as the product P V reads it: (b, h, d, n), n = num_transposed_keys(s), a line per channel.

    Of every 16 keys, a line has the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15, in which P lies in the registers of an
    accumulator: key 8 i + 2 j + l has position 4 j + 2 i + l. Keys from s on are zeros.
    """
    seqlen = v.shape[1]
    lines = F.pad(v.view(torch.uint8).permute(0, 2, 3, 1), (0, num_transposed_keys(seqlen) - seqlen))  # (b, h, d, n)
    return lines.unflatten(-1, (-1, 2, 4, 2)).transpose(-3, -2).flatten(-4).view(E4M3)


def untranspose_v(v: Tensor, seqlen: int) -> Tensor:
    """Transposed V (b, h, d, n) -> (b, s, h, d), contiguous: the inverse of transpose_v."""
    lines = v.view(torch.uint8).unflatten(-1, (-1, 4, 2, 2)).transpose(-3, -2).flatten(-4)
    return lines[..., :seqlen].permute(0, 3, 1, 2).contiguous().view(E4M3)
