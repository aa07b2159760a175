"""The benchmarks' own logic, on the CPU: grid, FLOPs, turns, results file, plot."""

import json
import sys
from functools import partial, partialmethod
from itertools import product
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks import (
    bench_backward,
    bench_forward,
    bench_quantize,
    bench_training,
    cases,
    fp8_accuracy,
    plot,
    report,
    runner,
    summary,
    timing,
)
from benchmarks.bench_training import Layer
from benchmarks.cases import Case
from benchmarks.providers import LOADERS, Provider, load_providers
from benchmarks.timing import Timing
from fa3.fp8_format import transpose_v


def test_grid_is_the_papers():
    grid = cases.grid("bf16")
    assert len(set(grid)) == len(grid) == 36
    assert {case.heads * case.head_dim for case in grid} == {2048}
    assert {case.batch * case.seqlen for case in grid} == {16384}
    assert Case("bf16", 128, True, 512) in grid
    assert Case("bf16", 256, False, 16384) in grid


def test_forward_flops():
    """2 per pair and element of both products."""
    assert cases.forward_flops(3, 4, 5, 192, 128) == 2 * 3 * 4 * 5 * (192 + 128)


def test_case_flops():
    forward = 4 * 16 * 32 * 1024 * 1024 * 64
    assert [Case("bf16", 64, False, 1024).flops(name) for name in ("fwd", "bwd", "fwd+bwd")] == [
        forward,
        5 * forward // 2,
        7 * forward // 2,
    ]
    assert Case("bf16", 64, True, 1024).flops("fwd") == 4 * 16 * 32 * (1024 * 1025 // 2) * 64


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_check_accepts_right_outputs_and_finds_one_wrong_element(dtype, causal):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 65, 3, 64, dtype=cases.DTYPES[dtype]) for _ in range(3))
    expected = cases.reference(q, k, v, causal, chunk_bytes=8 * 2 * 3 * 65 * 10)
    out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
    out = out.transpose(1, 2).clone()
    assert cases.worst_error(out, expected) <= cases.tolerance(dtype)
    out[1, 40, 2, 3] += 0.5
    assert cases.worst_error(out, expected) > cases.tolerance(dtype)
    out[1, 40, 2, 3] = float("nan")
    assert not cases.worst_error(out, expected) <= cases.tolerance(dtype)


def attention(q, k, v, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
def test_reference_gradients_are_autograds(causal):
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 65, 3, 16, dtype=torch.float64) for _ in range(4))
    gradients = cases.reference_gradients(q, k, v, dout, causal, chunk_bytes=8 * 2 * 3 * 65 * 10)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    for ours, theirs in zip(gradients, torch.autograd.grad(attention(*inputs, causal), inputs, dout), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_check_accepts_right_gradients_and_finds_one_wrong_row(dtype, causal):
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 200, 3, 64, dtype=cases.DTYPES[dtype]) for _ in range(4))
    expected = cases.reference_gradients(q, k, v, dout, causal)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    for gradient, truth in zip(torch.autograd.grad(attention(*inputs, causal), inputs, dout), expected, strict=True):
        assert cases.worst_error(gradient, truth, cases.GRADIENT_ROWS) <= cases.tolerance(dtype)
        gradient[1, 150, 2] *= -1
        assert cases.worst_error(gradient, truth, cases.GRADIENT_ROWS) > cases.tolerance(dtype)
        gradient[1, 199, 2, 3] = float("nan")
        assert not cases.worst_error(gradient, truth, cases.GRADIENT_ROWS) <= cases.tolerance(dtype)


def test_error_of_a_tile_of_rows():
    expected = torch.ones(1, 5, 1, 4, dtype=torch.float64)
    x = expected.clone()
    x[0, 4] = 1.5  # the last tile has one row of the five
    assert cases.worst_error(x, expected, rows=2) == pytest.approx(0.5)
    x[0, 4] = 1.0
    x[0, 1] = 1.5
    assert cases.worst_error(x, expected, rows=2) == pytest.approx(0.5 / 2**0.5)


