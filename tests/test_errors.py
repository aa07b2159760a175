"""One test per check of flash_attn_func: the kind of error, the argument it names, the rule and the value."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fa3


def tensors(**shapes):
    """q (2, 5, 4, 16), k and v (2, 7, 2, 16) in bfloat16, or the given shapes."""
    default = {"q": (2, 5, 4, 16), "k": (2, 7, 2, 16), "v": (2, 7, 2, 16)}
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in (default | shapes).items()}


def raises(kind: type[Exception], message: str, **arguments) -> None:
    with pytest.raises(kind, match="^" + re.escape(f"flash_attn_func: {message}")) as caught:
        fa3.flash_attn_func(**(tensors() | arguments))
    assert type(caught.value) is kind


def test_the_arguments_before_a_change_are_right():
    fa3.flash_attn_func(**tensors())


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_type(name):
    raises(TypeError, f"{name} must be a torch.Tensor, got list", **{name: [1.0]})


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_dtype(dtype):
    q = torch.zeros(2, 5, 4, 16, dtype=dtype)
    raises(TypeError, f"q.dtype must be bfloat16, float16 or float8_e4m3fn, got {dtype}", q=q)


def test_dtype_of_another_fp8():
    q = torch.zeros(2, 5, 4, 16).to(torch.float8_e5m2)
    message = "q.dtype must be bfloat16, float16 or float8_e4m3fn, got torch.float8_e5m2; cast"
    raises(NotImplementedError, message, q=q)


@pytest.mark.parametrize("name", ["k", "v"])
def test_dtypes_differ(name):
    x = torch.zeros(2, 7, 2, 16, dtype=torch.float16)
    raises(TypeError, f"{name}.dtype must equal q.dtype = torch.bfloat16, got torch.float16", **{name: x})


@pytest.mark.parametrize("name", ["k", "v"])
def test_devices_differ(name):
    x = torch.zeros(2, 7, 2, 16, dtype=torch.bfloat16, device="meta")
    raises(ValueError, f"{name}.device must equal q.device = cpu, got meta", **{name: x})


def test_sparse():
    q = torch.zeros(2, 5, 4, 16, dtype=torch.bfloat16).to_sparse()
    raises(ValueError, "q.layout must be torch.strided, got torch.sparse_coo; use q.to_dense()", q=q)


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("q", "(batch, seqlen_q, num_heads_q, head_dim)"),
        ("k", "(batch, seqlen_k, num_heads_kv, head_dim)"),
        ("v", "(batch, seqlen_k, num_heads_kv, head_dim)"),
    ],
)
@pytest.mark.parametrize("shape", [(), (5, 4, 16), (1, 2, 5, 4, 16)])
def test_number_of_dimensions(name, dims, shape):
    x = torch.zeros(shape, dtype=torch.bfloat16)
    raises(ValueError, f"{name} must have 4 dimensions {dims}, got shape {shape}", **{name: x})


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_last_dimension_must_be_contiguous(name):
    x = tensors()[name].transpose(2, 3).contiguous().transpose(2, 3)
    message = (
        f"{name} must have a contiguous last dimension (stride 1), got stride {x.stride(3)}; use {name}.contiguous()"
    )
    raises(ValueError, message, **{name: x})


def test_last_dimension_of_an_empty_tensor_may_have_any_stride():
    x = torch.zeros(2, 16, 2, 0, dtype=torch.bfloat16).transpose(1, 3)
    fa3.flash_attn_func(**(tensors() | {"k": x, "v": x}))


@pytest.mark.parametrize(
    ("head_dim", "remedy"),
    [(0, "; zero-pad"), (4, "; zero-pad"), (20, "; zero-pad"), (264, "")],
)
def test_head_dim(head_dim, remedy):
    arguments = tensors(q=(2, 5, 4, head_dim), k=(2, 7, 2, head_dim), v=(2, 7, 2, head_dim))
    raises(
        ValueError, f"q.shape[3] (head_dim) must be a multiple of 8 from 8 to 256, got {head_dim}{remedy}", **arguments
    )


@pytest.mark.parametrize(
    ("kind", "message", "shapes"),
    [
        (ValueError, "k.shape[0] (batch) must equal q.shape[0] = 2, got 3", {"k": (3, 7, 2, 16)}),
        (ValueError, "k.shape[3] (head_dim) must equal q.shape[3] = 16, got 8", {"k": (2, 7, 2, 8)}),
        (
            ValueError,
            "k.shape[2] (num_heads_kv) must divide q.shape[2] (num_heads_q) = 4, both above 0, got 3",
            {"k": (2, 7, 3, 16)},
        ),
        (
            ValueError,
            "k.shape[2] (num_heads_kv) must divide q.shape[2] (num_heads_q) = 4, both above 0, got 0",
            {"k": (2, 7, 0, 16)},
        ),
        (
            ValueError,
            "k.shape[2] (num_heads_kv) must divide q.shape[2] (num_heads_q) = 0, both above 0, got 2",
            {"q": (2, 5, 0, 16)},
        ),
        (ValueError, "v.shape[0] (batch) must equal q.shape[0] = 2, got 1", {"v": (1, 7, 2, 16)}),
        (ValueError, "v.shape[1] (seqlen_k) must equal k.shape[1] = 7, got 6", {"v": (2, 6, 2, 16)}),
        (ValueError, "v.shape[2] (num_heads_kv) must equal k.shape[2] = 2, got 1", {"v": (2, 7, 1, 16)}),
        (
            NotImplementedError,
            "v.shape[3] (head_dim_v) must equal q.shape[3] = 16, got 8; zero-pad v",
            {"v": (2, 7, 2, 8)},
        ),
    ],
)
def test_shapes(kind, message, shapes):
    raises(kind, message, **tensors(**shapes))


def test_nested():
    """There is no to_dense() for these, and padded sequences would see their padding."""
    sequences = [torch.zeros(n, 4, 16, dtype=torch.bfloat16) for n in (3, 5)]
    for layout in (torch.jagged, torch.strided):
        nested = torch.nested.nested_tensor(sequences, layout=layout)
        message = f"q must not be a nested tensor, got {layout}; call once per sequence, with x[None] for x in q.unb"
        raises(ValueError, message, q=nested)
    for x in nested.unbind():
        assert fa3.flash_attn_func(x[None], x[None], x[None]).shape == (1, *x.shape)


@pytest.mark.parametrize("value", ["0.5", True, np.bool_(True), np.ones(2), torch.tensor(0.5)])
def test_softmax_scale_type(value):
    raises(TypeError, "softmax_scale must be a float or None, got", softmax_scale=value)


def test_tensors_as_numbers_and_flags():
    message = "got Tensor; multiply q by it and pass 1.0, or pass float(softmax_scale), which waits for its device"
    raises(TypeError, f"softmax_scale must be a float or None, {message}", softmax_scale=torch.tensor(0.5))
    message = "causal must be a bool, got Tensor; pass bool(causal), which waits for its device"
    raises(TypeError, message, causal=torch.tensor(True))


@pytest.mark.parametrize("value", [-1.0, 1e-300, 1e300, float("inf"), float("nan")])
def test_softmax_scale(value):
    raises(ValueError, f"softmax_scale must be from 1e-37 to 1e38, got {value}; leave it out", softmax_scale=value)


def test_dropout_in_the_place_of_softmax_scale():
    message = re.escape("got 0.0; leave it out for 1 / sqrt(head_dim) (the fourth argument is softmax_scale")
    with pytest.raises(ValueError, match=message):
        fa3.flash_attn_func(*tensors().values(), 0.0, None, True)


@pytest.mark.parametrize("name", ["causal", "deterministic"])
@pytest.mark.parametrize("value", [None, 1, 0.125, np.float32(1), np.int64(1)])
def test_flags(value, name):
    raises(TypeError, f"{name} must be a bool, got {type(value).__name__}", **{name: value})


def test_qv():
    raises(NotImplementedError, "qv must be None, got Tensor", qv=torch.ones(2, 2))


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("softcap", 30.0, "be 0.0"),
        ("num_splits", 4, "be 0 or 1"),
        ("num_splits", -1, "be 0 or 1"),
        ("sm_margin", 8, "be 0"),
    ],
)
def test_not_implemented(name, value, rule):
    raises(NotImplementedError, f"{name} must {rule}, got {value}", **{name: value})


@pytest.mark.parametrize("value", [None, 128, (1, 2, 3)])
def test_window_size_is_a_pair(value):
    raises(TypeError, f"window_size must be a pair (left, right), got {value}", window_size=value)


def test_window_size_holds_integers():
    raises(TypeError, "window_size must hold integers or None, got (1.5, 0)", window_size=(1.5, 0))


def test_window_size_is_not_negative():
    raises(ValueError, "window_size must hold lengths of at least 0", window_size=(-2, 0))


@pytest.mark.parametrize(("value", "kind"), [(1.5, TypeError), (True, TypeError), (-1, ValueError)])
def test_attention_chunk_is_a_length(value, kind):
    raises(kind, "attention_chunk must be ", attention_chunk=value)


@pytest.mark.skipif(fa3.is_available(), reason="the Hopper kernels can run here")
def test_cuda_without_kernels():
    """No fallback, and the message says why and what to do. (Fake tensors: there need be no GPU.)"""
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(x.shape, dtype=x.dtype, device="cuda:0") for x in tensors().values())
        with pytest.raises(RuntimeError, match=re.escape(f"flash_attn_func: {fa3.unavailable_reason()}")) as caught:
            fa3.flash_attn_func(q, k, v)
        assert 'fa3.backend("portable")' in str(caught.value)
        with fa3.backend("portable"):
            assert fa3.flash_attn_func(q, k, v).device == q.device


def test_cpu_tensors_with_the_hopper_backend():
    with fa3.backend("hopper"):
        raises(RuntimeError, "the Hopper kernels need CUDA tensors, got a tensor on 'cpu'")


def test_order_of_checks():
    """Type, dtype, device, layout, shape, then the options."""
    wrong = {
        "v": torch.zeros(1, 3, 16, dtype=torch.float16, device="meta"),
        "k": torch.zeros(2, 7, 3, 16, dtype=torch.bfloat16),
        "softmax_scale": -1.0,
    }
    raises(TypeError, "v.dtype", **wrong)
    raises(ValueError, "v.device", **(wrong | {"v": wrong["v"].bfloat16()}))
    raises(ValueError, "v must have 4 dimensions", **(wrong | {"v": torch.zeros(1, 3, 16, dtype=torch.bfloat16)}))
    raises(ValueError, "k.shape[2]", **(wrong | {"v": tensors()["v"]}))
    raises(ValueError, "softmax_scale", **(tensors() | {"softmax_scale": -1.0, "softcap": 1.0}))
