"""Draws a results file as a PNG beside it: TFLOP/s by seqlen in the papers' form, or tokens per second of a layer.

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

# Okabe and Ito's palette, told apart by color-blind readers.
COLORS = {
    "fa3": "#d55e00",
    "fa3-deterministic": "#e69f00",
    "fa3-transposed-v": "#9b2d00",
    "fa3-bf16": "#e69f00",
    "fa3-from-bf16": "#f0c27a",
    "torch-sdpa": "#56b4e9",
    "torch-cudnn": "#009e73",
    "torch-fa2": "#999999",
    "fa3-fwd": "#0072b2",
    "flash-attn-4": "#cc79a7",
}
PASS_NAMES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward and backward"}


def plot(path: Path) -> list[Path]:
    """One PNG per pass, that of the first pass named as the file; returns their paths."""
    results = json.loads(path.read_text())
    targets = []
    for pass_name in dict.fromkeys(row["pass"] for row in results["rows"]):
        rows = [row for row in results["rows"] if row["pass"] == pass_name]
        figure = draw_layers(results, rows) if "tokens_per_s" in rows[0] else draw_grid(results, rows)
        suffix = f"-{pass_name.replace('+', '-')}" if targets else ""
        targets.append(path.with_name(f"{path.stem}{suffix}.png"))
        figure.savefig(targets[-1], dpi=130)
        plt.close(figure)
    return targets


def draw_grid(results: dict, rows: list[dict]) -> plt.Figure:
    """One panel per head_dim (down) and mask (across)."""
    head_dims, masks = (sorted({row[field] for row in rows}) for field in ("head_dim", "causal"))
    size = (7.5 * len(masks), 3.4 * len(head_dims))
    shape = (len(head_dims), len(masks))
    figure, panels = plt.subplots(*shape, figsize=size, squeeze=False, sharey="row", layout="constrained")
    for head_dim, panel_row in zip(head_dims, panels, strict=True):
        for causal, axes in zip(masks, panel_row, strict=True):
            chosen = [row for row in rows if row["head_dim"] == head_dim and row["causal"] == causal]
            draw_panel(axes, chosen, list(results["providers"]), "tflops", "TFLOP/s")
            axes.set_title(f"head_dim {head_dim}, {mask_name(causal)}", fontsize=11)
    dtypes = ", ".join(sorted({row["dtype"] for row in rows}))
    return finished(figure, results, f"Attention {PASS_NAMES[rows[0]['pass']]}, {dtypes}")


def draw_layers(results: dict, rows: list[dict]) -> plt.Figure:
    """One panel per layer."""
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    figure, panels = plt.subplots(1, len(layers), figsize=(5.5 * len(layers), 4), squeeze=False, layout="constrained")
    for layer, axes in zip(layers, panels[0], strict=True):
        chosen = [row for row in rows if row["layer"] == layer]
        draw_panel(axes, chosen, list(results["providers"]), "tokens_per_s", "thousand tokens/s", unit_size=1000)
        axes.set_title(f"attention layer of {layer}", fontsize=11)
    return finished(figure, results, "Training step, forward and backward")


def finished(figure: plt.Figure, results: dict, title: str) -> plt.Figure:
    """The figure with its legend and its title."""
    axes_handles = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in figure.axes]
    handles = {label: bar for pairs in axes_handles for bar, label in pairs}
    labels = [f"{name} {results['providers'][name]}" for name in handles]
    figure.legend(handles.values(), labels, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(f"{title}, {results['gpu']} (fa3 commit {results['commit'][:7]})", fontsize=13)
    return figure


def draw_panel(
    axes: plt.Axes, rows: list[dict], providers: list[str], field: str, unit: str, unit_size: float = 1
) -> None:
    """A group of bars per seqlen, a bar per provider, its value above it."""
    rows = sorted(rows, key=lambda row: row["seqlen"])
    width = 0.86 / len(providers)
    for index, name in enumerate(providers):
        bars = [(group, row[field][name] / unit_size) for group, row in enumerate(rows) if name in row[field]]
        if bars:
            xs = [group + (index - (len(providers) - 1) / 2) * width for group, _ in bars]
            drawn = axes.bar(xs, [value for _, value in bars], width, label=name, color=COLORS.get(name))
            axes.bar_label(drawn, fmt="%.0f", fontsize=6.5, padding=1)
    axes.set_xticks(range(len(rows)), [seqlen_label(row["seqlen"]) for row in rows])
    axes.set_xlabel("seqlen")
    axes.set_ylabel(unit)
    axes.margins(x=0.01, y=0.08)
    axes.spines[["top", "right"]].set_visible(False)


def seqlen_label(seqlen: int) -> str:
    return f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, nargs="+", help="results files of the benchmarks here")
    for json_path in parser.parse_args().json:
        print(*plot(json_path), sep="\n")