@pytest.mark.parametrize("pass_name", cases.FLOPS_OVER_FORWARD)
def test_wrong_and_refusing_providers_are_left_out(monkeypatch, pass_name):
    def refusing(q, k, v, causal):
        assert causal is None, "no kernel\nfor this"

    def wrong(q, k, v, causal):
        return attention(q, k, v, causal) * 1.1

    case = Case("bf16", 64, True, 100)
    tensors = [torch.randn(1, 100, 2, 64, dtype=torch.bfloat16) for _ in range(4)]
    monkeypatch.setattr(Case, "make_inputs", lambda self: tensors)
    providers = [
        Provider("right", "1", attention),
        Provider("wrong", "1", wrong),
        Provider("nan", "1", lambda q, k, v, causal: q * k * v * float("nan")),
        Provider("refusing", "1", refusing),
    ]
    calls, problems = runner.checked_pass(pass_name, case, providers)
    assert list(calls) == ["right"]
    first, second = calls["right"](), calls["right"]()
    assert len(first) == (1 if pass_name == "fwd" else 3)
    assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(first, second, strict=True))
    assert "WRONG" in problems["wrong"]
    assert "WRONG" in problems["nan"]
    assert problems["refusing"] == "refuses: no kernel"


def test_backward_alone_does_not_run_the_forward_again():
    runs = []

    def forward(q, k, v, causal):
        runs.append(q.requires_grad)
        return attention(q, k, v, causal)

    tensors = [torch.randn(1, 8, 2, 16) for _ in range(4)]
    for pass_name, expected in (("fwd", [False] * 3), ("bwd", [True]), ("fwd+bwd", [True] * 3)):
        call = runner.pass_call(pass_name, Provider("any", "1", forward), *tensors, causal=True)
        for _ in range(3):
            call()
        assert runs == expected
        runs.clear()


def test_providers_take_turns():
    class FakeTimer:
        def __init__(self):
            self.seen = []

        def warm_up(self, call):
            return 3, 16

        def measure(self, call, launches, head_start):
            assert (launches, head_start) == (3, 16)
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


def test_head_start_lasts_until_the_host_needs_none(monkeypatch):
    monkeypatch.setattr(timing.LaunchTimer, "__init__", lambda self: setattr(self, "clear_ms", 0.1))
    timer = timing.LaunchTimer()
    assert timer.head_start(host_ms=0.2, gpu_ms=0.5, launches=10) == timing.HEAD_START_CLEARS
    # The host falls behind by 0.3 ms with each of the 20 launches.
    assert timer.head_start(host_ms=0.8, gpu_ms=0.5, launches=10) == pytest.approx(timing.HEAD_START_CLEARS + 60, abs=1)


def test_missing_provider_has_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", None)
    loaded, missing = load_providers(["torch-fa2", "fa3-fwd"])
    assert [(provider.name, provider.version) for provider in loaded] == [("torch-fa2", torch.__version__)]
    assert "fa3_fwd_interface" in missing["fa3-fwd"]


def made_up_results(*passes: str) -> dict:
    rows = []
    for index, (pass_name, case) in enumerate(product(passes, cases.grid("bf16", seqlens=(512, 1024)))):
        timings = {"fa3": Timing(1.0, 0.9, 1.1), "torch-cudnn": Timing(1.0 + 0.1 * index, 1.0, 3.0)}
        if index:
            timings["torch-fa2"] = Timing(2.0, 2.0, 2.0)
        rows.append(report.result_row(case.as_row(pass_name), case.flops(pass_name), timings))
    versions = {"fa3": "0.1.0", "torch-cudnn": "9.19", "torch-fa2": "2.14.1"}
    return {"commit": "0123456789abcdef", "gpu": "NVIDIA H200", "providers": versions, "rows": rows}


def test_results_file(tmp_path):
    results = made_up_results("fwd", "bwd")
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
    assert results["rows"][12]["pass"] == "bwd"
    assert results["rows"][12]["tflops"]["fa3"] == pytest.approx(2.5 * row["tflops"]["fa3"], rel=1e-3)


def row(head_dim, **ms):
    ms = {name.replace("_", "-"): value for name, value in ms.items()}
    return {"head_dim": head_dim, "causal": True, "seqlen": 512, "ms": ms}


def test_ratio_and_summary():
    assert report.ratio(row(64, peer=1.0)) is None
    assert report.ratio(row(64, fa3=1.0)) is None
    assert report.ratio(row(64, fa3=1.0, fa3_deterministic=0.1)) is None  # ours, and no peer
    text = report.summary(
        [row(64, fa3=0.5, peer=1.0, other=2.0), row(64, fa3=1.0, peer=0.5), row(128, fa3=9.0, peer=9.0)]
    )
    assert "head_dim 64: geometric mean 1.000, minimum 0.500 (head_dim 64, causal, seqlen 512), 2 cells" in text
    assert "head_dim 128: geometric mean 1.000, minimum 1.000" in text
    assert text.splitlines()[-1].strip().startswith("all: geometric mean 1.000, minimum 0.500")


