"""PEP 517 build backend: setuptools, with requirements for compiling only where something will be compiled.

A laptop without a CUDA compiler then installs the pure-Python package without a second copy of torch, and a machine
with an NVIDIA driver but no compiler gets the compiler from PyPI.
"""

from __future__ import annotations

import sys
from typing import Any

from setuptools.build_meta import (  # noqa: F401  (the hooks that need no change)
    build_editable,
    build_sdist,
    build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

from fa3_build.plan import kernels_switch
from fa3_build.toolkit import PIP_TOOLKIT, find_toolkits, has_nvidia_driver

COMPILE_REQUIREMENTS = ["torch>=2.10", "ninja", "nvidia-cutlass==4.2.*"]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return compile_requirements()


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return compile_requirements()


def compile_requirements() -> list[str]:
    """What compiling needs on this machine. Empty if no kernels will be built.

    This does not call the hook of setuptools, which runs setup.py: that cannot plan a build before these are installed.
    """
    wanted = kernels_switch()
    if wanted is False or sys.platform != "linux":
        return []
    # An isolated build compiles against the newest torch, which is built with CUDA 13.
    if any(toolkit.major == 13 for toolkit in find_toolkits()):
        return COMPILE_REQUIREMENTS
    return [*COMPILE_REQUIREMENTS, PIP_TOOLKIT] if wanted or has_nvidia_driver() else []
