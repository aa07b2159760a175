"""The permutations of the FP8 forward (csrc/common/fp8_format.h), with the instructions that use them emulated here."""

from __future__ import annotations

import numpy as np
import pytest
from host.build import load

TILE_N = 128


def swizzle(tile: np.ndarray, slab_bytes: int) -> np.ndarray:
    """(rows, bytes) as TMA writes it: slabs of slab_bytes columns, address bits 4 to 6 XOR bits 7 to 9 (or fewer)."""
    rows, width = tile.shape
    slabs = tile.reshape(rows, width // slab_bytes, slab_bytes).swapaxes(0, 1)
    address = np.arange(tile.size)
    bits = {128: 7, 64: 3}[slab_bytes]
    swizzled = np.empty(tile.size, tile.dtype)
    swizzled[address ^ ((address >> 7 & bits) << 4)] = slabs.ravel()
    return swizzled


def ldmatrix_trans(memory: np.ndarray, offsets: list[int]) -> np.ndarray:
    """Registers [lane, matrix, byte] of ldmatrix.x4.trans.b16: row r of matrix m lies at offsets[8 m + r]."""
    rows = np.stack([memory[offset : offset + 16] for offset in offsets]).reshape(
        4, 8, 8, 2
    )  # matrix, row, column, byte
    lanes = np.arange(32)
    return (
        np.stack([rows[:, 2 * (lanes % 4) + half, lanes // 4] for half in range(2)], axis=2)
        .swapaxes(0, 1)
        .reshape(32, 4, 4)
    )


def stmatrix(memory: np.ndarray, offsets: list[int], registers: np.ndarray) -> None:
    """stmatrix.x4.b16: lane l holds bytes 4 (l % 4) to 4 (l % 4) + 3 of row l / 4 of each matrix."""
    for matrix in range(4):
        for row in range(8):
            memory[offsets[8 * matrix + row] :][:16] = registers[4 * row : 4 * row + 4, matrix].ravel()


def banks_in_conflict(offsets: list[int]) -> int:
    """How many of the 16-byte rows of each matrix lie in banks of another, over all four."""
    return sum(8 - len({offset % 128 for offset in offsets[m : m + 8]}) for m in range(0, 32, 8))


def byte_perm(a: np.ndarray, b: np.ndarray, selector: int) -> np.ndarray:
    both = np.concatenate([a, b], axis=-1)
    return both[..., [selector >> 4 * i & 15 for i in range(4)]]


def key_of_position(position: np.ndarray) -> np.ndarray:
    q, b = position % 16 // 4, position % 4
    return position // 16 * 16 + 8 * (b // 2) + 2 * q + b % 2


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_v_is_transposed_and_its_keys_permuted(head_dim):
    host = load()
    v = np.random.default_rng(0).integers(0, 256, (TILE_N, head_dim), dtype=np.uint8)
    slab_bytes = min(head_dim, 128)
    source, destination = swizzle(v, slab_bytes), np.zeros(v.size, np.uint8)
    for channel in range(0, head_dim, 16):
        for key in range(0, TILE_N, 32):
            loads = [host.v_load_offset(slab_bytes, lane, key, channel, TILE_N) for lane in range(32)]
            stores = [host.vt_store_offset(lane, key, channel) for lane in range(32)]
            assert banks_in_conflict(loads) == banks_in_conflict(stores) == 0
            r = ldmatrix_trans(source, loads)
            halves = [
                np.stack([byte_perm(r[lane, m], r[lane, m + 1], host.channel_bytes(lane, which)) for lane in range(32)])
                for m in (0, 2)
                for which in (0, 1)
            ]
            stmatrix(destination, stores, np.stack(halves, axis=1))
    expected = v.T[:, key_of_position(np.arange(TILE_N))]
    np.testing.assert_array_equal(destination, swizzle(np.ascontiguousarray(expected), 128))


def test_p_becomes_an_operand_over_the_same_permutation():
    """Register i, byte b, of lane 4 g + q of an operand m64nNk32 is row g (+ 8) and position 4 q + b (+ 16) of 32."""
    host = load()
    for lane in range(32):
        g, q = divmod(lane, 4)
        for i in range(TILE_N // 8):
            row = g + 8 * (i % 2)
            positions = i // 4 * 32 + i % 4 // 2 * 16 + 4 * q + np.arange(4)
            for position, offset in zip(positions, (0, 1, 4, 5), strict=True):
                register = host.first_accumulator_register(i) + offset
                key = register // 4 * 8 + 2 * q + register % 2  # of the accumulator (csrc/common/layout.cuh)
                assert (g + 8 * (register // 2 % 2), key) == (row, key_of_position(position))
