"""The demo, on the CPU: a few steps of a tiny model lower the loss."""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))

from examples import train_gpt


def test_loss_falls(capsys):
    config = train_gpt.Config(layers=1, heads=2, head_dim=16, seqlen=48, batch=4, steps=30, learning_rate=1e-2)
    losses = train_gpt.train(config, "cpu")
    printed = capsys.readouterr().out
    assert len(losses) == 30
    assert losses[0] > 5
    assert sum(losses[-5:]) / 5 < 4.2
    assert "step   30/30" in printed
    assert "tokens/s" in printed


def test_corpus_is_real_text_and_always_the_same():
    text = train_gpt.corpus()
    assert len(text) > 10**6
    assert torch.equal(text, train_gpt.corpus())
    assert b"import" in bytes(text[:10000].tolist())
