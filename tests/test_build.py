"""The build's own logic: finding a compiler, choosing jobs and files, reading ptxas, writing the report."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fa3_build import backend, commands, plan, ptxas, toolkit

ROOT = Path(__file__).resolve().parent.parent

PTXAS_LOG = """\
fwd_bf16_hdim128.cu, 93.4 s, peak 2.1 GB
ptxas info    : 11 bytes gmem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to function \
call in the function '_ZN3fa310fwd_kernelE'
ptxas /somewhere/tmpxft_01.ptx, line 7; info    : (C7519) warpgroup.arrive is injected in around line 7 by compiler
ptxas info    : Compiling entry function '_ZN3fa310fwd_kernelE' for 'sm_90a'
ptxas info    : Function properties for _ZN3fa310fwd_kernelE
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 6 barriers, 1024 bytes smem
ptxas info    : Compile time = 3.830 ms
ptxas info    : Function properties for _ZN3fa36helperE
    0 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Compiling entry function '_ZN3fa35otherE' for 'sm_90a'
ptxas info    : Function properties for _ZN3fa35otherE
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 0 barriers
"""


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with no CUDA compiler, and none of the variables that steer the build."""
    for variable in ("CUDA_HOME", "CUDA_PATH", "FA3_BUILD_KERNELS", "FA3_KERNELS", "FA3_JOBS", "MAX_JOBS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setattr(toolkit.shutil, "which", lambda name: None)
    monkeypatch.setattr(toolkit.importlib.util, "find_spec", lambda name: None)
    return monkeypatch


def make_toolkit(home: Path, version: str = "13.0.88") -> Path:
    """A folder that looks like a CUDA toolkit, with an nvcc that answers what the build asks."""
    script = home / "bin" / "nvcc"
    script.parent.mkdir(parents=True)
    script.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = --dryrun ]; then echo "#\\$ TOP={home}/bin/.." >&2\n'
        f'else echo "Cuda compilation tools, release {version[:4]}, V{version}"; fi\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return home


def test_cuda_home_comes_first(no_compiler, tmp_path):
    home = make_toolkit(tmp_path / "cuda", "12.8.93")
    no_compiler.setenv("CUDA_HOME", str(home))
    assert list(toolkit.find_toolkits()) == [toolkit.Toolkit(home, "12.8.93")]


def test_nvcc_on_path_may_be_a_wrapper_script(no_compiler, tmp_path):
    home = make_toolkit(tmp_path / "real toolkit")
    wrapper = tmp_path / "bin" / "nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec "{home}/bin/nvcc" "$@"\n')
    wrapper.chmod(0o755)
    no_compiler.setattr(toolkit.shutil, "which", lambda name: str(wrapper))
    (found,) = toolkit.find_toolkits()
    assert found.home == home


def test_toolkit_installed_by_pip_comes_last(no_compiler, tmp_path):
    pip_home = make_toolkit(tmp_path / "nvidia" / "cu13")
    (tmp_path / "nvidia" / "cudnn").mkdir()
    no_compiler.setattr(
        toolkit.importlib.util,
        "find_spec",
        lambda name: type("Spec", (), {"submodule_search_locations": [str(tmp_path / "nvidia")]}),
    )
    assert [found.home for found in toolkit.find_toolkits()] == [pip_home]
    system_home = make_toolkit(tmp_path / "cuda")
    no_compiler.setenv("CUDA_HOME", str(system_home))
    assert [found.home for found in toolkit.find_toolkits()] == [system_home, pip_home]


def test_a_folder_without_nvcc_is_passed_over(no_compiler, tmp_path):
    no_compiler.setenv("CUDA_HOME", str(tmp_path))
    assert list(toolkit.find_toolkits()) == []


def test_an_nvcc_that_cannot_run_is_passed_over(no_compiler, tmp_path):
    home = make_toolkit(tmp_path / "cuda")
    (home / "bin" / "nvcc").write_text("#!/bin/sh\nexit 1\n")
    no_compiler.setenv("CUDA_HOME", str(home))
    assert list(toolkit.find_toolkits()) == []


def test_no_compiler_is_a_reason_and_with_1_an_error(no_compiler):
    no_compiler.setattr(sys, "platform", "linux")
    made = plan.make_plan()
    assert not made.build
    assert made.reason.startswith("no CUDA compiler was found")
    no_compiler.setenv("FA3_BUILD_KERNELS", "1")
    with pytest.raises(SystemExit, match="FA3_BUILD_KERNELS=1, but no CUDA compiler was found"):
        plan.make_plan()


