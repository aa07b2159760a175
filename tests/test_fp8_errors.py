"""What FP8 inputs and options are refused for."""

from __future__ import annotations

import pytest
import torch
from cases import Case
from fp8_helpers import Fp8Case, fp8_arguments, raises, random_rotary
from torch._subclasses.fake_tensor import FakeTensorMode

import fa3
from fa3.fp8_format import E4M3


def test_the_arguments_before_a_change_are_right():
    fa3.flash_attn_func(**fp8_arguments())


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_scales_are_required_for_fp8_and_refused_for_others(name):
    message = f"{name} must be given for float8_e4m3fn inputs, got None; no scale is ever assumed"
    raises(ValueError, message, **fp8_arguments(**{name: None}))
    others = dict(zip("qkv", Case().inputs(torch.bfloat16, "cpu"), strict=True))
    message = f"{name} must be None for torch.bfloat16 inputs, got Tensor; scales belong to float8_e4m3fn"
    raises(ValueError, message, **others, **{name: torch.ones(2, 2)})


@pytest.mark.parametrize(
    ("name", "shapes", "heads", "blocks"),
    [
        ("q_descale", [(), (2,), (1, 2), (2, 1), (2, 3, 2), (2, 2, 3), (2, 2, 2, 1)], "2 or 4", "ceil(200 / 128) = 2"),
        ("k_descale", [(2,), (3, 2), (2, 4), (2, 4, 1), (2, 2, 2), (2, 2, 300)], "2", "ceil(300 / 128) = 3"),
        ("v_descale", [(2,), (3, 2), (2, 4), (2, 4, 1), (2, 2, 2), (2, 2, 300)], "2", "ceil(300 / 128) = 3"),
    ],
)
def test_shapes_of_scales(name, shapes, heads, blocks):
    for shape in shapes:
        message = (
            f"{name} must have shape (batch, heads) or (batch, heads, blocks), batch 2, heads {heads}, "
            f"blocks 1 or {blocks}, got {shape}"
        )
        raises(ValueError, message, **fp8_arguments(**{name: torch.ones(shape)}))


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_other_scales(name):
    raises(TypeError, f"{name} must be a torch.Tensor, got float", **fp8_arguments(**{name: 1.0}))
    half, meta = torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, 2, device="meta")
    raises(TypeError, f"{name}.dtype must be float32, got torch.bfloat16", **fp8_arguments(**{name: half}))
    raises(ValueError, f"{name}.device must equal q.device = cpu, got meta", **fp8_arguments(**{name: meta}))


@pytest.mark.parametrize("head_dim", [8, 24, 272])
def test_head_dim_of_fp8(head_dim):
    tensors, scales = Fp8Case(head_dim=head_dim).fp8_inputs()
    rule = "be a multiple of 16 from 16 to 256 for torch.float8_e4m3fn"
    message = f"q.shape[3] (head_dim) must {rule}, got {head_dim}"
    raises(ValueError, message, **dict(zip("qkv", tensors, strict=True)), **scales)


def test_out_dtype():
    message = "out_dtype must be None, bfloat16 or float16, got torch.float32"
    raises(ValueError, message, **fp8_arguments(out_dtype=torch.float32))
    others = dict(zip("qkv", Case().inputs(torch.bfloat16, "cpu"), strict=True))
    message = "out_dtype must be None for torch.bfloat16 inputs, got torch.float16"
    raises(ValueError, message, **others, out_dtype=torch.float16)


@pytest.mark.skipif(fa3.is_available(), reason="the Hopper kernels can run here")
@pytest.mark.parametrize("function", [fa3.flash_attn_fp8_func, fa3.quantize_fp8])
def test_cuda_without_kernels(function):
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(x.shape, dtype=x.dtype, device="cuda:0") for x in Case().inputs(torch.bfloat16, "cpu"))
        raises(RuntimeError, fa3.unavailable_reason(), function, q=q, k=k, v=v)


