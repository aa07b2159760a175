"""The one timer: GPU time of a call by CUDA events, with a cold L2, candidates taking turns."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

L2_CLEAR_MIB = 256  # several times the L2 of any GPU so far
HEAD_START_CLEARS = 16  # about 1 ms of GPU work; more for a call that takes the host longer than the GPU
WARM_UP_LAUNCHES = 4
MIN_LAUNCHES, MAX_LAUNCHES = 5, 50
DEFAULT_BUDGET_MS = 25.0
DEFAULT_ROUNDS, MIN_ROUNDS = 7, 5


@dataclass(frozen=True)
class Timing:
    """Over the rounds, in milliseconds."""

    ms: float  # median
    ms_p20: float
    ms_p80: float


class LaunchTimer:
    """Times a call on the current stream: median of several launches, each after a clear of the L2, not timed."""

    def __init__(self, budget_ms: float = DEFAULT_BUDGET_MS):
        self.budget_ms = budget_ms
        self.l2_buffer = torch.empty(L2_CLEAR_MIB * 2**20, dtype=torch.uint8, device="cuda")
        self.clear_ms = self.measure(lambda: self.l2_buffer.zero_(), MIN_LAUNCHES)

    def warm_up(self, call: Callable[[], object]) -> tuple[int, int]:
        """Runs the call a few times; returns how many launches of it fit the budget of one round, and the head start
        that they need.
        """
        call()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(WARM_UP_LAUNCHES):
            self.l2_buffer.zero_()
            call()
        host_ms = (time.perf_counter() - began) * 1e3 / WARM_UP_LAUNCHES
        ms = self.measure(call, WARM_UP_LAUNCHES, self.head_start(host_ms, 0, WARM_UP_LAUNCHES))
        launches = min(max(round(self.budget_ms / (ms + self.clear_ms)), MIN_LAUNCHES), MAX_LAUNCHES)
        return launches, self.head_start(host_ms, ms + self.clear_ms, launches)

    def head_start(self, host_ms: float, gpu_ms: float, launches: int) -> int:
        """How many clears keep the GPU busy until the host needs no lead, if it takes host_ms for what takes gpu_ms."""
        lag_ms = 2 * launches * max(0.0, host_ms - gpu_ms)
        return HEAD_START_CLEARS + math.ceil(lag_ms / self.clear_ms)

    def measure(self, call: Callable[[], object], launches: int, head_start: int = HEAD_START_CLEARS) -> float:
        """Median GPU time of one call in milliseconds, after as many launches that are not timed.

        Those bring the chip to the temperature and the clock of this call: the call before it may have drawn far more
        power, or less.
        """
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(2 * launches)]
        # While the GPU is busy with these the host queues launches ahead: else the wait for a launch would be timed.
        for _ in range(head_start):
            self.l2_buffer.zero_()
        for start, end in events:
            self.l2_buffer.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return quantile([start.elapsed_time(end) for start, end in events[launches:]], 0.5)


def time_in_turns(calls: dict[str, Callable[[], object]], rounds: int, timer: LaunchTimer) -> dict[str, Timing]:
    """Times every call once per round, so that a drift of the clocks falls on all alike.

    The order is drawn anew for each round: in a fixed or rotating one a call would always follow the same other.
    """
    plans = {name: timer.warm_up(call) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    rng = random.Random(0)
    for _ in range(rounds):
        for name in rng.sample(list(calls), len(calls)):
            samples[name].append(timer.measure(calls[name], *plans[name]))
    return {name: Timing(*(quantile(ms, q) for q in (0.5, 0.2, 0.8))) for name, ms in samples.items()}


def quantile(values: list[float], q: float) -> float:
    return torch.tensor(values, dtype=torch.float64).quantile(q).item()


def method(rounds: int, budget_ms: float) -> str:
    """How the numbers came about, in one sentence."""
    return (
        f"CUDA events around each launch, {3 * WARM_UP_LAUNCHES + 1} launches to warm up, providers in turns over "
        f"{rounds} rounds in random order, in a round the median of {MIN_LAUNCHES} to {MAX_LAUNCHES} launches (about "
        f"{budget_ms:g} ms) after as many that are not timed, over the rounds median, p20 and p80; L2 cleared before "
        f"each launch by zeroing {L2_CLEAR_MIB} MiB, not timed"
    )


def measure_ceilings(timer: LaunchTimer, rounds: int) -> dict[str, float | None]:
    """What the chip reaches today: matrix products of 8192^3, a device-to-device copy counting both ways.

    The FP8 product, e4m3 with one scale per tensor, adds in the tensor cores' short sums.
    """
    size, copy_bytes = 8192, 2**31
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = torch.empty_like(a)
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    source, target = (torch.empty(copy_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    calls = {
        "gemm": lambda: torch.mm(a, b, out=product),
        "fp8_gemm": lambda: torch._scaled_mm(
            a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        ),
        "copy": lambda: target.copy_(source),
    }
    timings = time_in_turns(calls, rounds, timer)
    return {
        "bf16_gemm_tflops": round(2 * size**3 / timings["gemm"].ms / 1e9, 1),
        "fp8_gemm_tflops": round(2 * size**3 / timings["fp8_gemm"].ms / 1e9, 1),
        "copy_gbps": round(2 * copy_bytes / timings["copy"].ms / 1e6, 1),
    }
