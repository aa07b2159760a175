"""The documents against the tree and the results: files behind links, make's targets, figures, counts."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks import summary

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DESIGN = [f"docs/design/{name}.md" for name in ("forward", "backward", "fp8")]
DOCUMENTS = ["README.md", "benchmarks/README.md", "docs/forward.md", "docs/backward.md", *DESIGN]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_files_and_targets_exist(document):
    path = ROOT / document
    text = path.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)(?=[ `\n])", text)) <= targets


@pytest.mark.parametrize("document", ["docs/forward.md", "docs/backward.md", *DESIGN])
def test_lines_fit_a_screen(document):
    lines = (ROOT / document).read_text().splitlines()
    assert [line for line in lines if len(line) > 100] == []


@pytest.mark.parametrize("name", summary.BLOCKS)
def test_figures_in_the_readme_are_those_of_the_results(name):
    """If this fails: python -m benchmarks.summary --write."""
    assert summary.marked(name).findall(README) == [f"{summary.BLOCKS[name](summary.RESULTS)}\n"]


def test_there_are_no_other_figures_of_speed_in_the_readme():
    text = README
    for name in summary.BLOCKS:
        text = summary.marked(name).sub("", text)
    assert re.findall(r"[\d.]+ (?:TFLOP/s|GB/s|times)|geometric mean [\d.]+", text) == []


def test_number_of_kernels_in_the_readme():
    kernels = [path for part in ("fwd", "bwd") for path in (ROOT / "csrc" / part).glob(f"{part}_*.cu")]
    stated = re.search(r"A full build compiles (\d+) attention kernels", README)
    assert int(stated[1]) == len(kernels)


def code_spans(document: str) -> list[str]:
    """What stands between single backticks."""
    text = re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.DOTALL)
    return re.findall(r"`([^`]+)`", text)


PAGES = ["README.md", "docs/forward.md", "docs/backward.md"]


@pytest.mark.parametrize("document", [*PAGES, *DESIGN])
def test_named_sources_exist(document):
    paths = {span for span in code_spans(document) if re.fullmatch(r"(csrc|fa3|benchmarks|docs)/[\w./-]*", span)}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", [*PAGES[1:], *DESIGN])
def test_named_identifiers_are_in_the_code(document):
    """Words with an underscore or a capital inside: names of our code, or of the instructions that it uses."""
    files = [path for folder in ("csrc", "fa3", "benchmarks") for path in (ROOT / folder).rglob("*.*")]
    sources = "\n".join(path.read_text() for path in files if path.suffix in (".cuh", ".h", ".cu", ".cpp", ".py"))
    known = set(re.findall(r"\w+", sources))
    words = {word for span in code_spans(document) if "/" not in span for word in re.findall(r"[A-Za-z_]\w+", span)}
    named = {word for word in words if "_" in word or re.search(r"[a-z][A-Z]", word)}
    assert sorted(named - known) == []
