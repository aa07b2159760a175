"""FP8 under torch.compile, fake and meta tensors, the FLOP counter and explain."""

from __future__ import annotations

import pytest
import torch
from cases import Case, ids
from fp8_helpers import SIGNS, Fp8Case, fp8_arguments, random_rotary
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import fa3
from fa3 import ops
from fa3.fp8_format import E4M3, FP8_SCALE_ROWS, transpose_v
from fa3.mask import Mask


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
OPCHECK_CASES = (
    Fp8Case(seqlen_q=20, seqlen_k=130, num_heads_q=4, head_dim=16),
    Fp8Case(seqlen_q=130, seqlen_k=20, num_heads_q=4, head_dim=16, causal=True, scales="heads", q_scales_of="KV heads"),
    Fp8Case(seqlen_q=20, seqlen_k=0, num_heads_q=4, head_dim=16),
)


@pytest.mark.parametrize(("out_fp16", "v_transposed"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("case", OPCHECK_CASES, **ids)
def test_opcheck_forward(case, out_fp16, v_transposed):
    (q, k, v), scales = case.fp8_inputs()
    v = transpose_v(v) if v_transposed else v
    arguments = (q, k, v, *scales.values(), 0.25, *case.op_mask, out_fp16, v_transposed)
    # Not test_schema, which multiplies the inputs: torch has no product of e4m3 tensors.
    torch.library.opcheck(ops.portable_fwd_fp8, arguments, test_utils=OPCHECKS)
    for real, fake in zip(ops.portable_fwd_fp8(*arguments), ops._fake_forward_fp8(*arguments), strict=True):
        assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())


@pytest.mark.parametrize("seqlen", [0, 1, 130])
@pytest.mark.parametrize("block_size", [FP8_SCALE_ROWS, 0])
@pytest.mark.parametrize(("everything", "transpose"), [(False, False), (True, False), (False, True)])
def test_opcheck_quantizer(seqlen, block_size, everything, transpose):
    x = torch.randn(2, 3, seqlen, 48).bfloat16().transpose(1, 2)
    rotary = random_rotary(seqlen, 16) if everything else (None, None)
    arguments = (x, SIGNS[64] if everything else None, *rotary, everything, everything, block_size, transpose)
    torch.library.opcheck(ops.portable_quantize_fp8, arguments)
    for real, fake in zip(ops.portable_quantize_fp8(*arguments), ops._fake_quantize_fp8(*arguments), strict=True):
        assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("rotary_dim", [None, 16])
def test_compiled(rotary_dim):
    """One graph, other lengths and seeds included, and the results of eager mode."""

    def function(q, k, v, seed, rotary):
        options = {"smooth_k": True, "seed": seed, "rotary": rotary, "causal": True}
        x = fa3.quantize_fp8(q, k, v, smooth_k=True, seed=seed)
        return x, fa3.flash_attn_fp8_func(q, k, v, return_lse=True, **options)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for seed, seqlen in ((0, 130), (1, 150), (2, 257)):
        q, k, v = Case(seqlen_q=seqlen, seqlen_k=seqlen, num_heads_q=4, head_dim=48).inputs(torch.bfloat16, "cpu")
        rotary = random_rotary(seqlen, rotary_dim) if rotary_dim else None
        x, got = compiled(q, k, v, seed, rotary)
        expected_x, expected = function(q, k, v, seed, rotary)
        assert isinstance(x, fa3.Fp8Inputs)
        assert x.transform.seed == seed
        got, expected = [*x[:6], x.transform.k_mean, *got], [*expected_x[:6], expected_x.transform.k_mean, *expected]
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a.float(), b.float())


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_with_scales():
    arguments = fp8_arguments()
    compiled = torch.compile(fa3.flash_attn_func, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**arguments), fa3.flash_attn_func(**arguments))


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_with_v_transposed():
    """One compilation for the first lengths and one for all others (of more than one block)."""

    def function(q, k, v):
        x = fa3.quantize_fp8(q, k, v, v_transposed=True)
        scales = {"q_descale": x.q_descale, "k_descale": x.k_descale, "v_descale": x.v_descale}
        return x.v, fa3.flash_attn_func(x.q, x.k, x.v, **scales, v_transposed=True), fa3.flash_attn_fp8_func(q, k, v)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for seqlen_q, seqlen_k in ((129, 130), (257, 150), (300, 256), (130, 513)):
        inputs = Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads_q=4, head_dim=96).inputs(torch.bfloat16, "cpu")
        for got, expected in zip(compiled(*inputs), function(*inputs), strict=True):
            assert torch.equal(got.float(), expected.float())
    assert counter.frame_count <= 2


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_straight_through():
    def function(q, k, v):
        return fa3.flash_attn_fp8_func(q, k, v, rotary=rotary, straight_through=True).square().sum()

    rotary = random_rotary(129, 16)
    inputs = [x.requires_grad_() for x in Case(num_heads_q=4).inputs(torch.float32, "cpu")]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    got, expected = (torch.autograd.grad(f(*inputs), inputs) for f in (compiled, function))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_meta_tensors():
    q, k, v = (x.to("meta") for x in Case(head_dim=96).inputs(torch.float16, "cpu"))
    x = fa3.quantize_fp8(q, k, v, smooth_k=True)
    assert (x.v.shape, x.v.dtype, x.k_descale.shape) == ((2, 129, 2, 128), E4M3, (2, 2, 2))
    assert fa3.quantize_fp8(q, k, v, v_transposed=True).v.shape == (2, 2, 128, 256)
    out, lse = fa3.flash_attn_fp8_func(q, k, v, return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (2, 2, 129), torch.float32)


