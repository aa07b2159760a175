"""Decides whether the kernels can be built here, with what, and from which files.

Environment:
  FA3_BUILD_KERNELS   unset: build them if this machine can; 0: do not; 1: fail if they cannot be built
  FA3_KERNELS         build a subset while developing: a comma-separated list of parts of file names, or globs,
                      such as "bf16_hdim128" or "fwd_*_hdim64"
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from fa3_build.toolkit import PIP_TOOLKIT, Toolkit, find_toolkits

ROOT = Path(__file__).resolve().parent.parent
# In every build: the ops, and the quantizer, whose kernels compile in seconds.
OPS = (
    "csrc/ops/attention.cpp",
    "csrc/ops/quantize.cpp",
    "csrc/ops/kernel_table.cpp",
    "csrc/quantize/quantize_bf16.cu",
    "csrc/quantize/quantize_fp16.cu",
)
KERNELS = ("csrc/fwd/fwd_*.cu", "csrc/bwd/bwd_*.cu")
MINIMUM_CUDA = (12, 5)  # cudaGetDriverEntryPointByVersion
MINIMUM_TORCH = (2, 10)


class CannotBuild(Exception):
    """Says in one line why the kernels cannot be built on this machine."""


@dataclass(frozen=True)
class Plan:
    """What to build. Either every field but `reason` is set, or `reason` says why nothing is compiled."""

    reason: str | None = None
    toolkit: Toolkit | None = None
    cutlass_include: Path | None = None
    cutlass_version: str | None = None
    torch_version: str | None = None
    sources: tuple[str, ...] = ()

    @property
    def build(self) -> bool:
        return self.reason is None


def make_plan() -> Plan:
    """The plan for this machine and environment. Exits with the reason if FA3_BUILD_KERNELS=1 cannot be satisfied."""
    forced = kernels_switch()
    if forced is False:
        return Plan(reason="FA3_BUILD_KERNELS=0 was set at build time")
    try:
        return _plan_kernels()
    except CannotBuild as error:
        if forced:
            raise SystemExit(f"fa3: FA3_BUILD_KERNELS=1, but {error}") from error
        return Plan(reason=str(error))


def kernels_switch() -> bool | None:
    """The value of FA3_BUILD_KERNELS: True, False, or None if it is unset."""
    value = os.environ.get("FA3_BUILD_KERNELS", "")
    if value not in ("", "0", "1"):
        raise SystemExit(f"fa3: FA3_BUILD_KERNELS must be 0, 1 or unset, got {value!r}")
    return {"": None, "0": False, "1": True}[value]


def kernel_sources() -> list[str]:
    """The .cu files of attention to compile, relative to the project folder: all, or those that FA3_KERNELS selects."""
    sources = sorted(path.relative_to(ROOT).as_posix() for pattern in KERNELS for path in ROOT.glob(pattern))
    wanted = [part.strip() for part in os.environ.get("FA3_KERNELS", "").split(",") if part.strip()]
    if not wanted:
        return sources
    chosen = [source for source in sources if any(_matches(Path(source).stem, part) for part in wanted)]
    if not chosen:
        raise SystemExit(f"fa3: FA3_KERNELS must match at least one of {', '.join(sources)}; got {','.join(wanted)!r}")
    return chosen


def _matches(stem: str, part: str) -> bool:
    return fnmatch.fnmatch(stem, part) if any(sign in part for sign in "*?[") else part in stem


def _plan_kernels() -> Plan:
    if sys.platform != "linux":
        raise CannotBuild(f"the kernels are built on Linux only, and this is {sys.platform}")
    toolkits = list(find_toolkits())
    if not toolkits:
        raise CannotBuild(
            "no CUDA compiler was found: CUDA_HOME is not set, nvcc is not on PATH, and no toolkit is installed by pip "
            f"(pip install '{PIP_TOOLKIT}')"
        )
    if not (os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")):
        raise CannotBuild("no C++ compiler was found: CXX is not set, and neither c++ nor g++ is on PATH")
    torch_version, torch_cuda = _torch()
    cutlass_include, cutlass_version = _cutlass()
    if not _has_ninja():
        raise CannotBuild("ninja is not installed (pip install ninja)")
    return Plan(
        toolkit=_choose(toolkits, torch_version, torch_cuda),
        cutlass_include=cutlass_include,
        cutlass_version=cutlass_version,
        torch_version=torch_version,
        sources=(*OPS, *kernel_sources()),
    )


def _torch() -> tuple[str, str]:
    """The version of the torch that provides the headers, and the version of CUDA that it was built with."""
    if importlib.util.find_spec("torch") is None:
        raise CannotBuild("torch is not installed in the environment that builds fa3 (pip install torch)")
    import torch

    if tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2]) < MINIMUM_TORCH:
        raise CannotBuild(f"torch must be 2.10 or newer, and this is {torch.__version__}")
    if torch.version.cuda is None:
        raise CannotBuild(f"torch {torch.__version__} was built without CUDA; install one with it")
    return torch.__version__, torch.version.cuda


def _cutlass() -> tuple[Path, str]:
    """The folder and version of the CUTLASS headers, found without importing their package (that needs scipy)."""
    spec = importlib.util.find_spec("cutlass_library")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        include = Path(folder) / "source" / "include"
        if (include / "cute" / "tensor.hpp").is_file():
            return include, importlib.metadata.version("nvidia-cutlass")
    raise CannotBuild("the CUTLASS headers are not installed (pip install --no-deps nvidia-cutlass)")


def _has_ninja() -> bool:
    return shutil.which("ninja") is not None or importlib.util.find_spec("ninja") is not None


def _choose(toolkits: list[Toolkit], torch_version: str, torch_cuda: str) -> Toolkit:
    """The first toolkit that torch's own check accepts, which is one with the same major version of CUDA."""
    for toolkit in toolkits:
        minor = int(toolkit.version.split(".")[1])
        if toolkit.major == int(torch_cuda.split(".")[0]) and (toolkit.major, minor) >= MINIMUM_CUDA:
            return toolkit
    major = torch_cuda.split(".")[0]
    found = ", ".join(toolkit.version for toolkit in toolkits)
    raise CannotBuild(f"torch {torch_version} needs nvcc of CUDA {major} (12.5 or newer), and this is {found}")


if __name__ == "__main__":
    plan = make_plan()
    print(f"fa3: kernels can be built with nvcc {plan.toolkit.version}" if plan.toolkit else f"fa3: {plan.reason}")
    sys.exit(0 if plan.build else 1)