def test_0_builds_nothing_and_other_values_are_refused(no_compiler):
    no_compiler.setenv("FA3_BUILD_KERNELS", "0")
    assert plan.make_plan().reason == "FA3_BUILD_KERNELS=0 was set at build time"
    no_compiler.setenv("FA3_BUILD_KERNELS", "yes")
    with pytest.raises(SystemExit, match="must be 0, 1 or unset, got 'yes'"):
        plan.make_plan()


def test_missing_cutlass_headers_are_named(no_compiler):
    with pytest.raises(plan.CannotBuild, match="CUTLASS headers are not installed"):
        plan._cutlass()


def test_the_toolkit_must_have_torchs_major_version():
    old, new = toolkit.Toolkit(Path("a"), "12.8.93"), toolkit.Toolkit(Path("b"), "13.0.88")
    assert plan._choose([old, new], "2.14.1", "13.0") is new
    assert plan._choose([new, old], "2.10.0", "12.8") is old
    with pytest.raises(plan.CannotBuild, match=r"needs nvcc of CUDA 13 .* this is 12\.8\.93"):
        plan._choose([old], "2.14.1", "13.0")


def test_requirements_depend_on_the_machine(no_compiler, tmp_path):
    no_compiler.setattr(sys, "platform", "linux")
    no_compiler.setattr(backend, "has_nvidia_driver", lambda: False)
    assert backend.get_requires_for_build_wheel() == []
    no_compiler.setattr(backend, "has_nvidia_driver", lambda: True)
    assert backend.get_requires_for_build_wheel() == [*backend.COMPILE_REQUIREMENTS, toolkit.PIP_TOOLKIT]
    no_compiler.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "cuda")))
    assert backend.get_requires_for_build_editable() == backend.COMPILE_REQUIREMENTS
    no_compiler.setenv("FA3_BUILD_KERNELS", "0")
    assert backend.get_requires_for_build_editable() == []


def test_the_toolkit_extra_is_what_the_messages_name():
    assert f'toolkit = ["{toolkit.PIP_TOOLKIT}; ' in (ROOT / "pyproject.toml").read_text()


def test_jobs_follow_cores_memory_files_and_variables(no_compiler):
    no_compiler.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    no_compiler.setattr(toolkit, "_free_memory_bytes", lambda: 13 * toolkit.GIB)
    assert toolkit.compile_jobs(num_files=20) == 4
    assert toolkit.compile_jobs(num_files=2) == 2
    no_compiler.setattr(toolkit, "_free_memory_bytes", lambda: toolkit.GIB)
    assert toolkit.compile_jobs(num_files=20) == 1
    no_compiler.setenv("MAX_JOBS", "7")
    assert toolkit.compile_jobs(num_files=20) == 7
    no_compiler.setenv("FA3_JOBS", "3")
    assert toolkit.compile_jobs(num_files=20) == 3
    no_compiler.setenv("FA3_JOBS", "many")
    with pytest.raises(SystemExit, match="FA3_JOBS must be a positive integer, got 'many'"):
        toolkit.compile_jobs(num_files=20)


def test_a_subset_of_kernels_by_part_or_glob(no_compiler, tmp_path):
    no_compiler.setattr(plan, "ROOT", tmp_path)
    (tmp_path / "csrc" / "fwd").mkdir(parents=True)
    names = [f"csrc/fwd/fwd_{dtype}_hdim{head_dim}.cu" for dtype in ("bf16", "fp16") for head_dim in (128, 64)]
    for name in names:
        (tmp_path / name).touch()
    assert plan.kernel_sources() == names
    no_compiler.setenv("FA3_KERNELS", "bf16_hdim128, fwd_*_hdim64")
    assert plan.kernel_sources() == [names[0], names[1], names[3]]
    no_compiler.setenv("FA3_KERNELS", "hdim80")
    with pytest.raises(SystemExit, match="FA3_KERNELS must match at least one of"):
        plan.kernel_sources()


def test_the_sources_of_every_build_exist():
    assert [source for source in plan.OPS if not (ROOT / source).is_file()] == []


