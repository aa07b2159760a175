"""Prints what README.md says of speed and accuracy, from the results files of one GPU, as markdown.

python -m benchmarks.summary            # every block, under its name
python -m benchmarks.summary --write    # puts the blocks into README.md, between their markers

A test compares README.md with this output, so that after `make bench` the second form is all there is to do.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from benchmarks.report import (
    ALL_OURS,
    OURS,
    OURS_BF16,
    OURS_DETERMINISTIC,
    OURS_FROM_BF16,
    OURS_TRANSPOSED_V,
    ROOT,
    mask_name,
    ratio,
)

RESULTS = ROOT / "benchmarks/results/nvidia-h200"
HEAD_DIMS = (64, 128, 256)
HEADLINE = {"pass": "fwd", "head_dim": 128, "causal": True, "seqlen": 16384}

Row = dict
Speed = Callable[[Row], "float | None"]


def over_best_peer(ours: str) -> Speed:
    return lambda row: ratio(row, ours)


def over(ours: str, other: str) -> Speed:
    return lambda row: row["ms"][other] / row["ms"][ours] if {ours, other} <= row["ms"].keys() else None


def share_of_copy(variant: str) -> Speed:
    return lambda row: row["share_of_copy"].get(variant)


@dataclass(frozen=True)
class Line:
    """A row of the speed table: the rows of a results file that have these fields, and how fast each is."""

    what: str
    compared_with: str
    results: str
    fields: dict
    speed: Speed
    provider: str = OURS  # whose TFLOP/s are shown


CAUSAL, FULL = {"causal": True}, {"causal": False}
FWD, BWD, BOTH = ({"pass": name} for name in ("fwd", "bwd", "fwd+bwd"))
PEER = "fastest peer"
UPSTREAM = "fa3-fwd"
VT = OURS_TRANSPOSED_V
LARGE = {"pass": "quantize", "seqlen": 131072}
LINES = [
    Line("forward, full mask", PEER, "forward", FWD | FULL, over_best_peer(OURS)),
    Line("forward, causal", PEER, "forward", FWD | CAUSAL, over_best_peer(OURS)),
    Line("backward, full mask", PEER, "backward", BWD | FULL, over_best_peer(OURS)),
    Line("backward, causal", PEER, "backward", BWD | CAUSAL, over_best_peer(OURS)),
    Line("forward and backward", PEER, "backward", BOTH, over_best_peer(OURS)),
    Line(
        "backward, `deterministic=True`",
        "our default",
        "backward",
        BWD,
        over(OURS_DETERMINISTIC, OURS),
        OURS_DETERMINISTIC,
    ),
    Line("training step of a layer", "torch's SDPA", "training", BOTH, over(OURS, "torch-sdpa")),
    Line("FP8 forward, V transposed", f"`{UPSTREAM}`, FP8", "fp8", FWD, over(VT, UPSTREAM), VT),
    Line("FP8 forward, V in rows", f"`{UPSTREAM}`, FP8", "fp8", FWD, over(OURS, UPSTREAM)),
    Line("FP8 forward, V transposed", "our bf16", "fp8", FWD, over(VT, OURS_BF16), VT),
    Line(
        "FP8 forward from bf16, with quantizer", "our bf16", "fp8", FWD, over(OURS_FROM_BF16, OURS_BF16), OURS_FROM_BF16
    ),
    Line("quantizer, rotary and Hadamard", "a copy", "fp8_quantize", LARGE, share_of_copy("+hadamard")),
]

ERRORS = {
    "fa3-fp16": "fp16",
    "fp8-per-tensor": "FP8, one scale per tensor",
    "fa3-fp8": "FP8, block scales and incoherent processing",
    "fa3-fp8-no-block": "the same without block scales",
    "fa3-fp8-no-incoherent": "the same without incoherent processing",
}


def load(results_dir: Path, name: str) -> dict:
    return json.loads((results_dir / f"{name}.json").read_text())


def chosen(rows: list[Row], fields: dict) -> list[Row]:
    return [row for row in rows if fields.items() <= row.items()]


def table(header: list[str], lines: list[list[str]], words: int = 1) -> str:
    """Markdown, with numbers on the right from column `words` on."""
    rule = ["---"] * words + ["---:"] * (len(header) - words)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *lines])


def mean(values: list[float]) -> str:
    return f"{geometric_mean(values):.2f}" if values else "-"


def seqlen_name(seqlen: int) -> str:
    return f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen)


def headline(results_dir: Path) -> str:
    """Two cells of the grid, ours beside the fastest peer's."""

    def cell(name: str, ours: str) -> str:
        (row,) = chosen(load(results_dir, name)["rows"], HEADLINE)
        tflops = row["tflops"]
        best = max((peer for peer in tflops if peer not in ALL_OURS), key=tflops.__getitem__)
        return f"**{tflops[ours]:.0f} TFLOP/s** {{}} (fastest peer: {tflops[best]:.0f}, `{best}`)"

    case = f"head_dim {HEADLINE['head_dim']}, {mask_name(HEADLINE['causal'])}, seqlen {seqlen_name(HEADLINE['seqlen'])}"
    # Not over the committed results: --out-dir.
    arguments = f"--head-dims {HEADLINE['head_dim']} --seqlens {HEADLINE['seqlen']} --causal --out-dir build"
    return (
        f"On one {load(results_dir, 'forward')['gpu']}, at {case}, the forward runs at\n"
        f"{cell('forward', OURS).format('in bf16')}\n"
        f"and {cell('fp8', OURS_TRANSPOSED_V).format('in FP8')}. To print these two:\n\n"
        f"```sh\npython -m benchmarks.bench_forward {arguments}\npython -m benchmarks.bench_fp8 {arguments}\n```"
    )