def test_deterministic_cost_and_summary():
    rows = [row(64, fa3=1.0, fa3_deterministic=1.21), row(64, fa3=1.0, fa3_deterministic=1.0), row(128, fa3=1.0)]
    assert [report.deterministic_cost(r) for r in rows] == [pytest.approx(0.21), 0.0, None]
    text = report.deterministic_summary(rows).splitlines()
    assert [line.split(":")[0].strip() for line in text] == ["head_dim 64", "all"]
    assert "geometric mean +10.0%, maximum +21.0% (head_dim 64, causal, seqlen 512), 2 cells" in text[-1]
    assert report.deterministic_summary(rows[2:]) == ""


def test_speeds_of_the_readme():
    cell = row(64, fa3=2.0, fa3_bf16=3.0, peer=1.0) | {"share_of_copy": {"cast": 0.9}}
    assert summary.over_best_peer("fa3")(cell) == 0.5
    assert summary.over("fa3", "fa3-bf16")(cell) == 1.5
    assert summary.over("fa3", "absent")(cell) is None
    assert summary.share_of_copy("cast")(cell) == 0.9
    assert summary.chosen([cell], {"head_dim": 64, "causal": True}) == [cell]
    assert summary.chosen([cell], {"head_dim": 128}) == []
    assert summary.mean([0.5, 2.0]) == "1.00"


def test_blocks_of_the_readme_are_replaced():
    old = "\n".join(f"{name}:\n<!-- benchmarks.summary: {name} -->\nold\n<!-- end -->" for name in summary.BLOCKS)
    new = summary.with_blocks(old)
    assert "old" not in new.split()
    assert new.count("\n<!-- end -->") == len(summary.BLOCKS)
    assert all(block(summary.RESULTS) in new for block in summary.BLOCKS.values())
    assert summary.with_blocks(new) == new
    with pytest.raises(SystemExit, match="markers of block headline"):
        summary.with_blocks(old.replace("headline", "headlines"))


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
    assert bench_backward.parse_arguments(["--pass", "bwd"]).passes == "bwd"
    for module in (bench_forward, bench_backward, bench_training):
        assert set(module.parse_arguments([]).providers) <= set(LOADERS)
        assert module.parse_arguments([]).rounds >= timing.MIN_ROUNDS


class InstantTimer:
    """Runs each call, and takes a millisecond for all of them."""

    def __init__(self, budget_ms):
        pass

    def warm_up(self, call):
        call()
        return 1, 1

    def measure(self, call, launches, head_start):
        call()
        return 1.0


@pytest.fixture
def without_gpu(monkeypatch):
    """The benchmarks run on the CPU, on little, and time nothing."""
    monkeypatch.setattr(timing, "LaunchTimer", InstantTimer)
    monkeypatch.setattr(timing, "measure_ceilings", lambda timer, rounds: {"copy_gbps": 1.0})
    monkeypatch.setattr(report, "environment", lambda: dict.fromkeys(("date", "gpu", "driver", "torch", "cuda"), "x"))
    monkeypatch.setattr(Case, "make_inputs", partialmethod(Case.make_inputs, device="cpu"))
    monkeypatch.setattr(bench_training, "checked_steps", partial(bench_training.checked_steps, device="cpu"))
    monkeypatch.setattr(cases, "TOTAL_TOKENS", 256)
    layers = [bench_training.Case(Layer("gpt2-medium", 64, 2, 2, 32, False, True), 64, 2)]
    layers += [bench_training.Case(Layer("llama3-8b", 64, 4, 2, 32, True, False), 32, 3)]
    monkeypatch.setattr(bench_training, "CASES", layers)


def test_forward_benchmark_from_start_to_end(without_gpu, tmp_path, capsys):
    arguments = ["--head-dims", "128", "--seqlens", "64", "--commit", "abc", "--json", str(tmp_path / "forward.json")]
    assert bench_forward.main([*arguments, "--providers", "fa3", "torch-fa2"]) == 0
    results = json.loads((tmp_path / "forward.json").read_text())
    assert [(row["pass"], row["causal"], set(row["ms"])) for row in results["rows"]] == [
        ("fwd", False, {"fa3", "torch-fa2"}),
        ("fwd", True, {"fa3", "torch-fa2"}),
    ]
    assert "all: geometric mean 1.000, minimum 1.000" in capsys.readouterr().out


