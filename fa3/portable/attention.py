"""Exact attention in plain PyTorch, tiled: the path for CPU tensors, and for any device on request.

The algorithm is FlashAttention's. The forward walks over key tiles with an online softmax and keeps, per row, only the
running maximum and sum, then saves lse (the log of the softmax denominator). The backward recomputes P from lse. Memory
is O(seqlen): nothing as large as seqlen_q x seqlen_k exists, only tiles of at most `_TILE_ELEMENTS` scores (more only
if batch x heads alone asks for it).

The query heads that share a KV head are rows of one matrix ("packed GQA"), so that MHA, GQA and MQA are one code, and
the sum over a group in dK and dV is part of the matrix product. Row r of such a matrix is query r // group_size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fa3.mask import Mask

# Scores per tile. CPU: S, dP and the mask of a tile stay in the last-level cache. GPU: few enough launches.
_TILE_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 26}
_MIN_TILE = 64
_MAX_TILE_Q = {"cpu": 512, "cuda": 2048}


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse and of every sum: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sdpa_covers(q: torch.Tensor, k: torch.Tensor, mask: Mask) -> bool:
    """Whether torch's own CPU attention computes this call exactly; the mask is simplified.

    torch's causal mask is aligned to the top left, and so is the same on squares only.
    """
    if q.device.type != "cpu" or q.numel() == 0 or k.numel() == 0:
        return False
    return mask == Mask() or (mask == Mask(right=0) and q.shape[1] == k.shape[1])


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    attention_chunk: int,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (b, sq, h, d), k and v (b, sk, hk, d) -> contiguous out (b, sq, h, d) and lse (b, h, sq).

    `deterministic` changes nothing, here and in `backward`: every sum has a fixed order.
    """
    mask = Mask(window_left, window_right, attention_chunk).simplified(q.shape[1], k.shape[1])
    if sdpa_covers(q, k, mask):
        return _sdpa_forward(q, k, v, softmax_scale, mask)
    return tiled_forward(q, k, v, softmax_scale, mask)


def _sdpa_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, mask: Mask
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's fused CPU kernel. Its lse is a natural logarithm in float32 (float64 for float64 inputs).

    Only its forward is used. In its backward the 16-bit dK and dV are sums of rounded tiles, and miss the error bound
    (bfloat16, causal, 2000 keys: dv error 2.8 times that of plain PyTorch at the same dtype); the float32 dQ is also
    above it with grouped heads, and the tiled backward below is as fast.
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, mask == Mask(right=0), scale=softmax_scale
    )
    return _contiguous_copy(out.transpose(1, 2)), _contiguous_copy(lse)


def _contiguous_copy(x: torch.Tensor) -> torch.Tensor:
    """A tensor of its own memory, which autograd does not take for a view: callers may change results in place."""
    return x.clone(memory_format=torch.contiguous_format)


