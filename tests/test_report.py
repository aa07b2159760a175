"""`python -m fa3`, and what it says of a library that is absent, broken, or there with kernels in it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fa3 import __main__, _library, _report

ROW = {
    "name": "fwd_bf16_hdim128_long",
    "pass": "fwd",
    "dtype": "bf16",
    "head_dim": 128,
    "tile_m": 128,
    "tile_n": 176,
    "stages": 2,
    "consumer_warpgroups": 2,
    "smem_bytes": 229376,
}
STATISTICS = {"symbol": "_ZN3fa33fwdE", "registers": 168, "spill_stores_bytes": 0, "spill_loads_bytes": 0}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package folder of its own for fa3._library: no library and no report until a test puts them there."""
    caches = (_library.load, _library.build_report, _library.kernel_table, _library.compute_capability)
    monkeypatch.setattr(_library, "LIBRARY", tmp_path / "_C.abi3.so")
    monkeypatch.setattr(_library, "BUILD_REPORT", tmp_path / "build_report.json")
    monkeypatch.setattr(_library, "_loaded", False)
    monkeypatch.setattr(_library, "_load_error", None)
    for cached in caches:
        cached.cache_clear()
    yield tmp_path
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def with_kernels(package, monkeypatch):
    """A library that holds one kernel and no op: plain C, so that loading it needs no GPU and defines nothing."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    table = json.dumps(json.dumps([ROW]))
    source = package / "table.c"
    source.write_text(f"const char* fa3_kernel_table(void) {{ return {table}; }}\n")
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(_library.LIBRARY)], check=True)
    report = {
        "built": True,
        "reason": None,
        "nvcc": "13.0.88",
        "torch_headers": "2.14.1",
        "cutlass": "4.2.0.0",
        "kernels": [{"name": ROW["name"], **STATISTICS}],
        "ptxas_messages": [],
    }
    _library.BUILD_REPORT.write_text(json.dumps(report))
    return package


def pretend_gpu(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA Test")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)


def test_nothing_built(package):
    assert not _library.is_loaded()
    assert _library.kernel_table() == []
    assert _library.unavailable_reason() == "the kernels were not built"


def test_the_reason_recorded_by_the_build_is_given(package):
    _library.BUILD_REPORT.write_text(json.dumps({"built": False, "reason": "no CUDA compiler was found"}))
    assert _library.unavailable_reason() == "the kernels were not built: no CUDA compiler was found"


def test_a_library_that_cannot_be_loaded(package):
    _library.LIBRARY.write_text("not a library")
    assert not _library.is_loaded()
    reason = _library.unavailable_reason()
    assert reason.startswith("the compiled library could not be loaded: ")
    assert "file too short" in reason  # what the dynamic linker says
    assert _library.kernel_table() == []


def test_no_cuda_device(with_kernels, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _library.is_loaded()
    assert _library.unavailable_reason() == f"torch {torch.__version__} finds no CUDA device"


def test_another_architecture_is_named(with_kernels, monkeypatch):
    pretend_gpu(monkeypatch, (8, 0))
    assert _library.unavailable_reason() == (
        "the kernels need a Hopper GPU (compute capability 9.0), and cuda:0 is NVIDIA Test with 8.0"
    )


@pytest.mark.parametrize("device", [None, 0, torch.device("cuda"), torch.device("cuda", 0)])
def test_a_hopper_gpu(with_kernels, monkeypatch, device):
    pretend_gpu(monkeypatch, (9, 0))
    assert _library.unavailable_reason(device) is None


def test_table_joins_the_library_and_ptxas(with_kernels):
    assert _library.kernel_table() == [{**ROW, **STATISTICS}]


def test_table_without_a_build_report(with_kernels):
    _library.BUILD_REPORT.unlink()
    assert _library.kernel_table() == [ROW]


def test_text_shows_gpu_and_kernels(with_kernels, monkeypatch, capsys):
    pretend_gpu(monkeypatch, (9, 0))
    __main__.main([])
    text = capsys.readouterr().out
    assert "cuda:0      NVIDIA Test, compute capability 9.0" in text
    assert "kernels     available" in text
    header, row = text.splitlines()[-2:]
    assert " ".join(header.split()) == "pass dtype head_dim tile stages warpgroups registers shared memory spills"
    assert " ".join(row.split()) == "fwd bf16 128 128 x 176 2 1 + 2 168 224.0 KB none"


def test_json_holds_the_same(with_kernels, capsys):
    __main__.main(["--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["kernels"] == [{**ROW, **STATISTICS}]
    assert report["torch"] == torch.__version__
    assert report["build"]["nvcc"] == "13.0.88"


def test_spills_are_shown():
    assert _report._spills({}) == "-"
    assert _report._spills({"spill_stores_bytes": 8, "spill_loads_bytes": 12}) == "8 B out, 12 B in"


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_command(arguments):
    output = subprocess.run(
        [sys.executable, "-m", "fa3", *arguments], cwd=Path(__file__).parent.parent, capture_output=True, text=True
    )
    assert output.returncode == 0, output.stderr
    assert output.stderr == ""
    assert torch.__version__ in output.stdout
