"""Finds the command-line tools of CUDA that tests run."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path


def find_tool(name: str) -> str | None:
    """Path of cuobjdump, compute-sanitizer, ...: on PATH, in a CUDA toolkit, or in a package of PyPI."""
    folders = [Path(home) / "bin" for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    for package, inside in (("nvidia", "cu13/bin"), ("triton", "backends/nvidia/bin")):
        spec = importlib.util.find_spec(package)
        folders += [Path(root) / inside for root in (spec.submodule_search_locations or () if spec else ())]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(map(str, folders)))
