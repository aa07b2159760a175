"""The benchmarks' own logic, on the CPU: grid, FLOPs, turns, results file, plot."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks import bench_forward, cases, plot, report, timing
from benchmarks.cases import Case
from benchmarks.providers import Provider, load_providers
from benchmarks.timing import Timing


def test_grid_is_the_papers():
    grid = cases.grid("bf16")
    assert len(set(grid)) == len(grid) == 36
    assert {case.heads * case.head_dim for case in grid} == {2048}
    assert {case.batch * case.seqlen for case in grid} == {16384}
    assert Case("bf16", 128, True, 512) in grid
    assert Case("bf16", 256, False, 16384) in grid


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (2, 5), (5, 2), (7, 7), (0, 3), (3, 0)])
def test_flops_count_visible_pairs(seqlen_q, seqlen_k, causal):
    mask = torch.ones(seqlen_q, seqlen_k)
    visible = int((mask.tril(seqlen_k - seqlen_q) if causal else mask).sum())
    assert cases.visible_pairs(seqlen_q, seqlen_k, causal) == visible
    assert cases.forward_flops(3, 4, visible, 192, 128) == 2 * 3 * 4 * visible * (192 + 128)


def test_case_flops():
    assert Case("bf16", 64, False, 1024).flops == 4 * 16 * 32 * 1024 * 1024 * 64
    assert Case("bf16", 64, True, 1024).flops == 4 * 16 * 32 * (1024 * 1025 // 2) * 64


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_check_accepts_right_outputs_and_finds_one_wrong_element(dtype, causal):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 65, 3, 64, dtype=cases.DTYPES[dtype]) for _ in range(3))
    expected = cases.reference(q, k, v, causal, chunk_bytes=8 * 2 * 3 * 65 * 10)
    out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
    out = out.transpose(1, 2).clone()
    assert cases.worst_row_error(out, expected) <= cases.tolerance(dtype)
    out[1, 40, 2, 3] += 0.5
    assert cases.worst_row_error(out, expected) > cases.tolerance(dtype)
    out[1, 40, 2, 3] = float("nan")
    assert not cases.worst_row_error(out, expected) <= cases.tolerance(dtype)


def test_wrong_and_refusing_providers_are_left_out(monkeypatch):
    def right(q, k, v, causal):
        return cases.reference(q, k, v, causal).to(q.dtype)

    def refusing(q, k, v, causal):
        raise RuntimeError("no kernel\nfor this")

    case = Case("bf16", 64, True, 8)
    tensors = [torch.randn(1, 8, 2, 64, dtype=torch.bfloat16) for _ in range(3)]
    monkeypatch.setattr(Case, "make_inputs", lambda self: tensors)
    providers = [
        Provider("right", "1", right),
        Provider("wrong", "1", lambda q, k, v, causal: right(q, k, v, causal) * 1.1),
        Provider("nan", "1", lambda q, k, v, causal: q * float("nan")),
        Provider("refusing", "1", refusing),
    ]
    calls, problems = bench_forward.checked_calls(case, providers)
    assert list(calls) == ["right"]
    assert torch.equal(calls["right"](), right(*tensors, True))
    assert "WRONG" in problems["wrong"]
    assert "WRONG" in problems["nan"]
    assert problems["refusing"] == "refuses: no kernel"


def test_providers_take_turns():
    class FakeTimer:
        def __init__(self):
            self.seen = []

        def warm_up(self, call):
            return 3

        def measure(self, call, launches):
            assert launches == 3
            self.seen.append(call())
            return float(len(self.seen))

    timer = FakeTimer()
    timings = timing.time_in_turns({name: lambda name=name: name for name in "abc"}, rounds=7, timer=timer)
    rounds = ["".join(timer.seen[i : i + 3]) for i in range(0, 21, 3)]
    assert [sorted(round_) for round_ in rounds] == [["a", "b", "c"]] * 7
    assert len(set(rounds)) > 1
    samples = torch.tensor([i + 1.0 for i, name in enumerate(timer.seen) if name == "a"])
    expected = [samples.quantile(q).item() for q in (0.5, 0.2, 0.8)]
    assert timings["a"] == Timing(*map(pytest.approx, expected))


def test_missing_provider_has_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", None)
    loaded, missing = load_providers(["torch-fa2", "fa3-fwd"])
    assert [(provider.name, provider.version) for provider in loaded] == [("torch-fa2", torch.__version__)]
    assert "fa3_fwd_interface" in missing["fa3-fwd"]


def made_up_results() -> dict:
    rows = []
    for index, case in enumerate(cases.grid("bf16", seqlens=(512, 1024))):
        timings = {"fa3": Timing(1.0, 0.9, 1.1), "torch-cudnn": Timing(1.0 + 0.1 * index, 1.0, 3.0)}
        if index:
            timings["torch-fa2"] = Timing(2.0, 2.0, 2.0)
        rows.append(report.result_row(case.as_row(), case.flops, timings))
    versions = {"fa3": "0.1.0", "torch-cudnn": "9.19", "torch-fa2": "2.14.1"}
    return {"commit": "0123456789abcdef", "gpu": "NVIDIA H200", "providers": versions, "rows": rows}


def test_results_file(tmp_path):
    results = made_up_results()
    path = tmp_path / report.gpu_slug("NVIDIA H200") / "forward.json"
    report.write_json(path, results)
    assert path.parent.name == "nvidia-h200"
    assert json.loads(path.read_text()) == results
    row = results["rows"][0]
    fields = ["pass", "dtype", "head_dim", "causal", "seqlen", "batch", "heads", "heads_kv"]
    assert list(row) == [*fields, "ms", "tflops", "ms_p20", "ms_p80"]
    assert [row[field] for field in fields] == ["fwd", "bf16", 64, False, 512, 32, 32, 32]
    assert row["ms"] == {"fa3": 1.0, "torch-cudnn": 1.0}
    assert row["tflops"]["fa3"] == pytest.approx(4 * 32 * 32 * 512 * 512 * 64 / 1e-3 / 1e12, rel=1e-3)
    assert row["ms_p80"]["torch-cudnn"] == 3.0


def test_ratio_and_summary():
    def row(head_dim, **tflops):
        return {"head_dim": head_dim, "causal": True, "seqlen": 512, "tflops": tflops}

    assert report.ratio(row(64, peer=1.0)) is None
    assert report.ratio(row(64, fa3=1.0)) is None
    text = report.summary(
        [row(64, fa3=2.0, peer=1.0, other=0.5), row(64, fa3=1.0, peer=2.0), row(128, fa3=9.0, peer=9.0)]
    )
    assert "head_dim 64: geometric mean 1.000, minimum 0.500 (head_dim 64, causal, seqlen 512), 2 cells" in text
    assert "head_dim 128: geometric mean 1.000, minimum 1.000" in text
    assert text.splitlines()[-1].strip().startswith("all: geometric mean 1.000, minimum 0.500")


def test_commit_without_git(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setenv("FA3_COMMIT", "abc123")
    assert report.measured_commit() == "abc123"
    monkeypatch.delenv("FA3_COMMIT")
    with pytest.raises(SystemExit, match="--commit"):
        report.measured_commit()


def test_arguments():
    assert bench_forward.parse_arguments([]).masks == [False, True]
    assert bench_forward.parse_arguments(["--causal"]).masks == [True]
    assert bench_forward.parse_arguments(["--causal", "--full"]).masks == [False, True]
    with pytest.raises(SystemExit):
        bench_forward.parse_arguments(["--rounds", "4"])


def test_plot(tmp_path):
    path = tmp_path / "forward.json"
    report.write_json(path, made_up_results())
    png = plot.plot(path)
    assert png == tmp_path / "forward.png"
    assert png.read_bytes().startswith(b"\x89PNG")
    assert png.stat().st_size > 20_000
