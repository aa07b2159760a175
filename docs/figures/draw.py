"""Draws the figures of docs/forward.md and docs/backward.md as SVG beside this file.

python docs/figures/draw.py [folder]

The same version of matplotlib writes the same bytes. Lengths of the bars are for reading, not measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

# Okabe and Ito's palette, told apart by colour-blind readers; light fills, dark lines.
GEMM_S, GEMM_PV, GEMM_THIRD, CUDA, WRITE, MEMORY = "#8ecae6", "#f4a582", "#a8d8a0", "#f6e27f", "#d9c2e9", "#e8e8e8"
PRODUCER, CONVERTER, CONSUMER = "#dcecf7", "#efe6f6", "#e4f2e0"
DATA, BARRIER, TEXT, FAINT = "#0072b2", "#c1440e", "#222222", "#888888"

plt.rcParams.update(
    {
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "text.color": TEXT,
        "mathtext.fontset": "dejavusans",
        "svg.hashsalt": "fa3",
        "svg.fonttype": "path",
    }
)


def canvas(width: float, height: float) -> tuple[plt.Figure, plt.Axes]:
    """An empty page of so many inches."""
    figure = plt.figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    return figure, axes


def box(axes, x, y, width, height, fill="white", line=TEXT, rounded=False, dashed=False):
    style = "round,pad=0,rounding_size=0.12" if rounded else "square,pad=0"
    patch = FancyBboxPatch(
        (x, y), width, height, boxstyle=style, facecolor=fill, edgecolor=line, linewidth=0.9,
        linestyle=(0, (4, 2)) if dashed else "solid",
    )  # fmt: skip
    axes.add_patch(patch)


def label(axes, x, y, text, size=9.0, color=TEXT, align="center", bold=False, vertical="center"):
    axes.text(
        x, y, text, fontsize=size, color=color, ha=align, va=vertical, fontweight="bold" if bold else "normal",
        linespacing=1.25,
    )  # fmt: skip


def arrow(axes, start, end, color=DATA, dashed=False, curve=0.0, both=False, width=1.3):
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="<|-|>" if both else "-|>", mutation_scale=9, color=color, linewidth=width,
            linestyle=(0, (3, 2)) if dashed else "solid", connectionstyle=f"arc3,rad={curve}", shrinkA=0, shrinkB=0,
        )
    )  # fmt: skip


def ring(axes, x, y, name, stages, note="", width=2.9, height=0.5, fill=MEMORY):
    """A ring buffer: its name, a cell per stage, a note below."""
    cell = width / len(stages)
    label(axes, x, y + height + 0.17, name, size=9, align="left", bold=True)
    for index, text in enumerate(stages):
        axes.add_patch(Rectangle((x + index * cell, y), cell, height, facecolor=fill, edgecolor=TEXT, linewidth=0.9))
        label(axes, x + (index + 0.5) * cell, y + height / 2, text, size=8)
    if note:
        label(axes, x, y - 0.16, note, size=7.5, color=FAINT, align="left")


def panel(axes, x, width, title, bottom=0.3, top=7.6):
    box(axes, x, bottom, width, top - bottom, fill="#fafafa", rounded=True)
    label(axes, x + width / 2, top - 0.3, title, bold=True)


def role(axes, x, y, width, height, fill, title, text):
    """A box of threads: who they are, and what they do."""
    box(axes, x, y, width, height, fill=fill, rounded=True)
    lines = title.count("\n") + 1
    label(axes, x + width / 2, y + height - 0.12, title, size=8.5, bold=True, vertical="top")
    label(axes, x + width / 2, y + (height - 0.3 * lines) / 2, text, size=8.5)


def legend(axes, x, y, entries):
    """Lines with what they mean, side by side."""
    for color, dashed, text, step in entries:
        arrow(axes, (x, y), (x + 0.7, y), color=color, dashed=dashed)
        label(axes, x + 0.82, y, text, size=8.5, align="left")
        x += step


def bars(axes, y, height, items):
    """Bars of a lane: (begin, end, text, fill)."""
    for begin, end, text, fill in items:
        axes.add_patch(Rectangle((begin, y), end - begin, height, facecolor=fill, edgecolor=TEXT, linewidth=0.8))
        label(axes, (begin + end) / 2, y + height / 2, text, size=8)


def lane(axes, y, height, left, right, name, size=8.5):
    axes.plot([left, right], [y, y], color="#dddddd", linewidth=0.7, zorder=0)
    label(axes, left - 0.25, y + height / 2, name, size=size, align="right")


def save(figure: plt.Figure, axes: plt.Axes, limits: tuple[float, float, float, float], path: Path) -> None:
    left, right, bottom, top = limits
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    figure.savefig(path, metadata={"Date": None, "Creator": None}, facecolor="white")
    plt.close(figure)


def forward_roles(path: Path) -> None:
    figure, axes = canvas(10.4, 6.0)
    panel(axes, 0.0, 1.8, "global memory")
    for y, name in ((6.15, "Q"), (5.0, "K"), (3.7, "V"), (0.75, "out, lse")):
        box(axes, 0.4, y, 1.0, 0.5, fill=MEMORY)
        label(axes, 0.9, y + 0.25, name)

    panel(axes, 2.5, 2.6, "warpgroup 0")
    role(
        axes,
        2.7,
        3.5,
        2.2,
        3.4,
        PRODUCER,
        "warp 0: producer",
        "one thread issues\nall TMA loads;\nit waits for empty,\nthen arms full with\nthe byte count",
    )
    role(
        axes,
        2.7,
        0.65,
        2.2,
        2.45,
        CONVERTER,
        "warps 1 to 3:\nconverter",
        "FP8 with V in rows:\ntranspose V;\notherwise no work",
    )

    panel(axes, 5.9, 3.5, "shared memory")
    ring(axes, 6.2, 6.15, "Q", ["warpgroup 1", "warpgroup 2"], "one stage and one pair of barriers each")
    ring(axes, 6.2, 5.0, "K ring", ["stage 0", "stage 1", "..."])
    ring(axes, 6.2, 3.7, "V ring", ["stage 0", "stage 1", "..."])
    ring(axes, 6.2, 2.2, "transposed V ring", ["stage 0", "stage 1", "..."], "FP8 with V in rows only", fill=CONVERTER)
    ring(axes, 6.2, 0.75, "O", ["warpgroup 1", "warpgroup 2"], "each warp stores its 16 rows by itself")

    text = "64 query rows;\nregisters: S, then P; O;\nrow maximum, row sum"
    label(axes, 12.3, 7.3, "warpgroups 1 and 2 (or 1 to 3)", bold=True)
    for y, name in ((4.75, "consumer warpgroup 1"), (1.15, "consumer warpgroup 2")):
        role(axes, 10.8, y, 3.0, 2.15, CONSUMER, name, text)
        arrow(axes, (9.4, y + 1.6), (10.8, y + 1.6))
        label(axes, 10.1, y + 1.77, "wait full", size=7.5, color=DATA)
        arrow(axes, (10.8, y + 1.0), (9.4, y + 1.0), color=BARRIER, dashed=True)
        label(axes, 10.1, y + 1.17, "release", size=7.5, color=BARRIER)
        arrow(axes, (10.8, y + 0.4), (9.4, y + 0.4))
        label(axes, 10.1, y + 0.57, "O", size=7.5, color=DATA)
    arrow(axes, (11.5, 4.75), (11.5, 3.3), color=BARRIER, dashed=True)
    arrow(axes, (13.1, 3.3), (13.1, 4.75), color=BARRIER, dashed=True)
    label(axes, 12.3, 4.02, "turn (warp\nscheduler barrier)", size=7.5, color=BARRIER)

    for y in (6.4, 5.25, 3.95):
        axes.plot([1.4, 2.7], [y, y], color=DATA, linewidth=1.3)
        arrow(axes, (4.9, y), (6.2, y))
        label(axes, 5.5, y + 0.15, "TMA", size=7.5, color=DATA)
        arrow(axes, (6.2, y - 0.16), (4.9, y - 0.16), color=BARRIER, dashed=True)
    arrow(axes, (6.2, 3.72), (4.9, 2.75))
    arrow(axes, (4.9, 2.3), (6.2, 2.4))
    axes.plot([6.2, 5.5, 5.5, 0.9], [1.0, 1.0, 0.1, 0.1], color=DATA, linewidth=1.3)
    arrow(axes, (0.9, 0.1), (0.9, 0.75))
    label(axes, 3.8, -0.05, "TMA store of O, under the next tile", size=7.5, color=DATA)

    legend(
        axes, 0.1, -0.55,
        [
            (DATA, False, "data (loads and transposed V complete a full barrier)", 6.5),
            (BARRIER, True, "an arrival on an empty barrier (one per warp), or the turn passed on", 7.5),
        ],
    )  # fmt: skip
    save(figure, axes, (-0.15, 14.05, -0.85, 7.8), path)


class TensorCores:
    """One queue for all warpgroups of the SM: what is issued first runs first."""

    def __init__(self):
        self.free = 0.0

    def run(self, issued: float, length: float) -> tuple[float, float]:
        begin = max(issued, self.free)
        self.free = begin + length
        return begin, self.free


class Producer:
    """Issues loads in a fixed order, each when its stage has been released; data land some time later."""

    GAP, LATENCY, WIDTH = 1.05, 1.6, 0.95

    def __init__(self, order: list[str], stages: int):
        self.order, self.stages = order, stages
        self.issued: dict[str, float] = {}
        self.released: dict[str, float] = {}

    def landed(self, name: str) -> float:
        for load in self.order[len(self.issued) : self.order.index(name) + 1]:
            same_ring = [other for other in self.order[: self.order.index(load)] if other[0] == load[0]]
            stages = 1 if load[0] == "Q" else self.stages
            free = self.released[same_ring[-stages]] if len(same_ring) >= stages else 0.0
            before = max(self.issued.values(), default=-self.GAP) + self.GAP
            self.issued[load] = max(before, free)
        return self.issued[name] + self.LATENCY

    def release(self, name: str, time: float) -> None:
        """Each warpgroup once: the last one counts."""
        self.released[name] = max(self.released.get(name, 0.0), time)


class Schedule:
    """Two warpgroups that take turns: bars of their GEMMs and of what they compute, and where turns are passed."""

    GEMM, SOFTMAX, STORE, ADD, ISSUE = 2.0, 3.4, 1.9, 0.9, 0.25

    def __init__(self, order: list[str]):
        self.producer, self.tensor = Producer(order, stages=2), TensorCores()
        self.gemms, self.cuda = ([], []), ([], [])
        self.ready, self.turn, self.passed = [0.0, 0.0], 0.0, []

    def begin_turn(self, w: int) -> float:
        return max(self.ready[w], self.turn)

    def issue(self, w: int, name: str, needs: list[str], time: float, length: float, fill: str) -> tuple[float, float]:
        """Waits for what the GEMM reads and issues it: (time after the issue, end of the GEMM)."""
        issued = max([time, *(self.producer.landed(load) for load in needs)])
        begin, end = self.tensor.run(issued, length)
        self.gemms[w].append((begin, end, name, fill))
        return issued + self.ISSUE, end

    def pass_turn(self, w: int, time: float) -> None:
        self.passed.append((w, time))
        self.turn = time

    def compute(self, w: int, name: str, begin: float, length: float, fill: str = CUDA) -> float:
        self.cuda[w].append((begin, begin + length, name, fill))
        return begin + length


def overlapped(blocks: list[str]) -> Schedule:
    """fwd/schedule_overlapped.cuh. `blocks` in the order in which they are visited; a prime marks the next tile."""
    order = [f"K{blocks[0]}", "Q"]
    for before, block in pairwise(blocks):
        order += [f"K{block}", f"V{before}"] + (["Q'"] if block == "2'" else [])
    x = Schedule(order)
    for block, before in zip(blocks, [None, *blocks], strict=False):
        first = block[0] == blocks[0]
        q = "Q'" if block.endswith("'") else "Q"
        for w in (0, 1):
            time, s_end = x.issue(w, f"S{block}", [f"K{block}", q], x.begin_turn(w), x.GEMM, GEMM_S)
            pv_end = s_end
            if before is not None:
                time, pv_end = x.issue(w, f"PV{before}", [f"V{before}"], time, x.GEMM, GEMM_PV)
                x.producer.release(f"V{before}", pv_end)
            x.pass_turn(w, time)
            x.producer.release(f"K{block}", s_end)
            if block[0] == "0":
                x.producer.release(q, s_end)
            begin = s_end
            if first and before is not None:
                begin = x.compute(w, "store O", pv_end, x.STORE, WRITE)
            x.ready[w] = max(x.compute(w, f"softmax {block}", begin, x.SOFTMAX), pv_end)
    return x


def serial(blocks: list[str]) -> Schedule:
    """fwd/schedule_serial.cuh, with the next tile's first S under the epilogue as at head_dim 256."""
    order = []
    for block in blocks:
        order += [f"K{block}"] + ([f"Q{block[1:]}"] if block[0] == blocks[0] else []) + [f"V{block}"]
    x = Schedule(order)
    for block, before in zip(blocks, [None, *blocks], strict=False):
        for w in (0, 1):
            time = x.begin_turn(w)
            if before is not None:
                for part in "ab":
                    needs = [f"V{before}"]
                    _, end = x.issue(w, f"PV{before}{part}", needs, time, x.GEMM / 2 + 0.35, GEMM_PV)
                    time = x.compute(w, "+O", end, x.ADD, GEMM_THIRD)
                x.producer.release(f"V{before}", end)
            time, s_end = x.issue(w, f"S{block}", [f"K{block}", f"Q{block[1:]}"], time, x.GEMM, GEMM_S)
            x.pass_turn(w, time)
            x.producer.release(f"K{block}", s_end)
            if block[0] == "0":
                x.producer.release(f"Q{block[1:]}", s_end)
            if block[0] == blocks[0] and before is not None:
                s_end = max(s_end, x.compute(w, "store O", time, x.STORE, WRITE))
            x.ready[w] = x.compute(w, f"softmax {block}", s_end, x.SOFTMAX)
    return x