def test_backward_benchmark_from_start_to_end(without_gpu, tmp_path, capsys):
    path = tmp_path / "gpu" / "backward.json"
    arguments = ["--head-dims", "64", "--seqlens", "128", "--causal", "--commit", "abc", "--json", str(path)]
    assert bench_backward.main([*arguments, "--providers", "fa3", "fa3-deterministic", "torch-fa2"]) == 0
    results = json.loads(path.read_text())
    assert list(results["providers"]) == ["fa3", "fa3-deterministic", "torch-fa2"]
    assert [row["pass"] for row in results["rows"]] == ["bwd", "fwd+bwd"]
    for measured in results["rows"]:
        assert [measured[name] for name in ("batch", "heads", "heads_kv")] == [2, 32, 32]
        assert set(measured["tflops"]) == set(measured["ms_p80"]) == set(results["providers"])
    output = capsys.readouterr().out
    assert "bwd: fa3 over the best peer" in output
    assert "fwd+bwd: time that the deterministic mode adds" in output


def test_nothing_is_written_when_fa3_is_wrong(without_gpu, monkeypatch, tmp_path, capsys):
    wrong = Provider("fa3", "1", lambda q, k, v, causal: attention(q, k, v, causal) * 1.1)
    monkeypatch.setitem(LOADERS, "fa3", lambda: wrong)
    path = tmp_path / "backward.json"
    arguments = ["--head-dims", "64", "--seqlens", "128", "--causal", "--commit", "abc", "--json", str(path)]
    assert bench_backward.main([*arguments, "--pass", "bwd", "--providers", "fa3", "torch-fa2"]) == 1
    assert "fa3 is WRONG" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_run_leaves_what_it_measured(without_gpu, monkeypatch, tmp_path):
    def stop_at_causal(pass_name, case, providers):
        if case.causal:
            raise KeyboardInterrupt
        return checked_pass(pass_name, case, providers)

    checked_pass = runner.checked_pass
    monkeypatch.setattr(runner, "checked_pass", stop_at_causal)
    arguments = ["--head-dims", "64", "--seqlens", "128", "--commit", "abc", "--json", str(tmp_path / "forward.json")]
    with pytest.raises(KeyboardInterrupt):
        bench_forward.main([*arguments, "--providers", "fa3"])
    (left,) = tmp_path.iterdir()
    assert left.name == "forward.json.partial"
    assert [row["causal"] for row in json.loads(left.read_text())["rows"]] == [False]


def test_training_benchmark_from_start_to_end(without_gpu, tmp_path):
    path = tmp_path / "training.json"
    assert bench_training.main(["--commit", "abc", "--json", str(path), "--providers", "fa3", "torch-sdpa"]) == 0
    rows = json.loads(path.read_text())["rows"]
    fields = ["layer", "pass", "dtype", "causal", "seqlen", "batch", "hidden", "heads", "heads_kv", "head_dim"]
    assert [list(row) for row in rows] == [[*fields, "ms", "tokens_per_s", "ms_p20", "ms_p80"]] * 2
    assert [rows[1][field] for field in fields] == ["llama3-8b", "fwd+bwd", "bf16", True, 32, 3, 64, 4, 2, 32]
    assert rows[0]["tokens_per_s"] == {"fa3": 128_000, "torch-sdpa": 128_000}
    png = plot.plot(path)
    assert png == [tmp_path / "training.png"]
    assert png[0].read_bytes().startswith(b"\x89PNG")


def test_fp8_accuracy_from_start_to_end(tmp_path, capsys):
    """Small and on the CPU: the rows of the paper's table, in the order of their errors."""
    path = tmp_path / "fp8_accuracy.json"
    arguments = ["--device", "cpu", "--seqlen", "130", "--commit", "abc"]
    assert fp8_accuracy.main([*arguments, "--json", str(path)]) == 0
    results = json.loads(path.read_text())
    assert (results["commit"], results["gpu"]) == ("abc", "cpu")
    assert {row["row"]: row["paper"] for row in results["rows"]} == fp8_accuracy.PAPER_RMSE
    rmse = {row["row"]: row["rmse"] for row in results["rows"]}
    assert 0 < rmse["fa3-fp16"] <= rmse["fp16-baseline"] < rmse["fa3-fp8"]
    assert rmse["fa3-fp8"] < rmse["fa3-fp8-no-incoherent"] < rmse["fp8-per-tensor"]
    assert rmse["simulation"] == 0
    assert "fa3-fp8-no-incoherent" in capsys.readouterr().out


def test_outliers_of_the_fp8_accuracy():
    for x in fp8_accuracy.make_inputs(512, "cpu", seed=0):
        assert x.dtype == torch.float16
        assert x.float().var() == pytest.approx(1 + 1e-3 * 100, rel=0.05)
        assert (x.abs() > 6).float().mean() == pytest.approx(0.55e-3, rel=0.2)  # P(|N(0, 101)| > 6) = 0.55