def speed(results_dir: Path) -> str:
    """The table of speed, and the commits that were measured."""
    lines, commits = [], {}
    for line in LINES:
        results = load(results_dir, line.results)
        commits[line.results] = results["commit"][:7]
        cells = [(row, value) for row in chosen(results["rows"], line.fields) if (value := line.speed(row)) is not None]
        values = [value for _, value in cells]
        tflops = [row["tflops"][line.provider] for row, _ in cells if "tflops" in row]
        lines.append(
            [
                line.what,
                line.compared_with,
                *(mean([value for row, value in cells if row["head_dim"] == d]) for d in HEAD_DIMS),
                mean(values),
                f"{min(values):.2f} to {max(values):.2f}",
                f"{min(tflops):.0f} to {max(tflops):.0f}" if tflops else "-",
            ]
        )
    names = ["head_dim " + str(HEAD_DIMS[0]), *map(str, HEAD_DIMS[1:])]
    header = ["", "speed over", *names, "all", "range of cells", "TFLOP/s"]
    measured = ", ".join(f"{name} {commit}" for name, commit in commits.items())
    return f"{table(header, lines, words=2)}\n\nMeasured commits: {measured}."


def fp8_by_seqlen(results_dir: Path) -> str:
    """FP8 over our bf16 by seqlen: with the tensors in FP8 already, and from bf16 with the quantizer's time."""
    rows = load(results_dir, "fp8")["rows"]
    seqlens = sorted({row["seqlen"] for row in rows})
    lines = []
    for head_dim in HEAD_DIMS:
        for what, ours in (("tensors in FP8", OURS_TRANSPOSED_V), ("from bf16", OURS_FROM_BF16)):
            cells = [
                [over(ours, OURS_BF16)(row) for row in chosen(rows, {"head_dim": head_dim, "seqlen": seqlen})]
                for seqlen in seqlens
            ]
            lines.append([f"{head_dim}, {what}", *map(mean, cells)])
    return table(["head_dim", *map(seqlen_name, seqlens)], lines)


def fp8_error(results_dir: Path) -> str:
    """Errors in the paper's setting, and on the activations of a small model."""
    rows = {row["row"]: row for row in load(results_dir, "fp8_accuracy")["rows"]}
    lines = [[what, f"{rows[name]['rmse']:.1e}", f"{rows[name]['paper']:.1e}"] for name, what in ERRORS.items()]
    text = table(["root-mean-square error", "fa3", "the paper's"], lines).replace("e-0", "e-")
    layers = chosen(load(results_dir, "fp8_activations")["rows"], {"row": "fa3-fp8"})
    errors = [100 * row["rmse"] for row in layers]
    worst = max(100 * row["worst_head"] for row in layers)
    return (
        f"{text}\n\n"
        f"On the activations of a small BERT ({len(layers)} layers) the error is {min(errors):.1f} to "
        f"{max(errors):.1f} % of the output's\nroot mean square by layer, and {worst:.1f} % in the worst head."
    )


BLOCKS = {"headline": headline, "speed": speed, "fp8_by_seqlen": fp8_by_seqlen, "fp8_error": fp8_error}


def marked(name: str) -> re.Pattern:
    """A block between its markers, as README.md has it."""
    return re.compile(rf"(?<=<!-- benchmarks.summary: {name} -->\n)(?:(?!<!--).)*(?=<!-- end -->)", re.DOTALL)


def with_blocks(text: str, results_dir: Path = RESULTS) -> str:
    """`text` with every block as the results are now."""
    for name, block in BLOCKS.items():
        new = f"{block(results_dir)}\n"
        text, count = marked(name).subn(lambda _, new=new: new, text)
        if count != 1:
            raise SystemExit(f"the markers of block {name} must be there once, found {count} times")
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results files of one GPU")
    parser.add_argument("--write", action="store_true", help="put the blocks into README.md")
    arguments = parser.parse_args()
    if arguments.write:
        readme = ROOT / "README.md"
        readme.write_text(with_blocks(readme.read_text(), arguments.results))
    else:
        for block_name, function in BLOCKS.items():
            print(f"## {block_name}\n\n{function(arguments.results)}\n")