def draw_schedule(axes, schedule: Schedule, title: str, top: float, right: float) -> None:
    left, height = 0.0, 0.62
    rows = {"loads": top, 0: top - 1.2, 1: top - 3.15}

    def visible(items):
        return [item for item in items if item[1] <= right]

    label(axes, left - 6.3, top + 1.15, title, size=10.5, align="left", bold=True)
    lane(axes, rows["loads"], height, left, right, "producer")
    loads = [(time, time + Producer.WIDTH, name, MEMORY) for name, time in schedule.producer.issued.items()]
    bars(axes, rows["loads"], height, visible(loads))
    for w in (0, 1):
        y = rows[w]
        label(axes, left - 6.3, y + 0.05, f"warpgroup {w + 1}", size=8.5, align="left", bold=True)
        lane(axes, y, height, left, right, "GEMMs")
        lane(axes, y - 0.68, height, left, right, "computes")
        bars(axes, y, height, visible(schedule.gemms[w]))
        bars(axes, y - 0.68, height, visible(schedule.cuda[w]))
    for w, time in schedule.passed:
        if time < right - 0.5:
            begin, end = (rows[0], rows[1] + height) if w == 0 else (rows[1] + height, rows[0])
            arrow(axes, (time, begin), (time, end), color=BARRIER, dashed=True, width=1.0)


