"""setuptools commands and the one extension: compile through torch's ninja builds, write fa3/build_report.json."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from setuptools import Command, Extension
from setuptools.command.build_py import build_py

from fa3_build.plan import ROOT, Plan
from fa3_build.ptxas import parse_kernels, parse_messages

BUILD = Path("build")
OBJECTS = BUILD / "objects"
LIBRARY = "_C.abi3.so"
REPORT = "build_report.json"

CXX_FLAGS = ["-O2", "-std=c++20", "-g0", "-DNDEBUG", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-Wall"]
NVCC_FLAGS = [
    "-O3",
    "-std=c++20",
    "-gencode=arch=compute_90a,code=sm_90a",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-DNDEBUG",
    "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED",
    "-lineinfo",
    "-Xcompiler=-fvisibility=hidden",
    "-Xptxas=-v,--warn-on-spills,--warn-on-local-memory-usage",
    "-Xfatbin=-compress-all",
    # torch's builds forbid these conversions; kernels here know no torch and compile as plain CUDA
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_HALF2_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
]
STABLE_ABI_MACROS = [("TORCH_TARGET_VERSION", "0x020a000000000000"), ("USE_CUDA", None)]


def setup_arguments(plan: Plan) -> dict[str, Any]:
    """What setup() needs: a pure-Python package, or one with the library and an abi3 wheel tag."""
    if not plan.build:
        return {"cmdclass": {"build_py": build_python_command(plan)}}
    return {
        "ext_modules": [kernel_extension(plan)],
        "cmdclass": {"build_ext": build_kernels_command(plan)},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


def kernel_extension(plan: Plan) -> Extension:
    """fa3/_C.abi3.so: ops through torch's stable ABI, kernels that know no torch."""
    os.environ["CUDA_HOME"] = str(plan.toolkit.home)  # cpp_extension reads it when it is imported
    from torch.utils.cpp_extension import CUDAExtension, include_paths

    torch_headers = include_paths()[0]
    extension = CUDAExtension(
        "fa3._C",
        sources=list(plan.sources),
        include_dirs=[str(ROOT / "csrc"), str(cutlass_link(plan.cutlass_include))],
        define_macros=STABLE_ABI_MACROS,
        # torch's checks put the paths of its headers into messages; this cuts off the folder where they are installed
        extra_compile_args={"cxx": [*CXX_FLAGS, f"-ffile-prefix-map={torch_headers}/="], "nvcc": list(NVCC_FLAGS)},
        # By soname, because a toolkit installed by pip has no libcudart.so. At run time torch has loaded the library.
        extra_link_args=[f"-l:libcudart.so.{plan.toolkit.major}"],
        py_limited_api=True,
    )
    extension.libraries = ["torch_cpu", "torch_cuda"]  # where the stable ABI lives
    return extension


def cutlass_link(include: Path) -> Path:
    """Links build/cutlass to the headers, so that neither line tables nor ccache depend on where they are installed."""
    link = ROOT / BUILD / "cutlass"
    link.parent.mkdir(exist_ok=True)
    if link.is_symlink():
        link.unlink()
    link.symlink_to(include, target_is_directory=True)
    return link


def build_python_command(plan: Plan) -> type[Command]:
    """A build_py that prints and records why no kernels are built."""

    class BuildPython(build_py):
        def run(self) -> None:
            super().run()
            package = Path(self.get_package_dir("fa3") if self.editable_mode else Path(self.build_lib) / "fa3")
            print(f"fa3: installing without GPU kernels (CPU only): {plan.reason}", file=sys.stderr)
            if not (package / LIBRARY).exists():  # an earlier build in place has left its report beside its library
                write_report(package, build_report(plan, []))

    return BuildPython


