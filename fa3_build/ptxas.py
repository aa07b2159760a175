"""Reads registers, spills and warnings from what ptxas prints with -v."""

from __future__ import annotations

import re
from typing import Any

ENTRY = re.compile(r"Compiling entry function '(\w+)'")
PROPERTIES = re.compile(r"Function properties for (\w+)")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
BARRIERS = re.compile(r"used (\d+) barriers")
STATIC_SMEM = re.compile(r"(\d+) bytes smem")
CODE = re.compile(r"\bC75\d\d\b")  # messages about WGMMA pipelines and register counts
FOLDER = re.compile(r"(?<![\w.])(?:/[^\s/:;,'\"()]+)*/(?=[^\s/])")


def parse_kernels(log: str) -> list[dict[str, Any]]:
    """One row per kernel, in the order of the log. Device functions that are not kernels are ignored."""
    kernels: dict[str, dict[str, Any]] = {}
    current: dict[str, Any] | None = None  # the kernel being compiled
    properties_of = ""
    for line in log.splitlines():
        if match := ENTRY.search(line):
            current = kernels.setdefault(match[1], {"symbol": match[1]})
        elif match := PROPERTIES.search(line):
            properties_of = match[1]
        elif (match := STACK.search(line)) and properties_of in kernels:
            names = ("stack_bytes", "spill_stores_bytes", "spill_loads_bytes")
            kernels[properties_of].update(zip(names, map(int, match.groups()), strict=True))
        elif (match := REGISTERS.search(line)) and current is not None:
            current["registers"] = int(match[1])
            current["barriers"] = _number(BARRIERS, line)
            current["smem_static_bytes"] = _number(STATIC_SMEM, line)
    return list(kernels.values())


def parse_messages(log: str) -> list[str]:
    """The messages C7500 to C7599 of ptxas, each once, with file names but without folders."""
    lines = [without_folders(line.strip()) for line in log.splitlines() if CODE.search(line)]
    return list(dict.fromkeys(lines))


def without_folders(line: str) -> str:
    return FOLDER.sub("", line)


def _number(pattern: re.Pattern[str], line: str) -> int:
    match = pattern.search(line)
    return int(match[1]) if match else 0