def forward_schedules(path: Path) -> None:
    figure, axes = canvas(10.4, 6.6)
    right = 35.0
    blocks = ["2", "1", "0", "2'", "1'", "0'"]
    title = "Overlapped: P V of a block is issued together with Q Kᵀ of the next"
    draw_schedule(axes, overlapped(blocks), title, 6.6, right)
    title = "Serial: P V in slices (a, b), each added to O, then Q Kᵀ of the next block"
    draw_schedule(axes, serial(["1", "0", "1'", "0'"]), title, 0.0, right)
    label(
        axes, -6.3, -5.0, "1, 0: key blocks of a tile, the highest first; ' marks the next tile", size=8.5, align="left"
    )
    arrow(axes, (19.2, -5.0), (20.6, -5.0), color=BARRIER, dashed=True, width=1.0)
    label(axes, 20.9, -5.0, "the turn is passed (warp scheduler barrier)", size=8.5, align="left")
    save(figure, axes, (-6.5, right + 0.2, -5.5, 8.2), path)


def backward_roles(path: Path) -> None:
    figure, axes = canvas(10.4, 6.4)
    top = 8.3
    panel(axes, 0.0, 1.9, "global memory", top=top)
    rows = ((7.0, "K, V"), (5.85, "Q, lse"), (4.7, "dO, D"), (1.95, "dQ in fp32"), (0.65, "dK, dV"))
    for y, name in rows:
        box(axes, 0.3, y, 1.3, 0.5, fill=MEMORY)
        label(axes, 0.95, y + 0.25, name)

    panel(axes, 2.6, 2.6, "warpgroup 0", top=top)
    role(
        axes,
        2.8,
        4.1,
        2.2,
        3.55,
        PRODUCER,
        "warp 0: producer",
        "K and V once per tile;\nQ and dO of every step\nthat sees these keys,\nwith their lse and D",
    )
    role(
        axes,
        2.8,
        1.3,
        2.2,
        2.3,
        CONVERTER,
        "warps 1 to 3:\ndq_writer",
        "one thread each,\nparts in rotation:\nTMA reduce-add of dQ",
    )

    panel(axes, 5.9, 3.5, "shared memory", top=top)
    ring(axes, 6.2, 7.0, "K, V", ["K: one stage", "V: one stage"])
    ring(axes, 6.2, 5.85, "Q ring, with lse", ["stage 0", "stage 1", "..."])
    ring(axes, 6.2, 4.7, "dO ring, with D", ["stage 0", "..."])
    ring(
        axes,
        6.2,
        3.25,
        "dS ring",
        ["stage 0", "stage 1", "..."],
        "read by both warpgroups",
        fill=CONSUMER,
    )
    ring(axes, 6.2, 1.95, "dQ", ["warpgroup 1", "warpgroup 2"], "columns of the head, 64 queries", fill=CONSUMER)

    text = "keys {}\nof the tile; registers:\nS and dP (or dQ),\ndK and dV of 64 keys"
    label(axes, 12.3, top - 0.3, "warpgroups 1 and 2", bold=True)
    roles = (
        (5.35, "consumer warpgroup 1", text.format("0 to 63")),
        (1.95, "consumer warpgroup 2", text.format("64 to 127")),
    )
    for y, name, what in roles:
        role(axes, 10.8, y, 3.0, 2.3, CONSUMER, name, what)
        for shift, words, color, inwards in (
            (1.85, "wait full", DATA, True),
            (1.3, "release", BARRIER, False),
            (0.75, "dS, dQ", DATA, False),
        ):
            begin, end = (9.4, 10.8) if inwards else (10.8, 9.4)
            arrow(axes, (begin, y + shift), (end, y + shift), color=color, dashed=color == BARRIER)
            label(axes, 10.1, y + shift + 0.17, words, size=7.5, color=color)
    label(axes, 12.3, 4.82, "above head_dim 128 both have the same\n64 keys: one has dV, the other dK", size=8)

    for y in (7.25, 6.1, 4.95):
        axes.plot([1.6, 2.8], [y, y], color=DATA, linewidth=1.3)
        arrow(axes, (5.0, y), (6.2, y))
        label(axes, 5.55, y + 0.15, "TMA", size=7.5, color=DATA)
        arrow(axes, (6.2, y - 0.16), (5.0, y - 0.16), color=BARRIER, dashed=True)
    arrow(axes, (6.2, 2.25), (5.0, 2.25))
    arrow(axes, (5.0, 2.05), (6.2, 2.05), color=BARRIER, dashed=True)
    arrow(axes, (2.8, 2.2), (1.6, 2.2))
    label(axes, 2.22, 2.37, "add", size=7.5, color=DATA)
    axes.plot([12.3, 12.3], [1.95, 0.9], color=DATA, linewidth=1.3)
    arrow(axes, (12.3, 0.9), (1.6, 0.9))
    label(axes, 7.65, 1.08, "dK and dV of both warpgroups, once per tile, by TMA store", size=7.5, color=DATA)

    legend(
        axes, 0.1, -0.05,
        [(DATA, False, "data", 2.4), (BARRIER, True, "an arrival on an empty barrier: the stage is released", 7.5)],
    )  # fmt: skip
    save(figure, axes, (-0.15, 14.05, -0.35, 8.5), path)


