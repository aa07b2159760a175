"""Draws a results file in the papers' form, TFLOP/s by seqlen, as a PNG beside it:

python -m benchmarks.plot benchmarks/results/<gpu>/forward.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.report import mask_name

# Okabe and Ito's palette, told apart by colour-blind readers.
COLORS = {
    "fa3": "#d55e00",
    "torch-cudnn": "#009e73",
    "torch-fa2": "#999999",
    "fa3-fwd": "#0072b2",
}
PASS_NAMES = {"fwd": "forward", "bwd": "backward"}


def plot(path: Path) -> Path:
    """One panel per head_dim (down) and mask (across); returns the PNG's path."""
    results = json.loads(path.read_text())
    rows = results["rows"]
    head_dims, masks = (sorted({row[field] for row in rows}) for field in ("head_dim", "causal"))
    size = (7.5 * len(masks), 3.4 * len(head_dims))
    shape = (len(head_dims), len(masks))
    figure, panels = plt.subplots(*shape, figsize=size, squeeze=False, sharey="row", layout="constrained")
    for head_dim, panel_row in zip(head_dims, panels, strict=True):
        for causal, axes in zip(masks, panel_row, strict=True):
            chosen = [row for row in rows if row["head_dim"] == head_dim and row["causal"] == causal]
            draw_panel(axes, sorted(chosen, key=lambda row: row["seqlen"]), list(results["providers"]))
            axes.set_title(f"head_dim {head_dim}, {mask_name(causal)}", fontsize=11)
    handles = {label: bar for axes in panels.flat for bar, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    labels = [f"{name} {results['providers'][name]}" for name in handles]
    figure.legend(handles.values(), labels, loc="outside lower center", ncols=len(handles), frameon=False)
    passes, dtypes = (", ".join(sorted({row[field] for row in rows})) for field in ("pass", "dtype"))
    passes = ", ".join(PASS_NAMES.get(name, name) for name in passes.split(", "))
    figure.suptitle(f"Attention {passes}, {dtypes}, {results['gpu']} (fa3 commit {results['commit'][:7]})", fontsize=13)
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=130)
    plt.close(figure)
    return target


def draw_panel(axes: plt.Axes, rows: list[dict], providers: list[str]) -> None:
    """A group of bars per seqlen, a bar per provider, its value above it."""
    width = 0.86 / len(providers)
    for index, name in enumerate(providers):
        bars = [(group, row["tflops"][name]) for group, row in enumerate(rows) if name in row["tflops"]]
        if bars:
            xs = [group + (index - (len(providers) - 1) / 2) * width for group, _ in bars]
            drawn = axes.bar(xs, [tflops for _, tflops in bars], width, label=name, color=COLORS.get(name))
            axes.bar_label(drawn, fmt="%.0f", fontsize=6.5, padding=1)
    axes.set_xticks(range(len(rows)), [seqlen_label(row["seqlen"]) for row in rows])
    axes.set_xlabel("seqlen")
    axes.set_ylabel("TFLOP/s")
    axes.margins(x=0.01, y=0.08)
    axes.spines[["top", "right"]].set_visible(False)


def seqlen_label(seqlen: int) -> str:
    return f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, nargs="+", help="results files of the forward's form")
    for json_path in parser.parse_args().json:
        print(plot(json_path))
