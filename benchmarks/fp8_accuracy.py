"""The accuracy of FP8 attention, in the setting of the FlashAttention-3 paper. From the repository root, on a GPU:

python -m benchmarks.fp8_accuracy

Table 3 of arXiv:2407.08608: q, k and v of N(0, 1), where one entry in a thousand has an N(0, 100) added, to simulate
outliers; no mask; the root-mean-square error of the output against float64. The inputs are rounded to fp16 first, and
float64 takes the rounded ones.

fp16-baseline          two matrix products and a softmax in PyTorch, all in fp16
fa2-fp16               torch's FlashAttention-2
fa3-fp16               fa3.flash_attn_func
fp8-per-tensor         one scale for each of q, k and v; the rest as fa3-fp8: float32 softmax, P to e4m3 after a factor
                       of 256, products summed in float32. In plain PyTorch
fa3-fp8                fa3.flash_attn_fp8_func: a scale for each 128 rows, incoherent processing
fa3-fp8-no-block       the same with one scale per batch and head
fa3-fp8-no-incoherent  the same without incoherent processing
fa3-fp8-simulated      fa3-fp8 in the simulation of its arithmetic in float32: the kernel should have no larger error
simulation             fa3-fp8 against that simulation, not against float64: what the order
                       and the precision of the tensor cores' sums cost. 0 where the simulation itself is what runs

`--device cpu --seqlen 512` runs it small, with fa3's plain PyTorch in the place of the kernels; nothing is written
then, unless --json names a file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch

import fa3
from benchmarks import cases, report, runner
from benchmarks.providers import LOADERS

BATCH, SEQLEN, HEADS, HEAD_DIM = 2, 8448, 8, 128
OUTLIER_PROBABILITY, OUTLIER_DEVIATION = 1e-3, 10.0
PAPER_RMSE = {
    "fp16-baseline": 3.2e-4,
    "fa2-fp16": 1.9e-4,
    "fa3-fp16": 1.9e-4,
    "fp8-per-tensor": 2.4e-2,
    "fa3-fp8": 9.1e-3,
    "fa3-fp8-no-block": 9.3e-3,
    "fa3-fp8-no-incoherent": 2.4e-2,
    "fa3-fp8-simulated": None,
    "simulation": None,
}

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_inputs(seqlen: int, device: str, seed: int) -> Tensors:
    """q, k and v (BATCH, seqlen, HEADS, HEAD_DIM) in fp16. Drawn on the CPU: the same values on every device."""
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, seqlen, HEADS, HEAD_DIM)

    def draw() -> torch.Tensor:
        is_outlier = torch.rand(shape, generator=generator) < OUTLIER_PROBABILITY
        outliers = OUTLIER_DEVIATION * torch.randn(shape, generator=generator)
        return (torch.randn(shape, generator=generator) + outliers * is_outlier).half().to(device)

    return draw(), draw(), draw()


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention at the dtype of its arguments, one batch at a time."""
    out = torch.empty_like(q)
    for i in range(q.shape[0]):
        heads_first = (x[i].transpose(0, 1) for x in (q, k, v))
        out[i] = _naive_heads(*heads_first).transpose(0, 1)
    return out


def _naive_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def fp8_per_tensor(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """FP8 with one scale per tensor, in the arithmetic of the kernel."""
    tensors, scales = [], {}
    for name, x in (("q", q), ("k", k), ("v", v)):
        scale = x.abs().amax().float() / torch.finfo(torch.float8_e4m3fn).max
        tensors.append((x.float() / scale).to(torch.float8_e4m3fn))
        scales[f"{name}_descale"] = scale.expand(BATCH, HEADS)
    with fa3.backend("portable"):
        return fa3.flash_attn_func(*tensors, **scales, out_dtype=torch.float16)


def simulation(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with fa3.backend("portable"):
        return fa3.flash_attn_fp8_func(q, k, v)


ATTENTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "fp16-baseline": naive,
    "fa2-fp16": lambda q, k, v: LOADERS["torch-fa2"]().forward(q, k, v, False),
    "fa3-fp16": fa3.flash_attn_func,
    "fp8-per-tensor": fp8_per_tensor,
    "fa3-fp8": fa3.flash_attn_fp8_func,
    "fa3-fp8-no-block": lambda q, k, v: fa3.flash_attn_fp8_func(q, k, v, block_size=None),
    "fa3-fp8-no-incoherent": lambda q, k, v: fa3.flash_attn_fp8_func(q, k, v, incoherent=False),
}


def rmse(x: torch.Tensor, expected: torch.Tensor) -> float:
    return (x.double() - expected.double()).square().mean().sqrt().item()


@torch.no_grad()
def measure(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[dict]:
    """The rows of the results."""
    truth = cases.reference(q, k, v, causal=False)
    outputs = {name: attention(q, k, v) for name, attention in ATTENTIONS.items()}
    errors = {name: rmse(out, truth) for name, out in outputs.items()}
    simulated = simulation(q, k, v)
    errors["fa3-fp8-simulated"] = rmse(simulated, truth)
    errors["simulation"] = rmse(outputs["fa3-fp8"], simulated)
    return [{"row": name, "rmse": errors[name], "paper": paper} for name, paper in PAPER_RMSE.items()]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seqlen", type=int, default=SEQLEN)
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    runner.add_results_arguments(parser, "fp8_accuracy")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    results = {
        "commit": args.commit or report.measured_commit(),
        **report.environment(args.device),
        "method": (
            f"RMSE against float64; batch {BATCH}, seqlen {args.seqlen}, {HEADS} heads, head_dim {HEAD_DIM}, no mask; "
            f"N(0, 1) plus, with probability {OUTLIER_PROBABILITY:g}, N(0, {OUTLIER_DEVIATION**2:g}); seed {args.seed}"
        ),
        "ceilings": {},
        "providers": {"fa3": fa3.__version__, "torch-fa2": torch.__version__},
        "rows": measure(*make_inputs(args.seqlen, args.device, args.seed)),
    }
    print(f"{results['gpu']}, torch {results['torch']}, commit {results['commit']}, {results['date']}")
    print(f"{results['method']}\n\n{'':22} {'RMSE':>9} {'paper':>9}")
    for row in results["rows"]:
        paper = "-" if row["paper"] is None else f"{row['paper']:.1e}"
        print(f"{row['row']:22} {row['rmse']:9.2e} {paper:>9}")
    if args.device == "cpu" and args.json is None:
        return 0
    return runner.finish(args, results, ours_failed=False)


if __name__ == "__main__":
    sys.exit(main())