class Steps:
    """Two warpgroups without turns: each is a generator that yields the time at which it issues something next."""

    def __init__(self, write_length: float):
        self.tensor = TensorCores()
        self.gemms, self.cuda, self.writes = ([], []), ([], []), []
        self.published: dict[tuple[int, str], float] = {}  # by warpgroup and what
        self.buffer = [0.0, 0.0]  # when the dQ buffer of a warpgroup is empty
        self.write_length = write_length

    def gemm(self, w: int, name: str, time: float, length: float, fill: str) -> float:
        begin, end = self.tensor.run(time, length)
        self.gemms[w].append((begin, end, name, fill))
        return end

    def compute(self, w: int, name: str, begin: float, length: float, fill: str = CUDA) -> float:
        self.cuda[w].append((begin, begin + length, name, fill))
        return begin + length

    def store_dq(self, w: int, name: str, time: float, length: float) -> float:
        """Registers to shared memory, once that is empty; a writer then adds it to global memory."""
        end = self.compute(w, name, max(time, self.buffer[w]), length, WRITE)
        self.buffer[w] = end + self.write_length
        self.writes.append((w, end, end + self.write_length, name))
        return end

    def run(self, *warpgroups: Iterator[float]) -> None:
        times = {warpgroup: next(warpgroup) for warpgroup in warpgroups}
        while times:
            earliest = min(times, key=times.__getitem__)
            try:
                times[earliest] = next(earliest)
            except StopIteration:
                del times[earliest]


