"""What the documents name is there: files behind links, and make's targets."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = ["README.md", "benchmarks/README.md", *(f"docs/design/{x}.md" for x in ("forward", "backward", "fp8"))]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_files_and_targets_exist(document):
    path = ROOT / document
    text = path.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)(?=[ `\n])", text)) <= targets


OURS = ("fa3", "fa3-deterministic")
RESULTS = ROOT / "benchmarks/results/nvidia-h200"
MEASURED = [
    (name, passes) for name, passes in (("forward", "fwd"), ("backward", "bwd")) if (RESULTS / f"{name}.json").exists()
]


@pytest.mark.parametrize(("results", "passes"), MEASURED)
def test_numbers_in_the_readme_are_those_of_the_results(results, passes):
    """Geometric mean and minimum over the best peer, as the results file has them."""
    rows = json.loads((RESULTS / f"{results}.json").read_text())["rows"]
    ratios = [
        row["tflops"]["fa3"] / max(tflops for name, tflops in row["tflops"].items() if name not in OURS)
        for row in rows
        if row["pass"] == passes
    ]
    section = re.search(rf"^{results.capitalize()}, bf16.*?(?=^\w+, bf16|\Z)", README, re.DOTALL | re.MULTILINE)[0]
    stated = re.search(r"geometric mean ([\d.]+) .*?lowest ([\d.]+)\.\n", section, re.DOTALL)
    assert float(stated[1]) == pytest.approx(math.prod(ratios) ** (1 / len(ratios)), abs=6e-4)
    assert float(stated[2]) == pytest.approx(min(ratios), abs=6e-4)


@pytest.mark.skipif(("backward", "bwd") not in MEASURED, reason="the backward's results are not there yet")
def test_cost_of_the_deterministic_mode_in_the_readme():
    rows = json.loads((RESULTS / "backward.json").read_text())["rows"]
    costs = [row["ms"]["fa3-deterministic"] / row["ms"]["fa3"] for row in rows if row["pass"] == "bwd"]
    stated = re.search(r"costs (\d+) % .*?at most (\d+) %", README, re.DOTALL)
    assert int(stated[1]) == round(100 * (math.prod(costs) ** (1 / len(costs)) - 1))
    assert int(stated[2]) == round(100 * (max(costs) - 1))


@pytest.mark.parametrize(
    ("ours", "peer", "stated"),
    [
        ("fa3-transposed-v", "fa3-fwd", r"([\d.]+) times `fa3-fwd` in"),
        ("fa3-transposed-v", "fa3-bf16", r"([\d.]+) times our bf16"),
        ("fa3", "fa3-fwd", r"([\d.]+) times `fa3-fwd` with V in rows"),
    ],
)
def test_fp8_numbers_in_the_readme(ours, peer, stated):
    """Geometric means of all cells and of each head_dim, and the least over upstream's."""
    rows = json.loads((RESULTS / "fp8.json").read_text())["rows"]

    def ratios(*head_dims: int) -> list[float]:
        return [row["tflops"][ours] / row["tflops"][peer] for row in rows if row["head_dim"] in head_dims]

    means = [math.prod(x) ** (1 / len(x)) for x in (ratios(64, 128, 256), ratios(64), ratios(128), ratios(256))]
    found = re.search(stated + r".*?\(([\d.]+),\s([\d.]+)\sand\s([\d.]+)", README, re.DOTALL)
    assert [float(x) for x in found.groups()] == pytest.approx(means, abs=5.1e-3 if peer == "fa3-bf16" else 5.1e-4)
    if peer == "fa3-fwd":
        worst = re.search(stated + r".*?at\sworst\s([\d.]+)", README, re.DOTALL)
        assert float(worst[2]) == pytest.approx(min(ratios(64, 128, 256)), abs=5.1e-4)