def test_fake_tensors_with_v_transposed():
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v, *scales, _ = fa3.quantize_fp8(*Case().inputs(torch.bfloat16, "cpu"), v_transposed=True)
        assert (v.shape, v.dtype, v.is_contiguous()) == ((2, 2, 64, 256), E4M3, True)
        scales = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
        out, lse = fa3.flash_attn_func(q, k, v, **scales, v_transposed=True, return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 129, 2, 64), torch.bfloat16, (2, 2, 129), torch.float32)


@pytest.mark.parametrize("v_transposed", [False, True])
def test_flop_counter_and_checkpointing(v_transposed):
    arguments = fp8_arguments()
    if v_transposed:
        arguments |= {"v": transpose_v(arguments["v"]), "v_transposed": True}
    with FlopCounterMode(display=False) as counter:
        fa3.flash_attn_func(**arguments, causal=True)
    pairs = 2 * 4 * Mask.resolve(causal=True).visible_pairs(200, 300)
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    assert counts == {"fa3.portable_fwd_fp8": 4 * pairs * 16}
    assert ops.portable_fwd_fp8 in fa3.checkpoint_save_ops()


def test_explain():
    (q, k, v), _ = Fp8Case().fp8_inputs()
    explanation = fa3.explain(q, k, v)
    assert (explanation.path, explanation.backward) == ("portable", "refused")
    assert "blocks of 128 keys" in str(explanation)
    assert fa3.explain(q, k, transpose_v(v), v_transposed=True) == explanation
    with fa3.backend("hopper"):
        refused = fa3.explain(q, k, v)
    assert (refused.path, refused.backward) == ("refused", None)


def test_explain_hopper_with_v_transposed(monkeypatch):
    """The library is asked for the kernel of the layout; and what TMA wants of v's strides it wants of this v's."""
    table = [{"name": name, "head_dim": 128, "tile_m": 192, "tile_n": 128} for name in ("row-major", "transposed")]
    monkeypatch.setattr("fa3._library.kernel_table", lambda: table)
    monkeypatch.setattr("fa3._backend.choose_path", lambda *arguments: "hopper")
    monkeypatch.setattr("fa3._explain._selected_rows", lambda *arguments: (int(arguments[-1]), -1))
    monkeypatch.setattr(ops, "fwd_fp8", object())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a Hopper GPU")
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    (q, k, v), _ = Fp8Case(head_dim=128).fp8_inputs()
    vt = transpose_v(v)
    assert fa3.explain(q, k, v).kernel == table[0]
    explanation = fa3.explain(q, k, vt, v_transposed=True)
    assert (explanation.kernel, explanation.copies) == (table[1], [])
    odd = torch.nn.functional.pad(vt.view(torch.uint8), (0, 3)).view(E4M3)[..., :256]
    copies = fa3.explain(q, k, odd, v_transposed=True).copies
    assert copies == ["v: stride 259 bytes of dimension 2 is not a multiple of 16"]
    monkeypatch.setattr("fa3._explain._selected_rows", lambda *arguments: (-1, -1))
    refused = fa3.explain(q, k, vt, v_transposed=True)
    assert refused.path == "refused"
    assert "head_dim 128 in torch.float8_e4m3fn with v transposed" in str(refused)
