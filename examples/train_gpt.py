"""Trains a small GPT, byte by byte, on the source text of Python's own standard library, with fa3 as its attention.

python examples/train_gpt.py        (a Hopper GPU where fa3's kernels are built, else the CPU, about a minute)
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import fa3

VOCABULARY = 256  # bytes
CORPUS_BYTES = 4 * 2**20


@dataclass
class Config:
    layers: int
    heads: int
    head_dim: int
    seqlen: int
    batch: int
    steps: int
    learning_rate: float


GPU_CONFIG = Config(layers=6, heads=8, head_dim=128, seqlen=1024, batch=16, steps=300, learning_rate=1e-3)
CPU_CONFIG = Config(layers=3, heads=4, head_dim=32, seqlen=256, batch=8, steps=300, learning_rate=3e-3)


class Block(nn.Module):
    """Pre-norm attention, then a pre-norm MLP."""

    def __init__(self, config: Config):
        super().__init__()
        dim = config.heads * config.head_dim
        self.head_dim = config.head_dim
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim, bias=False), nn.GELU(), nn.Linear(4 * dim, dim, bias=False))

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        q, k, v = self.project(x, rotary)
        x = x + self.proj(fa3.flash_attn_func(q, k, v, causal=True).flatten(2))
        return x + self.mlp(self.mlp_norm(x))

    def project(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """q, k, v of shape (batch, seqlen, heads, head_dim), positions rotated into q and k."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, -1, self.head_dim)).unbind(2)
        return rotate(q, *rotary), rotate(k, *rotary), v


class GPT(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        dim = config.heads * config.head_dim
        self.embedding = nn.Embedding(VOCABULARY, dim)  # also the output layer
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(dim)
        angles = torch.outer(torch.arange(config.seqlen), 10000 ** -torch.linspace(0, 1, config.head_dim // 2))
        self.register_buffer("cos", angles.cos()[:, None], persistent=False)  # (seqlen, 1, head_dim / 2)
        self.register_buffer("sin", angles.sin()[:, None], persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rotary(tokens.shape[1]))
        return self.norm(x) @ self.embedding.weight.T

    def rotary(self, seqlen: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cos[:seqlen], self.sin[:seqlen]

    def explain(self, tokens: torch.Tensor) -> str:
        """Which kernels the attention of the first block takes."""
        q, k, v = self.blocks[0].project(self.embedding(tokens), self.rotary(tokens.shape[1]))
        return str(fa3.explain(q, k, v, causal=True))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


def corpus() -> torch.Tensor:
    """The first bytes of the standard library's top-level modules, in alphabetical order."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = bytearray(b"".join(module.read_bytes() for module in modules)[:CORPUS_BYTES])
    return torch.frombuffer(text, dtype=torch.uint8)


def train(config: Config, device: str, log_every: int = 10) -> list[float]:
    """Trains from scratch, prints as it goes, returns the loss of every step."""
    torch.manual_seed(0)
    text = corpus().to(device)
    model = GPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.learning_rate, config.steps, pct_start=0.1)
    mixed_precision = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
    window = torch.arange(config.seqlen + 1, device=device)
    losses: list[torch.Tensor] = []
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters / 1e6:.1f} M parameters, {len(text) / 1e6:.1f} MB of text, {config}, device {device}")
    shown, started = 0, time.perf_counter()
    for step in range(1, config.steps + 1):
        starts = torch.randint(len(text) - config.seqlen, (config.batch, 1), device=device)
        tokens = text[starts + window].long()
        with mixed_precision:
            if step == 1:
                print(model.explain(tokens[:, :-1]))
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if step == 1 or step % log_every == 0:
            mean_loss = torch.stack(losses[shown:]).mean().item()  # waits for the GPU
            tokens_per_s = (step - shown) * config.batch * config.seqlen / (time.perf_counter() - started)
            print(f"step {step:4}/{config.steps}  loss {mean_loss:.3f}  {tokens_per_s:10,.0f} tokens/s", flush=True)
            shown, started = step, time.perf_counter()
    return torch.stack(losses).tolist()


def main() -> None:
    device = "cuda" if fa3.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default=device, help=f"here by default {device}")
    for name, kind in Config.__annotations__.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int if kind == "int" else float)
    args = vars(parser.parse_args())
    device = args.pop("device")
    if device == "cpu":
        print(f"on the CPU; fa3's Hopper kernels: {fa3.unavailable_reason() or 'available'}")
    config = GPU_CONFIG if device == "cuda" else CPU_CONFIG
    losses = train(Config(**{name: value or getattr(config, name) for name, value in args.items()}), device)
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")


if __name__ == "__main__":
    main()
