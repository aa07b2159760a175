"""What the documents name is there: files behind links, and make's targets."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", "benchmarks/README.md", "docs/design/forward.md"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_files_and_targets_exist(document):
    path = ROOT / document
    text = path.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)(?=[ `\n])", text)) <= targets


def test_numbers_in_the_readme_are_those_of_the_results():
    """Geometric mean and minimum over the best peer, as the results file has them."""
    rows = json.loads((ROOT / "benchmarks/results/nvidia-h200/forward.json").read_text())["rows"]
    ratios = [
        row["tflops"]["fa3"] / max(tflops for name, tflops in row["tflops"].items() if name != "fa3") for row in rows
    ]
    stated = re.search(r"geometric mean ([\d.]+) .*?lowest ([\d.]+)\.\n", (ROOT / "README.md").read_text(), re.DOTALL)
    assert float(stated[1]) == pytest.approx(math.prod(ratios) ** (1 / len(ratios)), abs=6e-4)
    assert float(stated[2]) == pytest.approx(min(ratios), abs=6e-4)