def build_kernels_command(plan: Plan) -> type[Command]:
    """A build_ext that prints one line per compiled file, logs to build/fa3_build.log, and writes the build report."""
    _put_ninja_on_path()  # torch looks for it when the command is made
    from torch.utils.cpp_extension import BuildExtension

    from fa3_build.toolkit import compile_jobs

    class BuildKernels(BuildExtension):
        def finalize_options(self) -> None:
            super().finalize_options()
            self.build_temp = str(OBJECTS)  # always the same folder, so that ninja compiles only what changed

        def run(self) -> None:
            super().run()
            package = self.get_finalized_command("build_py").get_package_dir("fa3") if self.inplace else None
            logs = [(OBJECTS / source).with_suffix(".o.log").read_text() for source in plan.sources]
            (BUILD / "ptxas.log").write_text("\n".join(logs))
            write_report(Path(package or Path(self.build_lib) / "fa3"), build_report(plan, logs))

        def build_extensions(self) -> None:
            jobs = compile_jobs(len(plan.sources))
            OBJECTS.mkdir(parents=True, exist_ok=True)
            os.environ |= {
                "CXX": launcher("c++", os.environ.get("CXX") or shutil.which("c++") or "g++"),
                "PYTORCH_NVCC": launcher("nvcc", str(plan.toolkit.nvcc)),
                "TORCH_NO_COMPILER_WRAPPER": "1",  # the launcher calls ccache itself, with settings
                "MAX_JOBS": str(jobs),
            }
            with short_ninja_output(BUILD / "fa3_build.log"):
                print(
                    f"fa3: {len(plan.sources)} files, {jobs} jobs, nvcc {plan.toolkit.version}, "
                    f"torch {plan.torch_version}, CUTLASS {plan.cutlass_version}",
                    flush=True,
                )
                super().build_extensions()

    return BuildKernels


def launcher(name: str, compiler: str) -> str:
    """Writes a script that runs `compiler` through compile.py, because torch takes a path, not a command."""
    script = (OBJECTS / "launch" / name).resolve()
    script.parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, str(ROOT / "fa3_build" / "compile.py"), *shlex.split(compiler)]
    script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    script.chmod(0o755)
    return str(script)


@contextmanager
def short_ninja_output(log: Path) -> Iterator[None]:
    """Copies what this process and its children print to `log`, and leaves out ninja's echo of each command."""
    sys.stdout.flush()
    console = os.dup(1)
    read_end, write_end = os.pipe()
    os.dup2(write_end, 1)
    os.close(write_end)

    def relay() -> None:
        with (
            open(read_end, errors="replace") as lines,
            open(log, "w") as record,
            os.fdopen(os.dup(console), "w") as out,
        ):
            for line in shorten(lines):
                for sink in (out, record):
                    sink.write(line)
                    sink.flush()

    thread = threading.Thread(target=relay)
    thread.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(console, 1)  # closes the pipe's last writer, which ends the relay
        thread.join()
        os.close(console)


def shorten(lines: Iterable[str]) -> Iterator[str]:
    """Puts ninja's `[n/N]` before the launcher's own line, in place of the command that ninja echoes."""
    count = ""
    for line in lines:
        if echoed := re.match(r"\[\d+/\d+\] ", line):
            count = echoed[0]
        else:
            yield count + line
            count = ""


def build_report(plan: Plan, logs: list[str]) -> dict[str, Any]:
    """What was built and what ptxas said about it. It names no folder of the machine that built it."""
    kernels = [{"name": Path(_source(log)).stem} | kernel for log in logs for kernel in parse_kernels(log)]
    return {
        "built": plan.build,
        "reason": plan.reason,
        "nvcc": plan.toolkit.version if plan.toolkit else None,
        "torch_headers": plan.torch_version,
        "cutlass": plan.cutlass_version,
        # Each file of attention has one main kernel. Helpers are the kernels that the backward runs before and after
        # it, and the quantizer's.
        "kernels": [kernel for kernel in kernels if _is_main(kernel)],
        "helper_kernels": [kernel for kernel in kernels if not _is_main(kernel)],
        "ptxas_messages": [message for log in logs for message in parse_messages(log)],
        "seconds": dict(_seconds(log) for log in logs),
    }


def write_report(package: Path, report: dict[str, Any]) -> None:
    package.mkdir(parents=True, exist_ok=True)
    (package / REPORT).write_text(json.dumps(report, indent=2) + "\n")


def _is_main(kernel: dict[str, Any]) -> bool:
    """Whether the kernel is the function fwd_kernel of a file fwd_*.cu, or bwd_kernel of a file bwd_*.cu."""
    return f"{kernel['name'].split('_')[0]}_kernel" in kernel["symbol"]


def _seconds(log: str) -> tuple[str, float]:
    """The file name and the seconds in the first line of a launcher's log."""
    name, seconds, _ = log.split("\n", 1)[0].split(", ")
    return name, float(seconds.removesuffix(" s"))


def _source(log: str) -> str:
    return _seconds(log)[0]


def _put_ninja_on_path() -> None:
    """Adds the folder of the scripts to PATH if it is missing there, as in an environment that is not activated."""
    if shutil.which("ninja") is None:
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])
