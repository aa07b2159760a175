"""torch.compile, opcheck and activation checkpointing."""

from __future__ import annotations

import functools
import os
import sys

import numpy as np
import pytest
import torch
from cases import Case, fa3_with_lse
from model import Block, Calls, checkpointed_train_step, train_step
from torch._dynamo.testing import CompileCounter
from torch.utils import checkpoint

import fa3
from fa3 import ops

CASES = (
    Case(seqlen_q=20, seqlen_k=33, num_heads_q=4, head_dim=16),
    Case(seqlen_q=33, seqlen_k=20, num_heads_q=4, head_dim=16, causal=True),
    Case(seqlen_q=20, seqlen_k=20, num_heads_q=6, head_dim=16, causal=True, layout="fused_qkv"),
    Case(seqlen_q=20, seqlen_k=0, num_heads_q=4, head_dim=16),
    Case(batch=1, seqlen_q=1, seqlen_k=9, num_heads_q=4, num_heads_kv=1, head_dim=16, layout="odd_strides"),
)
case_ids = {"ids": lambda case: case.name}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES, **case_ids)
def test_opcheck_forward(case, dtype):
    inputs = [x.detach().requires_grad_() for x in case.inputs(dtype, "cpu")]
    torch.library.opcheck(ops.portable_fwd, (*inputs, 0.25, *case.op_mask))


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("case", CASES, **case_ids)
def test_opcheck_backward(case, with_dlse):
    q, k, v = case.inputs(torch.bfloat16, "cpu")
    dout, dlse = case.output_grads(torch.bfloat16, "cpu")
    out, lse = ops.portable_fwd(q, k, v, 0.25, *case.op_mask)
    arguments = (dout, dlse if with_dlse else None, q, k, v, out, lse, 0.25, *case.op_mask, True)
    torch.library.opcheck(ops.portable_bwd, arguments)


@pytest.mark.parametrize("case", CASES, **case_ids)
def test_fake_outputs_are_like_the_real_ones(case):
    q, k, v = case.inputs(torch.bfloat16, "cpu")
    out, lse = ops.portable_fwd(q, k, v, 0.25, *case.op_mask)
    dout, dlse = case.output_grads(torch.bfloat16, "cpu")
    arguments = (dout, dlse, q, k, v, out, lse, 0.25, *case.op_mask, False)
    grads = ops.portable_bwd(*arguments)
    fakes = ops._fake_forward(q, k, v, 0.25, *case.op_mask) + ops._fake_backward(*arguments)
    for real, fake in zip((out, lse, *grads), fakes, strict=True):
        assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())


def test_fullgraph_train_step():
    block, x = Block(), torch.randn(2, 40, 64)
    expected = train_step(block, x)
    got = train_step(torch.compile(block, fullgraph=True), x)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_bfloat16_inference():
    q, k, v = Case(seqlen_k=200).inputs(torch.bfloat16, "cpu")
    compiled = torch.compile(functools.partial(fa3.flash_attn_func, causal=True), fullgraph=True)
    assert torch.equal(compiled(q, k, v), fa3.flash_attn_func(q, k, v, causal=True))


def test_backend_around_a_compiled_call():
    """The choice is a guard: a compiled function follows the block in which it is called."""
    q, k, v = Case(seqlen_q=9, seqlen_k=9, head_dim=8).inputs(torch.float32, "cpu")
    counter = CompileCounter()
    compiled = torch.compile(fa3.flash_attn_func, fullgraph=True, backend=counter)
    expected = fa3.flash_attn_func(q, k, v)
    assert torch.equal(compiled(q, k, v), expected)
    with fa3.backend("portable"):
        assert torch.equal(compiled(q, k, v), expected)
    with fa3.backend("hopper"), pytest.raises(RuntimeError, match="the Hopper kernels need CUDA tensors"):
        compiled(q, k, v)
    assert torch.equal(compiled(q, k, v), expected)
    assert counter.frame_count == 2


def test_backend_inside_a_compiled_function():
    q, k, v = Case(seqlen_q=9, seqlen_k=9, head_dim=8).inputs(torch.float32, "cpu")

    def function(q, k, v):
        with fa3.backend("portable"):
            return fa3.flash_attn_func(q, k, v) + 1

    with fa3.backend("hopper"):
        compiled = torch.compile(function, fullgraph=True, backend="eager")(q, k, v)
        assert torch.equal(compiled, function(q, k, v))
        with pytest.raises(RuntimeError, match="the Hopper kernels need CUDA tensors"):
            fa3.flash_attn_func(q, k, v)


def test_query_of_the_gpu_is_a_constant_of_the_graph(monkeypatch):
    """On CUDA tensors a compiled call asks once whether the kernels can run, by code that cannot be traced."""
    monkeypatch.setattr("fa3._library.unavailable_reason", lambda index: os.environ.get("FA3_TEST_REASON", "no GPU"))
    refusal = sys.modules["fa3._backend"]._hopper_refusal
    compiled = torch.compile(lambda x: x + len(refusal(99)), fullgraph=True, backend="eager")
    assert compiled(torch.zeros(())) == len("no GPU")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_other_lengths_do_not_recompile(causal, needs_grad):
    """One compilation for the first lengths, one with dynamic shapes, and no more."""
    counter = CompileCounter()
    compiled = torch.compile(fa3.flash_attn_func, fullgraph=True, backend=counter)
    for batch, seqlen_q, seqlen_k in ((2, 5, 9), (3, 7, 8), (4, 30, 31), (5, 31, 30), (6, 64, 64), (7, 200, 3)):
        q, k, v = Case(batch, seqlen_q, seqlen_k, num_heads_q=4, head_dim=8).inputs(torch.float32, "cpu")
        q.requires_grad_(needs_grad)
        out = compiled(q, k, v, causal=causal)
        torch.testing.assert_close(out, fa3.flash_attn_func(q, k, v, causal=causal))
        if needs_grad:
            out.sum().backward()
    assert counter.frame_count <= 2


