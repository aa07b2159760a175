"""Compiles tests/host/bindings.cpp with the host's C++ compiler, and imports it."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import pybind11
import pytest

HOST = Path(__file__).resolve().parent
CSRC = HOST.parent.parent / "csrc"


@functools.cache
def load() -> ModuleType:
    """The module fa3_host, compiled once per process; skips the test where there is no C++ compiler."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / f"fa3_host{sysconfig.get_config_var('EXT_SUFFIX')}"
        includes = [f"-I{path}" for path in (CSRC, pybind11.get_include(), sysconfig.get_path("include"))]
        flags = ["-std=c++20", "-O2", "-shared", "-fPIC", "-fvisibility=hidden"]
        command = [compiler, *flags, *includes, str(HOST / "bindings.cpp"), "-o", str(library)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        spec = importlib.util.spec_from_file_location("fa3_host", library)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module
