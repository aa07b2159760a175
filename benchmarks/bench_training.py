"""Tokens per second of a training step, forward and backward, through one attention layer with its projections.

From the repository root, on a GPU:

python -m benchmarks.bench_training

The layers have the shapes of GPT-2 medium's and Llama 3 8B's. All of it runs in eager PyTorch; only the attention
between the projections differs.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import nn

from benchmarks import cases, report, runner, timing
from benchmarks.providers import Forward

PROVIDERS = ("fa3", "torch-sdpa", "torch-cudnn")
ROUNDS = 5
DTYPE = torch.bfloat16
TOLERANCE = cases.tolerance("bf16")  # of whole tensors; rounding costs them less than eps


@dataclass(frozen=True)
class Layer:
    layer: str
    hidden: int
    heads: int
    heads_kv: int
    head_dim: int
    rotary: bool
    bias: bool


@dataclass(frozen=True)
class Case:
    layer: Layer
    seqlen: int
    batch: int

    def as_row(self) -> dict:
        fields = asdict(self.layer)
        shape = {name: fields[name] for name in ("hidden", "heads", "heads_kv", "head_dim")}
        row = {"layer": self.layer.layer, "pass": "fwd+bwd", "dtype": "bf16", "causal": True}
        return {**row, "seqlen": self.seqlen, "batch": self.batch, **shape}


GPT2_MEDIUM = Layer("gpt2-medium", 1024, 16, 16, 64, rotary=False, bias=True)
LLAMA3_8B = Layer("llama3-8b", 4096, 32, 8, 128, rotary=True, bias=False)
CASES = [Case(GPT2_MEDIUM, 1024, 16), Case(GPT2_MEDIUM, 8192, 2), Case(LLAMA3_8B, 8192, 4), Case(LLAMA3_8B, 32768, 1)]


class AttentionLayer(nn.Module):
    """Projection to q, k and v, rotary embedding, causal attention, projection back."""

    def __init__(self, layer: Layer, seqlen: int):
        super().__init__()
        self.layer = layer
        width = layer.heads * layer.head_dim
        self.widths = [width, layer.heads_kv * layer.head_dim, layer.heads_kv * layer.head_dim]
        self.qkv = nn.Linear(layer.hidden, sum(self.widths), bias=layer.bias)
        self.out = nn.Linear(width, layer.hidden, bias=layer.bias)
        frequencies = 500_000.0 ** -(torch.arange(0, layer.head_dim, 2) / layer.head_dim)
        angles = torch.outer(torch.arange(seqlen), frequencies)[:, None]  # (seqlen, 1, head_dim / 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: torch.Tensor, attention: Forward) -> torch.Tensor:
        parts = self.qkv(x).split(self.widths, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.layer.head_dim)) for part in parts)
        if self.layer.rotary:
            q, k = self.rotate(q), self.rotate(k)
        return self.out(attention(q, k, v, True).flatten(2))

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * self.cos - b * self.sin, a * self.sin + b * self.cos), dim=-1)


class ExactAttention(torch.autograd.Function):
    """Causal attention and its gradients in float64, rounded."""

    @staticmethod
    def forward(ctx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        group = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
        return cases.reference(q, k, v, causal=True).to(q.dtype)

    @staticmethod
    def backward(ctx, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = ctx.saved_tensors
        group = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
        dq, *dkv = cases.reference_gradients(q, k, v, dout, causal=True)
        return dq.to(q.dtype), *(x.unflatten(2, (-1, group)).sum(dim=3).to(q.dtype) for x in dkv)


def exact_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return ExactAttention.apply(q, k, v)


def training_step(
    model: AttentionLayer, attention: Forward, x: torch.Tensor, dout: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The output, then the gradients of x and of the parameters."""
    out = model(x, attention)
    return out.detach(), *torch.autograd.grad(out, (x, *model.parameters()), dout)


def worst_error(results: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> float:
    """Largest relative error of a tensor, ||x - expected|| / ||expected||."""
    pairs = [(x.float(), truth.float()) for x, truth in zip(results, expected, strict=True)]
    return torch.stack([(x - truth).norm() / truth.norm() for x, truth in pairs]).max().item()


def checked_steps(case: Case, attentions: dict[str, Forward], device: str = "cuda"):
    """checked_calls of a step per provider, all on the same weights and inputs."""
    torch.manual_seed(0)
    model = AttentionLayer(case.layer, case.seqlen).to(device, DTYPE)
    shape = (case.batch, case.seqlen, case.layer.hidden)
    x, dout = (torch.randn(shape, device=device, dtype=DTYPE) for _ in range(2))
    x.requires_grad_()
    expected = training_step(model, exact_attention, x, dout)
    calls = {name: partial(training_step, model, attention, x, dout) for name, attention in attentions.items()}
    return runner.checked_calls(calls, partial(worst_error, expected=expected), TOLERANCE)


def result_row(case: Case, timings: dict[str, timing.Timing]) -> dict:
    tokens = case.batch * case.seqlen
    return {
        **case.as_row(),
        "ms": {name: round(timing.ms, 5) for name, timing in timings.items()},
        "tokens_per_s": {name: round(tokens / timing.ms * 1e3) for name, timing in timings.items()},
        **report.spread(timings),
    }


def table_row(row: dict, providers: list[str]) -> str:
    speeds = row["tokens_per_s"]
    columns = "".join(f"{speeds.get(name, '-'):>{report.column_width(name)}}" for name in providers)
    share = report.ratio(row)
    return (
        f"{row['layer']:11} {row['seqlen']:6} {row['batch']:5} |{columns} | {'-' if share is None else f'{share:.3f}'}"
    )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = runner.argument_parser(__doc__, "training", PROVIDERS, ROUNDS)
    layers = [GPT2_MEDIUM.layer, LLAMA3_8B.layer]
    parser.add_argument("--layers", nargs="+", choices=layers, default=layers)
    return runner.parse(parser, argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    results, providers, ours_failed = runner.start(args, "the same step with attention in float64")
    attentions = {provider.name: provider.forward for provider in providers}
    timer = timing.LaunchTimer(args.budget_ms)
    results["ceilings"] = timing.measure_ceilings(timer, args.rounds)
    columns = "".join(f"{name:>{report.column_width(name)}}" for name in attentions)
    print(f"ceilings: {results['ceilings']}\n\ntokens/s\nlayer       seqlen batch |{columns} | fa3/best peer")

    problems = runner.Problems()
    for case in CASES:
        if case.layer.layer in args.layers:
            calls, wrong = checked_steps(case, attentions)
            row = result_row(case, timing.time_in_turns(calls, args.rounds, timer))
            runner.add_row(args, results, row)
            print(table_row(row, list(attentions)), flush=True)
            problems.report(wrong)
    return runner.finish(args, results, ours_failed or problems.are_ours())


if __name__ == "__main__":
    sys.exit(main())