def test_only_the_ops_include_torch():
    """Kernels compile as plain CUDA, in any torch's absence."""
    files = [path for path in (ROOT / "csrc").rglob("*") if path.is_file() and path.parent.name != "ops"]
    assert len(files) > len(plan.OPS)
    assert [path.name for path in files if "torch" in " ".join(re.findall(r"#include .*", path.read_text()))] == []


def test_ptxas_statistics_of_kernels():
    assert ptxas.parse_kernels(PTXAS_LOG) == [
        {
            "symbol": "_ZN3fa310fwd_kernelE",
            "stack_bytes": 16,
            "spill_stores_bytes": 8,
            "spill_loads_bytes": 12,
            "registers": 168,
            "barriers": 6,
            "smem_static_bytes": 1024,
        },
        {
            "symbol": "_ZN3fa35otherE",
            "stack_bytes": 0,
            "spill_stores_bytes": 0,
            "spill_loads_bytes": 0,
            "registers": 24,
            "barriers": 0,
            "smem_static_bytes": 0,
        },
    ]


def test_ptxas_messages_keep_their_code_and_lose_their_folder():
    first, second = ptxas.parse_messages(PTXAS_LOG + PTXAS_LOG)
    assert "(C7510) Potential Performance Loss" in first
    assert second.startswith("ptxas tmpxft_01.ptx, line 7; info")


def test_report_names_no_folder(tmp_path):
    made = plan.Plan(
        toolkit=toolkit.Toolkit(tmp_path / "cuda", "13.0.88"),
        cutlass_include=tmp_path / "include",
        cutlass_version="4.2.0.0",
        torch_version="2.14.1",
        sources=("csrc/fwd/fwd_bf16_hdim128.cu",),
    )
    report = commands.build_report(made, [PTXAS_LOG])
    commands.write_report(tmp_path / "fa3", report)
    text = (tmp_path / "fa3" / "build_report.json").read_text()
    assert json.loads(text) == report
    assert report["built"]
    assert report["reason"] is None
    assert report["seconds"] == {"fwd_bf16_hdim128.cu": 93.4}
    for key, symbol in (("kernels", "_ZN3fa310fwd_kernelE"), ("helper_kernels", "_ZN3fa35otherE")):
        assert [(kernel["name"], kernel["symbol"]) for kernel in report[key]] == [("fwd_bf16_hdim128", symbol)]
    assert "/" not in text


def test_report_of_a_build_without_kernels():
    report = commands.build_report(plan.Plan(reason="no compiler"), [])
    assert (report["built"], report["reason"]) == (False, "no compiler")
    assert report["kernels"] == report["helper_kernels"] == []


def test_the_launcher_keeps_messages_and_time_beside_the_object(tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'ptxas info    : Used 24 registers'\necho 'a warning'\n")
    compiler.chmod(0o755)
    command = [sys.executable, str(ROOT / "fa3_build" / "compile.py"), str(compiler), "-c", "-c", "a/kernel.cu"]
    result = subprocess.run(
        [*command, "-o", str(tmp_path / "kernel.o")],
        env={"PATH": str(tmp_path)},  # no ccache
        capture_output=True,
        text=True,
        check=True,
    )
    summary, *messages = result.stdout.splitlines()
    assert commands._seconds(summary)[0] == "kernel.cu"
    assert messages == ["a warning"]
    log = (tmp_path / "kernel.o.log").read_text().splitlines()
    assert log == [summary, "ptxas info    : Used 24 registers", "a warning"]


def test_ninjas_echo_becomes_a_count():
    lines = [
        "fa3: 2 files\n",
        "[1/2] nvcc -c a.cu\n",
        "a.cu, 1.0 s\n",
        "warning\n",
        "[2/2] c++ -c b.cpp\n",
        "b.cpp, 2.0 s\n",
    ]
    shown = ["fa3: 2 files\n", "[1/2] a.cu, 1.0 s\n", "warning\n", "[2/2] b.cpp, 2.0 s\n"]
    assert list(commands.shorten(lines)) == shown


def test_build_output_goes_to_the_log_too(tmp_path, capfd):
    log = tmp_path / "build.log"
    with commands.short_ninja_output(log):
        subprocess.run(["echo", "[1/1] long command\nname, 1.0 s"], check=True)
    assert log.read_text() == "[1/1] name, 1.0 s\n"
    assert capfd.readouterr().out == "[1/1] name, 1.0 s\n"
