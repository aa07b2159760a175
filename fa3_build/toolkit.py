"""Finds the CUDA toolkits of this machine, and says how many compile jobs it can run at the same time."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PIP_TOOLKIT = "cuda-toolkit[nvcc,crt,nvvm,cccl,cudart]==13.0.*"
GIB = 1 << 30
MEMORY_PER_JOB = 3 * GIB  # cicc and ptxas stay below this for the largest kernels


@dataclass(frozen=True)
class Toolkit:
    """A folder with bin/nvcc, and the version of that nvcc, such as "13.0.88"."""

    home: Path
    version: str

    @property
    def major(self) -> int:
        return int(self.version.split(".")[0])

    @property
    def nvcc(self) -> Path:
        return self.home / "bin" / "nvcc"


def find_toolkits() -> Iterator[Toolkit]:
    """Every CUDA toolkit found, in order of preference: CUDA_HOME, nvcc on PATH, a toolkit installed by pip."""
    seen = set()
    for home in _candidate_homes():
        home = home.resolve()
        if home in seen or not (home / "bin" / "nvcc").is_file():
            continue
        seen.add(home)
        version = _nvcc_version(home / "bin" / "nvcc")
        if version is not None:
            yield Toolkit(home, version)


def has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def compile_jobs(num_files: int) -> int:
    """FA3_JOBS or MAX_JOBS if set, otherwise as many as cores, free memory and files allow."""
    for variable in ("FA3_JOBS", "MAX_JOBS"):
        value = os.environ.get(variable, "")
        if value:
            if not value.isdigit() or int(value) == 0:
                raise SystemExit(f"fa3: {variable} must be a positive integer, got {value!r}")
            return int(value)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _free_memory_bytes() // MEMORY_PER_JOB, num_files))


def _candidate_homes() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable])
    on_path = shutil.which("nvcc")
    if on_path is not None:
        home = _home_of(on_path)
        if home is not None:
            yield home
    nvidia = importlib.util.find_spec("nvidia")  # a namespace package: finding it imports nothing
    if nvidia is not None:
        for folder in nvidia.submodule_search_locations or ():
            yield from sorted(Path(folder).glob("cu[0-9]*"), reverse=True)


def _home_of(nvcc: str) -> Path | None:
    """The toolkit folder as nvcc itself reports it: nvcc on PATH may be a link, or a script that calls the real one."""
    try:
        dryrun = subprocess.run(
            [nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True, check=False
        )
    except OSError:  # a file that cannot be run
        return None
    top = re.search(r"^#\$ TOP=(.+)$", dryrun.stderr, re.MULTILINE)
    return Path(top[1].strip()) if top else None


def _nvcc_version(nvcc: Path) -> str | None:
    try:
        output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    version = re.search(r"\bV(\d+\.\d+\.\d+)", output)
    return version[1] if version else None


def _free_memory_bytes() -> int:
    """The memory that Linux calls available, or less if a control group (a container) sets a lower limit."""
    meminfo = re.search(r"^MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    free = int(meminfo[1]) * 1024 if meminfo else 4 * GIB
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        free = min(free, int(limit) - int(used))
    return free


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
