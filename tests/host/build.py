"""Compiles tests/host/bindings.cpp with the host's C++ compiler, and imports it."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import pybind11
import pytest

HOST = Path(__file__).resolve().parent
ROOT = HOST.parent.parent
CSRC = ROOT / "csrc"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


@functools.cache
def load() -> ModuleType:
    """The module fa3_host, compiled where its sources have changed; skips the tests where there is no C++ compiler."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler", allow_module_level=True)
    sources = [HOST / "bindings.cpp", *sorted(CSRC.glob("*/*.h"))]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    library = ROOT / "build" / "host" / digest / f"fa3_host{SUFFIX}"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        includes = [f"-I{path}" for path in (CSRC, pybind11.get_include(), sysconfig.get_path("include"))]
        flags = ["-std=c++20", "-O2", "-shared", "-fPIC", "-fvisibility=hidden"]
        unfinished = library.with_suffix(f".{os.getpid()}")  # other processes may compile it too
        command = [compiler, *flags, *includes, str(HOST / "bindings.cpp"), "-o", str(unfinished)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        unfinished.replace(library)
    spec = importlib.util.spec_from_file_location("fa3_host", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
