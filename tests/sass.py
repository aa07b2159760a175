"""Reads the machine code of compiled kernels with cuobjdump. It needs no GPU."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from cuda_tools import find_tool


@dataclass(frozen=True)
class Instruction:
    address: int
    text: str  # with its predicate

    @property
    def name(self) -> str:
        return self.text.removeprefix(self.text.split()[0] if self.text.startswith("@") else "").split()[0]


def read_sass(path: Path) -> dict[str, list[Instruction]]:
    """The instructions of every kernel in a library or an object file, by symbol."""
    functions = {}
    for part in re.split(r"^\s*Function : ", _cuobjdump("-sass", path), flags=re.MULTILINE)[1:]:
        code = re.findall(r"^\s*/\*([0-9a-f]{4,5})\*/\s+(.*?)\s*;", part, re.MULTILINE)
        functions[part.split(maxsplit=1)[0]] = [Instruction(int(address, 16), text) for address, text in code]
    return functions


def read_registers(path: Path) -> dict[str, int]:
    """Registers per thread at entry of every kernel in a library or an object file, by symbol."""
    found = re.findall(r"Function (\w+):\s+REG:(\d+)", _cuobjdump("-res-usage", path))
    return {symbol: int(registers) for symbol, registers in found}


def architectures(path: Path) -> set[str]:
    """The architectures that the kernels of a library are compiled for, such as {"sm_90a"}."""
    return set(re.findall(r"^arch = (\w+)$", _cuobjdump("-sass", path), re.MULTILINE))


def _cuobjdump(option: str, path: Path) -> str:
    cuobjdump = find_tool("cuobjdump")
    if cuobjdump is None:
        raise FileNotFoundError("cuobjdump (pip install nvidia-cuda-cuobjdump)")
    return subprocess.run([cuobjdump, option, str(path)], capture_output=True, text=True, check=True).stdout