def consumer(x: Steps, w: int, steps: int, start: float) -> Iterator[float]:
    """bwd/consumer.cuh: a step from dS of one step to P of the next, dQ one step late."""
    length = 1.0
    time = start
    yield time
    x.gemm(w, "S0", time, length, GEMM_S)
    dp_end = x.gemm(w, "dP0", time, length, GEMM_S)
    time = x.compute(w, "P0", dp_end - length, 1.6)
    yield time
    x.gemm(w, "dV0", time, length, GEMM_PV)
    for j in range(steps):
        time = x.compute(w, f"dS{j}", max(time, dp_end), 1.6)
        yield time
        end = x.gemm(w, f"S{j + 1}", time, length, GEMM_S)
        x.published[w, f"dS{j}"] = time + 0.3
        if j > 0:
            while (1 - w, f"dS{j - 1}") not in x.published:
                time += 0.1
                yield time
            time = max(time, x.published[1 - w, f"dS{j - 1}"])
            yield time
            end = x.gemm(w, f"dQ{j - 1}", time, length, GEMM_THIRD)
        x.gemm(w, f"dK{j}", time, length, GEMM_PV)
        time = end
        if j > 0:
            time = x.store_dq(w, f"dQ{j - 1}", time, 1.1)
        yield time
        dp_end = x.gemm(w, f"dP{j + 1}", time, length, GEMM_S)
        time = x.compute(w, f"P{j + 1}", time, 1.6)
        yield time
        x.gemm(w, f"dV{j + 1}", time, length, GEMM_PV)


