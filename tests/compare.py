"""The pass rule: the largest error is at most twice that of same-dtype PyTorch, plus the rounding of the reference."""

from __future__ import annotations

import torch
from reference import Results


def check_close(
    name: str,
    got: torch.Tensor,
    truth: torch.Tensor,
    baseline: torch.Tensor,
    *,
    rms: bool = False,
    factor: float = 2.0,
) -> None:
    """Asserts that got is as near to the float64 truth as the rule asks, and that NaN and infinities agree.

    rms=True asks in addition that the root-mean-square error is at most factor times the baseline's.
    """
    assert got.shape == truth.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(truth.shape)}"
    if got.numel() == 0:
        return
    dtype = got.dtype
    got, truth, baseline = (x.detach().double() for x in (got, truth, baseline))
    for kind, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        differs = test(got) != test(truth)
        if differs.any():
            index = _index(differs.to(torch.uint8).argmax(), got.shape)
            raise AssertionError(
                f"{name}: {kind} at {int(differs.sum())} unexpected or missing places, first at {index}: "
                f"got {got[index].item()}, expected {truth[index].item()}"
            )

    finite = truth.isfinite()
    error = torch.where(finite, got - truth, 0.0).abs()
    baseline_error = torch.where(finite & baseline.isfinite(), baseline - truth, 0.0).abs()
    # What rounding the truth to the dtype of the result costs, at its largest value. In float32 and float64, whose
    # baseline sums in the dtype of the result, the order of the sums costs more of them; in float64, where
    # the baseline is the truth itself and its own error counts as none, the most.
    roundings = {2: 1, 4: 16, 8: 32}[dtype.itemsize]
    rounding = torch.where(finite, truth, 0.0).abs().max().item() * torch.finfo(dtype).eps * roundings
    allowed = factor * baseline_error.max().item() + rounding
    worst = error.max().item()
    if worst > allowed:
        index = _index(error.argmax(), got.shape)
        raise AssertionError(
            f"{name}: error {worst:.3e} at {index} (got {got[index].item():.8g}, expected {truth[index].item():.8g}, "
            f"baseline {baseline[index].item():.8g}) is above {allowed:.3e} = "
            f"{factor:g} x baseline error {baseline_error.max().item():.3e} + rounding {rounding:.3e}"
        )
    if rms:
        rms_error, rms_baseline = (x.square().mean().sqrt().item() for x in (error, baseline_error))
        if rms_error > factor * rms_baseline + rounding:
            raise AssertionError(
                f"{name}: RMS error {rms_error:.3e} is above {factor:g} x baseline's {rms_baseline:.3e}"
            )


def check_results(got: Results, truth: Results, baseline: Results, **options) -> None:
    """check_close for out, lse, and the gradients that got has."""
    for name, value in got.items():
        check_close(name, value, getattr(truth, name), getattr(baseline, name), **options)


def _index(flat: torch.Tensor, shape: torch.Size) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(flat, shape))
