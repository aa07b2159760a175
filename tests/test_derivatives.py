"""Derivatives that do not exist are refused, never dropped: forward mode, second derivatives, FP8."""

from __future__ import annotations

import functools

import pytest
import torch
from cases import FULL, Case
from fp8_helpers import fp8_arguments
from torch.autograd import forward_ad

import fa3
from fa3 import ops

REFUSAL = "forward-mode derivatives .* are not implemented"


def _functions() -> dict:
    """Everything public that takes tensors, as functions of one float32 tensor q (1, 20, 2, 16)."""
    k, v = Case(batch=1, seqlen_q=20, seqlen_k=20, head_dim=16).inputs(torch.float32, "cpu")[1:]
    x, ones = fa3.quantize_fp8(k, k, v), torch.ones(20, 8)

    def attend_fp8(q: torch.Tensor) -> torch.Tensor:
        """The tangent comes with a scale."""
        scales = {"q_descale": q[..., 0].mean(1), "k_descale": x.k_descale, "v_descale": x.v_descale}
        return fa3.flash_attn_func(x.q, x.k, x.v, **scales)

    def backward(q: torch.Tensor) -> torch.Tensor:
        out, lse = ops.portable_fwd(k, k, v, 0.25, *FULL)
        return ops.portable_bwd(q, None, k, k, v, out, lse, 0.25, *FULL, False)[0]

    return {
        "flash_attn_func": lambda q: fa3.flash_attn_func(q, k, v),
        "flash_attn_func of v": lambda q: fa3.flash_attn_func(k, k, q, causal=True, return_lse=True),
        "flash_attn_func in FP8": attend_fp8,
        "flash_attn_fp8_func": lambda q: fa3.flash_attn_fp8_func(q, k, v),
        "flash_attn_fp8_func straight through": lambda q: fa3.flash_attn_fp8_func(q, k, v, straight_through=True),
        "quantize_fp8": lambda q: fa3.quantize_fp8(q, k, v).q_descale,
        "rotary": lambda q: fa3.quantize_fp8(k, k, v, rotary=(q[0, :, 0, :8], ones)).q_descale,
        "validate_fp8": lambda q: fa3.validate_fp8(q, k, v).rmse,
        "fwd": lambda q: ops.portable_fwd(q, k, v, 0.25, *FULL),
        "bwd": backward,
        "op quantize_fp8": lambda q: ops.portable_quantize_fp8(q, None, None, None, False, False, 128)[1],
    }


def _by_dual_numbers(function, q):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(q, torch.ones_like(q)))


TRANSFORMS = {
    "jvp": lambda function, q: torch.func.jvp(function, (q,), (torch.ones_like(q),)),
    "jacfwd": lambda function, q: torch.func.jacfwd(function)(q),
    "linearize": lambda function, q: torch.func.linearize(function, q),
    "dual numbers": _by_dual_numbers,
}


@pytest.fixture
def q() -> torch.Tensor:
    return torch.randn(1, 20, 2, 16)


@pytest.mark.parametrize("no_grad", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", _functions())
def test_forward_mode(name, transform, no_grad, q):
    with torch.set_grad_enabled(not no_grad), pytest.raises(NotImplementedError, match=REFUSAL):
        TRANSFORMS[transform](_functions()[name], q)


@pytest.mark.parametrize("transform", ["jvp", "dual numbers"])
@pytest.mark.parametrize("name", _functions())
def test_forward_mode_around_and_in_a_compiled_function(name, transform, q):
    """Where the compiler may leave the function to eager mode. In one graph the error is the compiler's own."""
    torch._dynamo.reset()
    function, transformed = _functions()[name], TRANSFORMS[transform]
    compile_ = functools.partial(torch.compile, backend="aot_eager")
    with pytest.raises(NotImplementedError, match=REFUSAL):
        transformed(compile_(function), q)
    with pytest.raises(NotImplementedError, match=REFUSAL):
        compile_(functools.partial(transformed, function))(q)
    with pytest.raises(RuntimeError):
        transformed(compile_(function, fullgraph=True), q)
    with pytest.raises(RuntimeError):
        compile_(functools.partial(transformed, function), fullgraph=True)(q)
    torch._dynamo.reset()


def test_tensors_without_a_tangent_may_pass(q):
    """Within jvp too: only what a tangent reaches is refused."""
    expected = fa3.flash_attn_func(q, q, q)
    out, tangent = torch.func.jvp(lambda x: x * fa3.flash_attn_func(q, q, q), (q,), (torch.ones_like(q),))
    assert torch.equal(out, q * expected)
    assert torch.equal(tangent, expected)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["q", "k", "v", "q_descale", "k_descale", "v_descale"])
def test_fp8_inputs_that_require_gradients_run_forward(name, compiled):
    torch._dynamo.reset()
    arguments = fp8_arguments()
    expected = fa3.flash_attn_func(**arguments)
    arguments[name] = arguments[name].clone().requires_grad_()
    function = fa3.flash_attn_func
    if compiled:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    out = function(**arguments)
    assert torch.equal(out, expected)
    with pytest.raises(NotImplementedError, match=r"flash_attn_func: FP8 is a forward without a backward, .*straight"):
        out.sum().backward()


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
@pytest.mark.parametrize("function", [fa3.quantize_fp8, fa3.flash_attn_fp8_func])
def test_16_bit_inputs_of_fp8_that_require_gradients_run_forward(function, backend):
    torch._dynamo.reset()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        results = function(q, k, v, smooth_k=True)
        return [*results[:6], results.transform.k_mean] if isinstance(results, tuple) else [results]

    inputs = Case(head_dim=40).inputs(torch.bfloat16, "cpu")
    expected = call(*inputs)
    call_ = call if backend is None else torch.compile(call, fullgraph=True, backend=backend)
    results = call_(*(x.clone().requires_grad_() for x in inputs))
    for got, x in zip(results, expected, strict=True):
        assert torch.equal(got.float(), x.float())
    with pytest.raises(NotImplementedError, match=r": FP8 is a forward without a backward, .*straight_through=True"):
        results[-1].sum().backward()


def test_second_derivatives():
    q, k, v = (x.requires_grad_() for x in Case().inputs(torch.bfloat16, "cpu"))
    (dq,) = torch.autograd.grad(fa3.flash_attn_func(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="flash_attn_func: second derivatives are not implemented"):
        dq.sum().backward()
