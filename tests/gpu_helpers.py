"""What the GPU tests share."""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cuda_tools import find_tool
from reference import Results

FAR = 2**31  # elements: past the reach of 32-bit offsets


def check_equal(got: Results, expected: Results, note: str = "") -> None:
    """Asserts that all that got has is equal to the bit."""
    for name, x in got.items():
        assert torch.equal(x, getattr(expected, name)), f"{name} differs {note}"


def packed(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.clone(memory_format=torch.contiguous_format) for x in tensors]


def in_nan(x: torch.Tensor) -> torch.Tensor:
    """x as a slice, in every dimension, of a larger buffer of NaN. TMA can address it."""
    batch, seqlen, num_heads, head_dim = x.shape
    buffer = x.new_full((batch + 2, seqlen + 200, num_heads + 2, head_dim + 72), math.nan)
    return buffer[1:-1, 100:-100, 1:-1, 8:-64].copy_(x)


def offset_by_one(x: torch.Tensor) -> torch.Tensor:
    """The same strides from a base that is not 16-byte aligned."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def wider_by_four(x: torch.Tensor) -> torch.Tensor:
    """An aligned base, and strides of 8 bytes more than a multiple of 16."""
    return x.new_empty(*x.shape[:2], x.shape[2] * x.shape[3] + 4)[..., :-4].unflatten(2, x.shape[2:]).copy_(x)


@contextlib.contextmanager
def nan_in_new_memory():
    """torch fills the memory of new tensors: NaN in floating-point numbers, the largest value in integers."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(9, device="cuda").isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def far_apart() -> list[torch.Tensor]:
    """q, k, v and dout in one buffer of NaN: batches of q and dout, heads of k, and rows of v are far apart."""
    batch, seqlen, num_heads, head_dim = shape = (2, 130, 2, 64)
    buffer = torch.full((FAR + FAR // 32,), math.nan, dtype=torch.bfloat16, device="cuda")
    vector = num_heads * head_dim
    tensors = [
        buffer.as_strided(shape, (FAR, vector, head_dim, 1), 0),
        buffer.as_strided(shape, (seqlen * head_dim, head_dim, FAR, 1), seqlen * vector),
        buffer.as_strided(shape, (vector, FAR // 128, head_dim, 1), (2 + batch) * seqlen * vector),
        buffer.as_strided(shape, (FAR, vector, head_dim, 1), FAR // 256),
    ]
    for x in tensors:
        x.copy_(torch.randn(shape))
    return tensors


def needs_memory(gib: int) -> None:
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if free < gib << 30:
        pytest.skip(f"needs {gib} GiB of GPU memory, and {free >> 30} are free")


def run_sanitizer(tool: str, direction: str) -> None:
    """Asserts that compute-sanitizer's tool finds nothing in this function of sanitizer_case.py."""
    sanitizer = find_tool("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer was not found")
    script = Path(__file__).with_name("sanitizer_case.py")
    environment = {"PYTHONPATH": str(script.parent.parent), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    options = ["--tool", tool, "--error-exitcode", "1", "--print-limit", "100000"]
    if tool == "memcheck":
        options += ["--report-api-errors", "no"]  # torch asks the driver for what it may not have
    command = [sanitizer, *options, sys.executable, str(script), direction]
    result = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=180)
    if "Device not supported" in result.stdout + result.stderr:
        pytest.skip("compute-sanitizer does not support this machine")
    output = result.stdout[-5000:] + result.stderr[-2000:]
    if tool == "racecheck":
        unordered = [pair for pair in hazards(result.stdout) if not is_ordered_by_its_warp(direction, *pair)]
        assert unordered == [], output
    else:
        assert result.returncode == 0, output
    assert "all calls returned" in result.stdout


def hazards(output: str) -> list[tuple[str, str]]:
    """The functions of each two accesses between which racecheck reports a race."""
    found, first = [], ""
    for which, access in re.findall(r"(between|and) (?:Read|Write) access at (.*?)\+0x", output):
        while access != (access := re.sub(r"<[^<>]*>", "", access)):  # template arguments
            pass
        function = re.search(r"((?:\w+::)*\w+)\(", access)[1]
        if which == "between":
            first = function
        else:
            found.append((first, function))
    reported = int(re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed", output)[1])
    assert (reported == 0) == (found == []), output[-2000:]
    return found


def is_ordered_by_its_warp(direction: str, first: str, second: str) -> bool:
    """Whether a barrier is between the two at which one lane arrives after a __syncwarp, which racecheck does not see.

    docs/design/backward.md has the count that shows it. In the backward that is lse and D, which TMA brings and all
    lanes read, and P, which one warpgroup sends to the other; in the FP8 forward V, which TMA brings and the
    transposers read: no other thread reads what its tensor loads write but through WGMMA.
    """
    pair = {first, second}
    if direction == "backward":
        bulk_copy = "cute::SM90_BULK_COPY_G2S::copy"
        # The line table lays some of the vector's loads to a function that is inlined beside them.
        readers = ("fa3::bwd::QueryVector::QueryVector", "fa3::PipelineState::previous")
        # It lays one of P's stores to QueryTileIterator::advance, too, which touches registers alone.
        stores_of_p = ("fa3::bwd::store_halves", "fa3::bwd::QueryTileIterator::advance")
        return pair in [
            *({bulk_copy, reader} for reader in readers),
            *({"fa3::bwd::load_halves", store} for store in stores_of_p),
        ]
    return direction == "fp8" and "cute::SM90_TMA_LOAD_5D::copy" in pair
