"""TFLOP/s of the attention backward on the papers' grid, alone and with its forward, fa3 beside its peers.

From the repository root, on a GPU:

python -m benchmarks.bench_backward

The backward alone is torch.autograd.grad of an output that was computed before: everything that autograd runs for dq,
dk and dv, once out and its gradient are there.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks import runner

PROVIDERS = ("fa3", "fa3-deterministic", "torch-cudnn", "torch-fa2", "flash-attn-4")
PASSES = {"bwd": ["bwd"], "fwd+bwd": ["fwd+bwd"], "both": ["bwd", "fwd+bwd"]}
ROUNDS = 5


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = runner.grid_parser(__doc__, "backward", PROVIDERS, ROUNDS)
    parser.add_argument("--pass", dest="passes", choices=PASSES, default="both")
    return runner.parse(parser, argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    return runner.run_grid(args, PASSES[args.passes])


if __name__ == "__main__":
    sys.exit(main())
