"""TFLOP/s of the attention forward on the papers' grid, fa3 beside its peers. From the repository root, on a GPU:

python -m benchmarks.bench_forward
"""

from __future__ import annotations

import argparse
import sys

from benchmarks import runner, timing

PROVIDERS = ("fa3", "torch-cudnn", "torch-fa2", "fa3-fwd", "flash-attn-4")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    return runner.parse(runner.grid_parser(__doc__, "forward", PROVIDERS, timing.DEFAULT_ROUNDS), argv)


def main(argv: list[str] | None = None) -> int:
    return runner.run_grid(parse_arguments(argv), ["fwd"])


if __name__ == "__main__":
    sys.exit(main())
