"""The tensor maps of packed sequences on the GPU: csrc/common/tma.cuh, which no kernel takes for these yet."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fa3_build.commands import NVCC_FLAGS
from fa3_build.plan import CannotBuild, _cutlass
from fa3_build.toolkit import find_toolkits

SOURCE = Path(__file__).parent / "device" / "packed_map.cu"
CSRC = SOURCE.parent.parent.parent / "csrc"


@pytest.mark.gpu
def test_packed_maps_end_with_their_sequence(tmp_path):
    toolkit = next(iter(find_toolkits()), None)
    if toolkit is None:
        pytest.skip("needs a CUDA compiler")
    try:
        cutlass, _ = _cutlass()
    except CannotBuild as reason:
        pytest.skip(str(reason))
    program = tmp_path / "packed_map"
    command = [str(toolkit.nvcc), *NVCC_FLAGS, f"-I{CSRC}", f"-I{cutlass}", str(SOURCE), "-o", str(program)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    result = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 wrong" in result.stdout
