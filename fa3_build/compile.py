"""Runs one compiler call, `compile.py COMPILER ARGUMENTS...`, through ccache if it is installed.

Prints one line, `name, seconds, peak memory`, then the compiler's messages without ptxas's statistics. The whole output
goes to OBJECT.log beside the object file. fa3_build.commands turns these logs into the build report.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STATISTICS = re.compile(r"ptxas info|^\s+\d+ bytes stack frame")


def main(compiler: str, arguments: list[str]) -> int:
    if "-o" not in arguments:  # torch asks the compiler for its version
        return subprocess.run([compiler, *arguments], check=False).returncode
    target = Path(arguments[arguments.index("-o") + 1])
    source = next(Path(argument) for argument in arguments if argument.endswith((".cpp", ".cu")))
    ccache = shutil.which("ccache")
    command = [*([ccache] if ccache else []), compiler, *map(relative, arguments)]

    start = time.monotonic()
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), check=False
    )
    seconds = time.monotonic() - start
    peak_gb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9

    summary = f"{source.name}, {seconds:.1f} s, peak {peak_gb:.1f} GB"
    Path(f"{target}.log").write_text(f"{summary}\n{result.stdout}")
    print(summary)
    for line in result.stdout.splitlines():
        if result.returncode != 0 or not STATISTICS.search(line):
            print(line)
    return result.returncode


def relative(argument: str) -> str:
    """Makes the project's sources and include folders relative, so that no compiled file names the project's folder."""
    if argument.startswith(f"-I{ROOT}"):
        return f"-I{os.path.relpath(argument[2:])}"
    if argument.startswith(str(ROOT)) and argument.endswith((".cpp", ".cu")):
        return os.path.relpath(argument)
    return argument


def environment() -> dict[str, str]:
    """Sets ccache so that a clone in another folder, with the same compiler and headers, finds what this one built."""
    defaults = {"CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1", "CCACHE_COMPILERCHECK": "content"}
    return defaults | dict(os.environ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