def tile_sizes(q: torch.Tensor, k: torch.Tensor) -> tuple[int, int]:
    """(queries, keys) of a tile, which holds the scores of all batches and heads."""
    batch, seqlen_q, num_heads_q, _ = q.shape
    device = "cuda" if q.is_cuda else "cpu"
    scores_per_head = _TILE_ELEMENTS[device] // max(1, batch * num_heads_q)
    tile_q = min(max(math.isqrt(scores_per_head), _MIN_TILE), _MAX_TILE_Q[device], max(seqlen_q, 1))
    tile_k = min(max(scores_per_head // tile_q, _MIN_TILE), max(k.shape[1], 1))
    return tile_q, tile_k


@dataclass(frozen=True)
class _Tiling:
    """Sizes of one call and its walk over tiles. Rows are queries times group_size, batches are batch x KV heads."""

    seqlen_q: int
    seqlen_k: int
    group_size: int
    mask: Mask
    tile_q: int
    tile_k: int

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, mask: Mask) -> _Tiling:
        return cls(q.shape[1], k.shape[1], q.shape[2] // k.shape[2], mask, *tile_sizes(q, k))

    def query_tiles(self) -> list[tuple[int, int]]:
        """The tiles of all queries that see a key."""
        return _split(self.mask.first_query(self.seqlen_q, self.seqlen_k), self.seqlen_q, self.tile_q)

    def key_tiles(self, queries: tuple[int, int]) -> list[tuple[int, int]]:
        """The tiles that some of these queries see; what the mask hides entirely is not visited."""
        return _split(*self.mask.keys_of_tile(queries, self.seqlen_q, self.seqlen_k), self.tile_k)

    def rows(self, queries: tuple[int, int]) -> slice:
        return slice(queries[0] * self.group_size, queries[1] * self.group_size)

    def mask_(self, scores: torch.Tensor, queries: tuple[int, int], keys: tuple[int, int]) -> None:
        """Sets the hidden scores of a tile (batches, rows, keys) to -inf, in place."""
        hidden = self.mask.hidden(queries, keys, self.seqlen_q, self.seqlen_k, scores.device)
        if hidden is not None:
            scores.unflatten(1, (-1, self.group_size)).masked_fill_(hidden[:, None], -math.inf)


def _split(begin: int, end: int, step: int) -> list[tuple[int, int]]:
    return [(i, min(i + step, end)) for i in range(begin, end, step)]


def _operand_dtype(x: torch.Tensor) -> torch.dtype:
    """What the matrix products read. CUDA multiplies 16-bit operands into float32; elsewhere they are widened first,
    which also keeps P unrounded."""
    return x.dtype if x.is_cuda and x.dtype.itemsize == 2 else accumulate_dtype(x.dtype)


def _pack_queries(x: torch.Tensor, num_heads_kv: int, dtype: torch.dtype) -> torch.Tensor:
    """(b, sq, h, d) -> contiguous (b * hk, sq * group_size, d)"""
    batch, seqlen_q, num_heads_q, head_dim = x.shape
    group_size = num_heads_q // num_heads_kv
    packed = x.to(dtype).unflatten(2, (num_heads_kv, group_size)).transpose(1, 2)
    return packed.reshape(batch * num_heads_kv, seqlen_q * group_size, head_dim).contiguous()


def _unpack_queries(packed: torch.Tensor, like: torch.Tensor, num_heads_kv: int) -> torch.Tensor:
    """(b * hk, sq * group_size, d) -> contiguous (b, sq, h, d)"""
    batch, seqlen_q, num_heads_q, head_dim = like.shape
    grouped = packed.view(batch, num_heads_kv, seqlen_q, num_heads_q // num_heads_kv, head_dim)
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    out.unflatten(2, (num_heads_kv, -1)).copy_(grouped.transpose(1, 2))
    return out


def _pack_rows(x: torch.Tensor, num_heads_kv: int) -> torch.Tensor:
    """(b, h, sq) -> (b * hk, sq * group_size, 1)"""
    batch, num_heads_q, seqlen_q = x.shape
    packed = x.unflatten(1, (num_heads_kv, num_heads_q // num_heads_kv)).transpose(2, 3)
    return packed.reshape(batch * num_heads_kv, seqlen_q * (num_heads_q // num_heads_kv), 1)


def _pack_keys(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(b, sk, hk, d) -> contiguous (b * hk, sk, d)"""
    batch, seqlen_k, num_heads_kv, head_dim = x.shape
    return x.to(dtype).transpose(1, 2).reshape(batch * num_heads_kv, seqlen_k, head_dim).contiguous()


def _unpack_keys(packed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(b * hk, sk, d) -> contiguous (b, sk, hk, d)"""
    batch, seqlen_k, num_heads_kv, head_dim = like.shape
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    return out.copy_(packed.view(batch, num_heads_kv, seqlen_k, head_dim).transpose(1, 2))


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, with a result of at least float32."""
    if a.dtype.itemsize == 2:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a, b)


def _add_product_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, with a rounded to the dtype of b."""
    if b.dtype.itemsize == 2:
        total.add_(torch.bmm(a.to(b.dtype), b, out_dtype=torch.float32))
    else:
        total.baddbmm_(a, b)


def tiled_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, mask: Mask
) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward by tiles; shapes as in `forward`."""
    num_heads_kv = k.shape[2]
    tiling = _Tiling.of(q, k, mask)
    operand_dtype, dtype = _operand_dtype(q), accumulate_dtype(q.dtype)
    packed_q = _pack_queries(q, num_heads_kv, operand_dtype)  # (b * hk, sq * group_size, d)
    packed_k, packed_v = _pack_keys(k, operand_dtype), _pack_keys(v, operand_dtype)  # (b * hk, sk, d)

    # Queries that see no key keep these values.
    packed_out = torch.zeros(packed_q.shape, dtype=dtype, device=q.device)
    packed_lse = torch.full((*packed_q.shape[:2], 1), -math.inf, dtype=dtype, device=q.device)

    for queries in tiling.query_tiles():
        rows = tiling.rows(queries)
        tile_q = packed_q[:, rows]
        tile_out = packed_out[:, rows]
        row_max = packed_lse[:, rows].clone()  # of the raw scores, -inf so far
        row_sum = torch.zeros_like(row_max)
        for keys in tiling.key_tiles(queries):
            scores = _product(tile_q, packed_k[:, slice(*keys)].mT)
            tiling.mask_(scores, queries, keys)
            new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
            # A row that has met only scores of -inf: -inf minus -inf would be NaN.
            subtracted = new_max.masked_fill(new_max == -math.inf, 0.0)
            # The maximum is subtracted before scaling: exact for scores of any finite size.
            p = scores.sub_(subtracted).mul_(softmax_scale).exp_()
            rescale = row_max.sub_(subtracted).mul_(softmax_scale).exp_()
            row_sum.mul_(rescale).add_(p.sum(-1, keepdim=True))
            tile_out.mul_(rescale)
            _add_product_(tile_out, p, packed_v[:, slice(*keys)])
            row_max = new_max
        tile_out.div_(row_sum)
        packed_lse[:, rows] = row_sum.log_().add_(row_max, alpha=softmax_scale)

    out = _unpack_queries(packed_out, q, num_heads_kv)
    lse = packed_lse.view(q.shape[0], num_heads_kv, tiling.seqlen_q, tiling.group_size).transpose(2, 3)
    return out, _contiguous_copy(lse.flatten(1, 2))


def backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    attention_chunk: int,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Contiguous dq, dk, dv of a `forward`. dout may have any strides; dlse of None means zero.

    With P = exp(softmax_scale * S - lse), dP = dO V^T and D = rowsum(dO * O) - dlse:
    dV = P^T dO,  dS = P * (dP - D),  dQ = softmax_scale * dS K,  dK = softmax_scale * dS^T Q.

    P must fit D, or dS does not sum to 0 over the keys, and dQ is wrong in channels that all keys share; and P must sum
    to 1. torch's forward and this backward round a score differently, by up to 2^-24 of the largest one in float32, and
    lse is rounded as much. Where that is not far below the rounding of 16-bit inputs, the CPU computes lse, in two
    parts, and D = rowsum(P * dP) - dlse again from the scores of the backward: two more products for five.
    """
    num_heads_kv = k.shape[2]
    mask = Mask(window_left, window_right, attention_chunk).simplified(q.shape[1], k.shape[1])
    tiling = _Tiling.of(q, k, mask)
    operand_dtype, dtype = _operand_dtype(q), accumulate_dtype(q.dtype)
    packed_q = _pack_queries(q, num_heads_kv, operand_dtype)  # (b * hk, sq * group_size, d)
    packed_dout = _pack_queries(dout, num_heads_kv, operand_dtype)
    packed_k, packed_v = _pack_keys(k, operand_dtype), _pack_keys(v, operand_dtype)  # (b * hk, sk, d)
    if q.device.type == "cpu" and _largest_score(q, k, softmax_scale) > _LARGE_SCORE:
        packed_lse, lse_rest, packed_d = _lse_and_d_again(
            packed_q, packed_k, packed_v, packed_dout, softmax_scale, tiling
        )
    else:
        packed_lse, lse_rest = _pack_rows(lse, num_heads_kv), None  # (b * hk, sq * group_size, 1)
        packed_d = (_pack_queries(out, num_heads_kv, dtype) * packed_dout).sum(-1, keepdim=True)
    if dlse is not None:
        packed_d -= _pack_rows(dlse, num_heads_kv)

    packed_dq = torch.zeros(packed_q.shape, dtype=dtype, device=q.device)
    packed_dk = torch.zeros(packed_k.shape, dtype=dtype, device=q.device)
    packed_dv = torch.zeros_like(packed_dk)

    for queries in tiling.query_tiles():
        rows = tiling.rows(queries)
        tile_q, tile_dout = packed_q[:, rows], packed_dout[:, rows]
        for begin, end in tiling.key_tiles(queries):
            keys = slice(begin, end)
            scores = _product(tile_q, packed_k[:, keys].mT)
            tiling.mask_(scores, queries, (begin, end))
            # P is at most 1; the rounding of a huge lse must not say otherwise.
            p = scores.mul_(softmax_scale).sub_(packed_lse[:, rows])
            if lse_rest is not None:
                p.sub_(lse_rest[:, rows])
            p.clamp_(max=0.0).exp_()
            _add_product_(packed_dv[:, keys], p.mT, tile_dout)
            ds = _product(tile_dout, packed_v[:, keys].mT).sub_(packed_d[:, rows]).mul_(p)
            _add_product_(packed_dq[:, rows], ds, packed_k[:, keys])
            _add_product_(packed_dk[:, keys], ds.mT, tile_q)

    dq = _unpack_queries(packed_dq.mul_(softmax_scale), q, num_heads_kv)
    return dq, _unpack_keys(packed_dk.mul_(softmax_scale), k), _unpack_keys(packed_dv, v)


# Above this score, rounding costs P more than 2^-12.
_LARGE_SCORE = 2.0**12


def _largest_score(q: torch.Tensor, k: torch.Tensor, softmax_scale: float) -> float:
    """A bound of all scaled scores, and of the sums of some of their products: by the norms of q and k."""
    if q.numel() == 0 or k.numel() == 0:
        return 0.0
    norms = (torch.linalg.vector_norm(x, dim=-1, dtype=accumulate_dtype(x.dtype)).amax().item() for x in (q, k))
    return softmax_scale * math.prod(norms)


def _lse_and_d_again(
    packed_q: torch.Tensor,
    packed_k: torch.Tensor,
    packed_v: torch.Tensor,
    packed_dout: torch.Tensor,
    softmax_scale: float,
    tiling: _Tiling,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """lse in two parts that are added, and rowsum(P * dP), from the scores of `backward`; each (batches, rows, 1)."""
    shape, dtype = (*packed_q.shape[:2], 1), accumulate_dtype(packed_q.dtype)
    packed_max, packed_sum, packed_d = (
        torch.full(shape, x, dtype=dtype, device=packed_q.device) for x in (-math.inf, 0.0, 0.0)
    )
    for queries in tiling.query_tiles():
        rows = tiling.rows(queries)
        row_max, row_sum, d = packed_max[:, rows], packed_sum[:, rows], packed_d[:, rows]
        for begin, end in tiling.key_tiles(queries):
            scores = _product(packed_q[:, rows], packed_k[:, begin:end].mT)
            tiling.mask_(scores, queries, (begin, end))
            scores.mul_(softmax_scale)
            new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
            # As in tiled_forward: a row that has met only scores of -inf.
            subtracted = new_max.masked_fill(new_max == -math.inf, 0.0)
            p = scores.sub_(subtracted).exp_()
            rescale = (row_max - subtracted).exp_()
            row_sum.mul_(rescale).add_(p.sum(-1, keepdim=True))
            dp = _product(packed_dout[:, rows], packed_v[:, begin:end].mT)
            d.mul_(rescale).add_(dp.mul_(p).sum(-1, keepdim=True))
            row_max.copy_(new_max)
    return packed_max, packed_sum.log(), packed_d.div_(packed_sum)