@pytest.mark.parametrize(
    ("kind", "message", "options"),
    [
        (ValueError, "block_size must be 128 or None, got 64", {"block_size": 64}),
        (TypeError, "seed must be an int, got bool", {"seed": True}),
        (TypeError, "incoherent must be a bool, got NoneType", {"incoherent": None}),
        (TypeError, "rotary_interleaved must be a bool, got int", {"rotary_interleaved": 1}),
        (TypeError, "smooth_k must be a bool, got str", {"smooth_k": "yes"}),
        (TypeError, "rotary must be a pair of tensors (cos, sin) or None, got Tensor", {"rotary": torch.ones(2, 129)}),
        (TypeError, "rotary must be a pair of tensors (cos, sin) or None, got tuple", {"rotary": (1.0, 2.0)}),
        (
            ValueError,
            "rotary[0] (cos) must have shape (seqlen, rotary_dim / 2) with at least seqlen_q = 129 rows and rotary_dim "
            "at most head_dim = 64, the same for cos and sin, got (128, 4)",
            {"rotary": (torch.ones(128, 4), torch.ones(129, 4))},
        ),
        (ValueError, "rotary[1] (sin) must have shape", {"rotary": (torch.ones(129, 4), torch.ones(129, 5))}),
        (ValueError, "rotary[0] (cos) must have shape", {"rotary": (torch.ones(129, 33), torch.ones(129, 33))}),
        (
            TypeError,
            "rotary[1] (sin).dtype must equal that of cos, torch.float32, got torch.bfloat16",
            {"rotary": (torch.ones(129, 4), torch.ones(129, 4).bfloat16())},
        ),
        (
            TypeError,
            "rotary[0] (cos).dtype must be float32 or q.dtype = torch.bfloat16, got torch.float16",
            {"rotary": (torch.ones(129, 4).half(), torch.ones(129, 4).half())},
        ),
        (
            ValueError,
            "rotary[0] (cos).device must equal q.device = cpu, got meta",
            {"rotary": (torch.ones(129, 4, device="meta"), torch.ones(129, 4))},
        ),
    ],
)
@pytest.mark.parametrize("function", [fa3.quantize_fp8, fa3.flash_attn_fp8_func])
def test_options_of_the_quantizer(function, kind, message, options):
    raises(kind, message, function, **dict(zip("qkv", Case().inputs(torch.bfloat16, "cpu"), strict=True)), **options)


def test_unknown_options():
    """The error names the function that was called."""
    arguments = dict(zip("qkv", Case().inputs(torch.bfloat16, "cpu"), strict=True))
    for function in (fa3.quantize_fp8, fa3.flash_attn_fp8_func, fa3.validate_fp8):
        with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) got an unexpected keyword argument 'smooth'"):
            function(**arguments, smooth=True)


def test_errors_name_the_function_that_was_called():
    arguments = dict(zip("qkv", Case().inputs(torch.bfloat16, "cpu"), strict=True))
    raises(TypeError, "causal must be a bool, got int", fa3.flash_attn_fp8_func, **arguments, causal=1)
    raises(ValueError, "softmax_scale must be from", fa3.flash_attn_fp8_func, **arguments, softmax_scale=0.0)


def test_layout_of_v_is_an_option_of_the_quantizer_alone():
    arguments = dict(zip("qkv", Case().inputs(torch.bfloat16, "cpu"), strict=True))
    raises(TypeError, "v_transposed must be a bool, got NoneType", fa3.quantize_fp8, **arguments, v_transposed=None)
    for function in (fa3.flash_attn_fp8_func, fa3.validate_fp8):
        with pytest.raises(TypeError, match="v_transposed"):
            function(**arguments, v_transposed=True)


@pytest.mark.parametrize("function", [fa3.quantize_fp8, fa3.flash_attn_fp8_func])
def test_inputs_of_the_quantizer(function):
    def inputs(dtype: torch.dtype = torch.bfloat16, **sizes) -> dict[str, torch.Tensor]:
        return dict(zip("qkv", Case(**sizes).inputs(dtype, "cpu"), strict=True))

    for dtype in (torch.float64, E4M3):
        message = f"q.dtype must be bfloat16 or float16 (in plain PyTorch float32 too), got {dtype}"
        raises(NotImplementedError, message, function, **inputs(dtype))
    raises(ValueError, "v.shape[1] (seqlen_k)", function, **(inputs() | {"v": torch.zeros(2, 5, 2, 64).bfloat16()}))
    message = "q.shape[3] (head_dim) must be a multiple of 16 where incoherent is False, got 40"
    raises(ValueError, message, function, **inputs(head_dim=40), incoherent=False)
    rotary = random_rotary(129, 16)
    message = "rotary must be None unless seqlen_k = seqlen_q = 129, got 200; "
    raises(NotImplementedError, message, function, **inputs(seqlen_k=200), rotary=rotary)


@pytest.mark.parametrize(
    "mask",
    [
        {"window_size": (2, 0)},
        {"window_size": (-1, 1)},
        {"window_size": (2, -1), "causal": True},
        {"attention_chunk": 64},
        {"attention_chunk": 64, "causal": True},
    ],
    ids=str,
)
def test_masks_of_fp8(mask):
    rule = "window_size must be unlimited, as (-1, -1), or causal, as (-1, 0), and attention_chunk 0, for float8_e4m3fn"
    raises(NotImplementedError, rule, **fp8_arguments(**mask))
