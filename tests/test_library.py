"""The compiled library without a GPU: which kernel it chooses, and the first checks of its ops."""

from __future__ import annotations

import ctypes

import pytest
import torch

from fa3 import _library

pytestmark = pytest.mark.skipif(not _library.is_loaded(), reason="needs the compiled library")
DTYPES = {"fp16": 0, "bf16": 1, "e4m3": 2}
INT_MAX = 2**31 - 1
CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


def rows(direction: str) -> list[dict]:
    return [row for row in _library.kernel_table() if row["pass"] == direction]


def select_forward(row: dict, **changes: int | bool) -> int:
    """The row that a call takes, of -1; the call is one that `row` serves, with changes."""
    call = {
        "dtype": DTYPES[row["dtype"]],
        "head_dim": row["head_dim"],
        "head_dim_v": row["head_dim_v"],
        "seqlen_q": 64,
        "seqlen_k": 64,
        "window_left": -1,
        "window_right": -1,
        "attention_chunk": 0,
        "v_transposed": row["name"].endswith("_vt"),
    } | changes
    return ctypes.CDLL(str(_library.LIBRARY)).fa3_select_fwd_kernel(*call.values())


def select_backward(dtype: int, head_dim: int, head_dim_v: int) -> int:
    return ctypes.CDLL(str(_library.LIBRARY)).fa3_select_bwd_kernel(dtype, head_dim, head_dim_v)


@pytest.mark.parametrize("row", rows("fwd"), ids=lambda row: row["name"])
def test_forward_calls_take_a_kernel_that_fits(row):
    for seqlen_k in (1, 1000, 10**6):
        for window_right in (-1, 0):
            selected = select_forward(row, seqlen_k=seqlen_k, window_right=window_right)
            if selected >= 0:  # a build of some kernels may lack the one for this length
                chosen = _library.kernel_table()[selected]
                assert (chosen["pass"], chosen["dtype"], chosen["head_dim"]) == ("fwd", row["dtype"], row["head_dim"])
                assert chosen["name"].endswith("_vt") == row["name"].endswith("_vt")


@pytest.mark.parametrize("row", rows("fwd"), ids=lambda row: row["name"])
def test_a_window_that_hides_no_key_is_no_window(row):
    lengths = {"seqlen_q": 700, "seqlen_k": 1000}
    full, causal = (select_forward(row, **lengths, window_right=right) for right in (-1, 0))
    for left in (-1, 999, 1000, INT_MAX):
        assert select_forward(row, **lengths, window_left=left) == full
        assert select_forward(row, **lengths, window_left=left, window_right=0) == causal
    for right in (699, 700, INT_MAX):
        assert select_forward(row, **lengths, window_right=right) == full


@pytest.mark.parametrize("row", rows("fwd"), ids=lambda row: row["name"])
def test_the_only_query_sees_every_key_below_a_causal_mask(row):
    for seqlen_k in (1, 1000, 10**6):
        causal, full = (select_forward(row, seqlen_q=1, seqlen_k=seqlen_k, window_right=right) for right in (0, -1))
        assert causal == full


@pytest.mark.parametrize("row", rows("fwd"), ids=lambda row: row["name"])
@pytest.mark.parametrize(
    "mask",
    [
        {"window_left": 62},
        {"window_left": 0, "window_right": 0},
        {"window_right": 1},
        {"window_right": 62},
        {"attention_chunk": 63},
        {"window_right": 0, "attention_chunk": 20},
    ],
    ids=str,
)
def test_windows_and_chunks_are_for_16_bits(row, mask):
    selected = select_forward(row, **mask)
    if row["dtype"] == "e4m3":
        assert selected == -1
    elif selected >= 0:  # a build of some kernels may lack the one for this mask
        assert _library.kernel_table()[selected]["head_dim"] == row["head_dim"]


@pytest.mark.parametrize("row", rows("fwd"), ids=lambda row: row["name"])
def test_a_narrow_window_takes_the_kernel_of_short_sequences(row):
    if row["dtype"] != "e4m3":
        narrow = select_forward(row, seqlen_q=10**5, seqlen_k=10**5, window_left=100, window_right=0)
        assert narrow == select_forward(row, seqlen_q=101, seqlen_k=101, window_right=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"window_left": -2},
        {"window_right": -2},
        {"attention_chunk": -1},
        {"head_dim": 264},
        {"head_dim_v": 264},
        {"dtype": 7},
    ],
    ids=str,
)
def test_calls_that_no_kernel_serves(changes):
    for row in rows("fwd"):
        assert select_forward(row, **changes) == -1


@pytest.mark.parametrize("row", rows("bwd"), ids=lambda row: row["name"])
def test_backward_calls_take_a_kernel_that_fits(row):
    selected = select_backward(DTYPES[row["dtype"]], row["head_dim"], row["head_dim_v"])
    assert _library.kernel_table()[selected]["name"] == row["name"]
    assert select_backward(DTYPES[row["dtype"]], 264, 264) == -1


@pytest.mark.skipif(not hasattr(torch.library, "get_kernel"), reason="needs torch.library.get_kernel")
@pytest.mark.parametrize("op", ["fwd", "fwd_fp8", "bwd"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int32, torch.uint8, torch.bool, torch.float8_e5m2]
)
def test_messages_name_dtypes(op, dtype):
    """The implementation for CUDA, called with tensors of the CPU: the dtype of q is checked first."""
    q = torch.zeros(1, 2, 3, 64).to(dtype)
    mask = (-1, -1, 0)
    arguments = {
        "fwd": (q, q, q, 0.125, *mask, False),
        "fwd_fp8": (q, q, q, q, q, q, 0.125, *mask, False, False),
        "bwd": (q, None, q, q, q, q, q, 0.125, *mask, False),
    }[op]
    rule = "float8_e4m3fn" if op == "fwd_fp8" else "float16 or bfloat16"
    with pytest.raises(RuntimeError, match=f"{op}: q must be {rule}, got {str(dtype).removeprefix('torch.')}"):
        torch.library.get_kernel(f"fa3::{op}", "CUDA").call_boxed(CUDA, *arguments)