def consumer_dv(x: Steps, steps: int) -> Iterator[float]:
    """bwd/consumer_split.cuh, warpgroup 0."""
    time = 0.0
    for j in range(steps):
        yield time
        end = x.gemm(0, f"S{j}", time, 2.0, GEMM_S)
        if j > 1:
            while (1, f"dS{j - 2}") not in x.published:
                time += 0.1
                yield time
            for part in "ab":
                yield time
                end = x.gemm(0, f"dQ{j - 2}{part}", max(time, x.published[1, f"dS{j - 2}"]), 1.0, GEMM_THIRD)
                time = end = x.store_dq(0, f"dQ{part}", end, 1.0)
        time = x.compute(0, f"P{j}", end, 1.8)
        x.published[0, f"P{j}"] = time
        yield time
        x.gemm(0, f"dV{j}", time, 2.0, GEMM_PV)


def consumer_dk(x: Steps, steps: int) -> Iterator[float]:
    """bwd/consumer_split.cuh, warpgroup 1."""
    time = 0.0
    yield time
    dp_end = x.gemm(1, "dP0", time, 2.0, GEMM_S)
    for j in range(steps):
        time = dp_end
        while (0, f"P{j}") not in x.published:
            time += 0.1
            yield time
        time = x.compute(1, f"dS{j}", max(time, x.published[0, f"P{j}"]), 1.8)
        x.published[1, f"dS{j}"] = time
        yield time
        x.gemm(1, f"dK{j}", time, 2.0, GEMM_PV)
        end = x.gemm(1, f"dQ{j}a", time, 1.0, GEMM_THIRD)
        time = x.store_dq(1, "dQa", end, 1.0)
        yield time
        dp_end = x.gemm(1, f"dP{j + 1}", time, 2.0, GEMM_S)
        end = x.gemm(1, f"dQ{j}b", time, 1.0, GEMM_THIRD)
        dp_end = time = x.store_dq(1, "dQb", end, 1.0)