@pytest.fixture
def unknown_lengths():
    """The compiler takes numbers out of tensors, and the sizes of boolean indexing, as unknowns of one graph."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


UNKNOWN_LENGTHS = {
    "one": lambda q, k, v, n, m, mask: (q[:, :n], k[:, :n], v[:, :n]),
    "two": lambda q, k, v, n, m, mask: (q[:, :n], k[:, :m], v[:, :m]),
    "of q": lambda q, k, v, n, m, mask: (q[:, :n], k, v),
    "of k and v": lambda q, k, v, n, m, mask: (q, k[:, :n], v[:, :n]),
    "boolean mask": lambda q, k, v, n, m, mask: (q[:, mask], k[:, mask], v[:, mask]),
}


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", UNKNOWN_LENGTHS)
def test_lengths_that_the_compiler_does_not_know(lengths, causal, needs_grad, unknown_lengths):
    q, k, v = Case(seqlen_q=20, seqlen_k=20, num_heads_q=4, head_dim=16).inputs(torch.float32, "cpu")
    q.requires_grad_(needs_grad)

    def function(q, k, v, n, m, mask):
        return fa3.flash_attn_func(*UNKNOWN_LENGTHS[lengths](q, k, v, n.item(), m.item(), mask), causal=causal)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for n, m in ((7, 9), (12, 5), (20, 20)):
        arguments = (torch.tensor(n), torch.tensor(m), torch.arange(20) < n)
        got, expected = compiled(q, k, v, *arguments), function(q, k, v, *arguments)
        torch.testing.assert_close(got, expected)
        if needs_grad:
            (dq,), (expected_dq,) = (torch.autograd.grad(x.sum(), q) for x in (got, expected))
            torch.testing.assert_close(dq, expected_dq)


NUMPY_OPTIONS = {
    "causal": lambda q, x: {"causal": np.bool_(x > 1)},
    "float16": lambda q, x: {"softmax_scale": np.float16(x)},
    "float32": lambda q, x: {"softmax_scale": np.float32(x)},
    "float64": lambda q, x: {"softmax_scale": np.float64(x)},
    "array": lambda q, x: {"softmax_scale": np.array(x)},
    "window": lambda q, x: {"window_size": (np.int64(-1), np.int64(0 if x > 1 else -1))},
}


@pytest.mark.parametrize("option", NUMPY_OPTIONS)
def test_numpy_numbers_and_flags(option):
    """As arguments, which the compiler may leave to eager mode; other values are not taken for the first ones."""
    q, k, v = Case(seqlen_q=9, seqlen_k=9, head_dim=8).inputs(torch.float32, "cpu")
    compiled = torch.compile(fa3.flash_attn_func, backend="aot_eager")
    for x in (0.5, 2.0, 0.25):
        options = NUMPY_OPTIONS[option](q, x)
        torch.testing.assert_close(compiled(q, k, v, **options), fa3.flash_attn_func(q, k, v, **options))


@pytest.mark.parametrize("function", [fa3.flash_attn_func, fa3.flash_attn_fp8_func])
def test_numpy_scale_in_one_graph(function):
    def attend(q, k, v):
        return function(q, k, v, softmax_scale=1 / np.sqrt(q.shape[-1]))

    q, k, v = Case(seqlen_q=9, seqlen_k=9).inputs(torch.float32, "cpu")
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("case", [Case(), Case(num_heads_q=4, seqlen_k=200, causal=True)], **case_ids)
def test_results_are_no_views(case, backend):
    inputs = [x.requires_grad_() for x in case.inputs(torch.bfloat16, "cpu")]
    compiled = torch.compile(functools.partial(fa3_with_lse, causal=case.causal), fullgraph=True, backend=backend)
    out, lse = compiled(*inputs)
    for x in (*torch.autograd.grad(out.float().sum() + lse.sum(), inputs), out, lse):
        assert not x._is_view()
        x.mul_(2)
        x.detach_()


def test_torchs_deterministic_switch_is_a_guard():
    """A compiled function follows torch.use_deterministic_algorithms."""
    q, k, v = Case(seqlen_q=9, seqlen_k=9, head_dim=8).inputs(torch.float32, "cpu")
    seen = []

    def backend(module, inputs):
        seen.extend(node.args[-1] for node in module.graph.nodes if node.target is ops.portable_fwd)
        return module

    compiled = torch.compile(fa3.flash_attn_func, fullgraph=True, backend=backend)
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            compiled(q, k, v)
        finally:
            torch.use_deterministic_algorithms(False)
    assert seen == [False, True]


@pytest.mark.parametrize(("saves", "forwards"), [(False, 2), (True, 1)])
def test_activation_checkpointing(saves, forwards):
    """checkpoint_save_ops keeps the attention from being computed again; the gradients are the same to the bit."""
    block, x = Block(), torch.randn(2, 40, 64)
    expected = train_step(block, x)
    with Calls() as calls:
        got = checkpointed_train_step(block, x, saves)
    assert calls.count == {ops.portable_fwd: forwards, ops.portable_bwd: 1}
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_checkpoint_in_a_compiled_function():
    block, x = Block(), torch.randn(2, 40, 64)
    expected = train_step(block, x)
    block.zero_grad()

    @functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    def function(x):
        return checkpoint.checkpoint(block, x, use_reentrant=False).square().mean()

    function(x).backward()
    for p, b in zip(block.parameters(), expected[1:], strict=True):
        torch.testing.assert_close(p.grad, b)
