"""Fixtures, the gate of GPU tests, and the seed of the randomized ones."""

from __future__ import annotations

import os
import random

import pytest
import torch

import fa3

# The tensors are small. With more threads, OpenMP's busy waiting takes ten times as long where other work runs too.
torch.set_num_threads(1)

SEED = int(os.environ["FA3_SEED"]) if "FA3_SEED" in os.environ else random.SystemRandom().randrange(2**32)


def pytest_report_header() -> list[str]:
    reason = fa3.unavailable_reason()
    kernels = "available" if reason is None else f"not available ({reason})"
    return [f"FA3_SEED={SEED} repeats the randomized tests", f"Hopper kernels: {kernels}"]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked `gpu` need a Hopper GPU and the compiled library; FA3_REQUIRE_GPU=1 forbids skipping them."""
    if item.get_closest_marker("gpu") is None:
        return
    reason = fa3.unavailable_reason()
    if reason is None:
        return
    if os.environ.get("FA3_REQUIRE_GPU") == "1":
        pytest.fail(f"FA3_REQUIRE_GPU=1, but {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture
def seed() -> int:
    """The seed of this run, for tests that draw their cases; a failing test shows it."""
    print(f"FA3_SEED={SEED}")
    return SEED


@pytest.fixture(autouse=True)
def _fixed_values() -> None:
    """The same random values in every run, whatever the order of tests."""
    torch.manual_seed(0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device that a portable test runs on."""
    return torch.device(request.param)


@pytest.fixture
def gpu() -> torch.device:
    """For tests marked `gpu`: the current CUDA device."""
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def busy_stream(gpu):
    """Other work that runs beside the test: products of matrices of a few milliseconds each."""
    stream, x = torch.cuda.Stream(), torch.randn(4096, 4096, device=gpu).bfloat16()
    stream.wait_stream(torch.cuda.current_stream())

    def refill() -> None:
        with torch.cuda.stream(stream):
            for _ in range(4):
                x @ x

    yield refill
    stream.synchronize()