def draw_steps(axes, x: Steps, title: str, names: tuple[str, str], top: float, window: tuple[float, float]) -> None:
    begin, end = window
    left, right, height = 0.0, end - begin, 0.62

    def visible(items):
        return [(b - begin, e - begin, text, fill) for b, e, text, fill in items if b >= begin and e <= end]

    label(axes, left - 5.6, top + 1.2, title, size=10.5, align="left", bold=True)
    for w in (0, 1):
        y = top - 1.95 * w
        label(axes, left - 5.6, y, names[w], size=8.5, align="left", bold=True)
        lane(axes, y, height, left, right, "GEMMs")
        lane(axes, y - 0.68, height, left, right, "computes")
        bars(axes, y, height, visible(x.gemms[w]))
        bars(axes, y - 0.68, height, visible(x.cuda[w]))


def backward_schedules(path: Path) -> None:
    figure, axes = canvas(10.4, 6.9)
    right = 29.0
    x = Steps(2.0)
    x.run(consumer(x, 0, 6, 0.0), consumer(x, 1, 6, 3.0))
    begin = 14.0
    title = "head_dim up to 128: each warpgroup has 64 of the 128 keys"
    draw_steps(axes, x, title, ("warpgroup 1", "warpgroup 2"), 6.6, (begin, begin + right))
    y = 3.0
    lane(axes, y, 0.62, 0.0, right, "dq_writers")
    label(axes, -5.6, y + 0.31, "warpgroup 0", size=8.5, align="left", bold=True)
    writes = [(b - begin, e - begin, f"add {name}", MEMORY) for _, b, e, name in x.writes]
    bars(axes, y, 0.62, [item for item in writes if item[0] >= 0 and item[1] <= right])

    x = Steps(1.0)
    x.run(consumer_dv(x, 7), consumer_dk(x, 7))
    top = -0.1
    title = "head_dim above 128: one warpgroup has dV of the 64 keys, the other dK"
    draw_steps(axes, x, title, ("warpgroup 1\n(dV)", "warpgroup 2\n(dK)"), top, (begin, begin + right))
    for (w, name), time in x.published.items():
        if 0 < time - begin < right:
            ends = (top - 0.68, top - 1.33) if w == 0 else (top - 1.33, top - 0.68)
            arrow(axes, (time - begin, ends[0]), (time - begin, ends[1]), color=BARRIER, dashed=True, width=1.0)
            label(axes, time - begin + 0.15, top - 1.0, name, size=8, color=BARRIER, align="left")

    meanings = (
        (-5.6, GEMM_S, "S, dP"),
        (-2.7, GEMM_PV, "dV, dK"),
        (0.4, GEMM_THIRD, "dQ (a, b: slices)"),
        (5.9, CUDA, "P, dS"),
        (8.8, WRITE, "dQ to shared memory"),
        (15.4, MEMORY, "reduce-add to global memory"),
    )
    for left, fill, text in meanings:
        axes.add_patch(Rectangle((left, -3.9), 0.6, 0.4, facecolor=fill, edgecolor=TEXT, linewidth=0.8))
        label(axes, left + 0.8, -3.7, text, size=8.5, align="left")
    arrow(axes, (23.8, -3.7), (24.8, -3.7), color=BARRIER, dashed=True, width=1.0)
    label(axes, 25.0, -3.7, "P or dS is published", size=8.5, align="left")
    save(figure, axes, (-5.8, 30.2, -4.3, 8.2), path)


FIGURES = {
    "forward-roles": forward_roles,
    "forward-schedules": forward_schedules,
    "backward-roles": backward_roles,
    "backward-schedules": backward_schedules,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).resolve().parent)
    folder = parser.parse_args().folder
    for figure_name, draw in FIGURES.items():
        draw(folder / f"{figure_name}.svg")