def test_training_shapes():
    shapes = {(case.layer.layer, case.seqlen) for case in bench_training.CASES}
    assert shapes == {("gpt2-medium", 1024), ("gpt2-medium", 8192), ("llama3-8b", 8192), ("llama3-8b", 32768)}
    for layer in (bench_training.GPT2_MEDIUM, bench_training.LLAMA3_8B):
        assert layer.heads * layer.head_dim == layer.hidden


def test_training_check_finds_a_wrong_attention():
    case = bench_training.Case(Layer("llama3-8b", 64, 4, 2, 32, True, False), 65, 2)

    def wrong(q, k, v, causal):
        return bench_training.exact_attention(q.roll(1, dims=2), k, v, causal)

    calls, problems = bench_training.checked_steps(
        case, {"right": bench_training.exact_attention, "wrong": wrong}, device="cpu"
    )
    assert list(calls) == ["right"]
    assert "WRONG" in problems["wrong"]


def test_rotary_keeps_the_scores_of_equal_distances():
    model = bench_training.AttentionLayer(Layer("any", 32, 1, 1, 32, True, False), seqlen=16)
    q, k = torch.randn(2, 1, 1, 1, 32).expand(2, 1, 16, 1, 32)
    q, k = model.rotate(q), model.rotate(k)
    torch.testing.assert_close((q[0, 5] * k[0, 2]).sum(), (q[0, 13] * k[0, 10]).sum())
    assert (q[0, 5] * k[0, 2]).sum() != pytest.approx((q[0, 5] * k[0, 3]).sum().item())


@pytest.mark.parametrize(
    ("passes", "names"), [(["fwd"], ["forward"]), (["bwd", "fwd+bwd"], ["forward", "forward-fwd-bwd"])]
)
def test_plot(tmp_path, passes, names):
    path = tmp_path / "forward.json"
    report.write_json(path, made_up_results(*passes))
    pngs = plot.plot(path)
    assert pngs == [tmp_path / f"{name}.png" for name in names]
    for png in pngs:
        assert png.read_bytes().startswith(b"\x89PNG")
        assert png.stat().st_size > 20_000


def quantize_by_blocks(**arguments):
    """What the op computes."""
    y = bench_quantize.transformed(**arguments)
    rows = arguments["block_size"] or y.shape[1]
    descale = torch.stack([block.abs().amax((1, 3)) / 448 for block in y.split(rows, dim=1)], dim=2)
    of_rows = descale.repeat_interleave(rows, dim=2)[:, :, : y.shape[1]].transpose(1, 2)
    x8 = (y / of_rows[..., None]).to(torch.float8_e4m3fn)
    return transpose_v(x8) if arguments["transpose"] else x8, descale.float(), None


@pytest.fixture
def quantize_without_gpu(without_gpu, monkeypatch):
    monkeypatch.setattr(bench_quantize, "CASES", [bench_quantize.Case(2, 200, 256, d) for d in (64, 128)])
    monkeypatch.setattr(bench_quantize, "checked_variants", partial(bench_quantize.checked_variants, device="cpu"))
    monkeypatch.setattr(bench_quantize, "quantize", quantize_by_blocks)


def test_quantize_benchmark_from_start_to_end(quantize_without_gpu, tmp_path):
    path = tmp_path / "fp8_quantize.json"
    assert bench_quantize.main(["--commit", "abc", "--json", str(path), "--head-dims", "128"]) == 0
    (measured,) = json.loads(path.read_text())["rows"]
    fields = ["pass", "dtype", "batch", "seqlen", "hidden", "head_dim", "heads"]
    assert list(measured) == [*fields, "ms", "gbps", "share_of_copy", "ms_p20", "ms_p80"]
    assert list(measured["ms"]) == [*bench_quantize.VARIANTS, "copy"]


def test_quantize_benchmark_finds_a_wrong_result(quantize_without_gpu, monkeypatch, tmp_path, capsys):
    def wrong(**arguments):
        x8, descale, mean = quantize_by_blocks(**arguments)
        return x8.view(torch.uint8).roll(int(arguments["smooth"]), dims=1).view(x8.dtype), descale, mean

    monkeypatch.setattr(bench_quantize, "quantize", wrong)
    path = tmp_path / "fp8_quantize.json"
    assert bench_quantize.main(["--commit", "abc", "--json", str(path)]) == 1
    output = capsys.readouterr().out
    assert "+smooth is WRONG" in output
    assert output.count("WRONG") == 2  # once per case
    assert not path.exists()
