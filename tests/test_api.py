"""The public names: signature, options, backend choice, explain, FLOP counts, and what an import costs."""

from __future__ import annotations

import inspect
import itertools
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import Case
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fa3
from fa3 import ops
from fa3._backend import current_backend

# The parameters of upstream's flash_attn_func (hopper/flash_attn_interface.py); callers pass them by position.
UPSTREAM = {
    "q": inspect.Parameter.empty,
    "k": inspect.Parameter.empty,
    "v": inspect.Parameter.empty,
    "softmax_scale": None,
    "causal": False,
    "qv": None,
    "q_descale": None,
    "k_descale": None,
    "v_descale": None,
    "window_size": (-1, -1),
    "attention_chunk": 0,
    "softcap": 0.0,
    "num_splits": 1,
    "pack_gqa": None,
    "deterministic": False,
    "sm_margin": 0,
    "return_attn_probs": False,
}


def run_python(code: str, *, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)


def test_signature_is_upstreams():
    parameters = list(inspect.signature(fa3.flash_attn_func).parameters.values())
    positional = [p for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in positional] == list(UPSTREAM.items())
    assert [p.name for p in parameters[len(UPSTREAM) :]] == ["return_lse", "out_dtype", "v_transposed"]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters[len(UPSTREAM) :])


@pytest.mark.parametrize("function", [fa3.flash_attn_func, fa3.flash_attn_fp8_func, fa3.quantize_fp8, fa3.validate_fp8])
def test_every_argument_is_documented(function):
    documentation = inspect.getdoc(function)
    for name in inspect.signature(function).parameters:
        assert re.search(rf"^\s+(\w+, )*{name}(, \w+)*: ", documentation, re.MULTILINE), name


def test_public_names():
    for name in fa3.__all__:
        assert getattr(fa3, name).__doc__, name
    assert Path(fa3.__file__).with_name("py.typed").exists()


def test_returns():
    q, k, v = Case().inputs(torch.bfloat16, "cpu")
    out = fa3.flash_attn_func(q, k, v)
    assert isinstance(out, torch.Tensor)
    for flags in ({"return_lse": True}, {"return_attn_probs": True}, {"return_lse": True, "return_attn_probs": True}):
        with_lse = fa3.flash_attn_func(q, k, v, **flags)
        assert isinstance(with_lse, tuple)
        assert torch.equal(with_lse[0], out)
        assert with_lse[1].shape == (2, 2, 129)


@pytest.mark.parametrize(
    "options",
    [
        {"softmax_scale": 64**-0.5},
        {"window_size": (None, None)},
        {"window_size": [-1, -1]},
        {"window_size": (299, 128)},  # the last query reaches back to key 0, the first one forward to the last key
        {"num_splits": 0},
        {"pack_gqa": True},
        {"pack_gqa": False},
        {"deterministic": True},
        {"attention_chunk": None},
    ],
)
def test_options_that_change_nothing(options):
    q, k, v = Case(seqlen_k=300).inputs(torch.bfloat16, "cpu")
    assert torch.equal(fa3.flash_attn_func(q, k, v, **options), fa3.flash_attn_func(q, k, v))


@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (-1, 0)},
        {"window_size": (None, 0)},
        {"window_size": (299, 0)},
        {"window_size": (-1, 5), "causal": True},
        {"window_size": (None, None), "causal": True},
    ],
)
def test_windows_that_are_causal(options):
    q, k, v = Case(seqlen_k=300).inputs(torch.bfloat16, "cpu")
    assert torch.equal(fa3.flash_attn_func(q, k, v, **options), fa3.flash_attn_func(q, k, v, causal=True))


def test_nothing_is_saved_without_gradients():
    q, k, v = Case().inputs(torch.bfloat16, "cpu")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
        assert fa3.flash_attn_func(q, k, v).grad_fn is None
        with torch.no_grad():
            assert fa3.flash_attn_func(q.clone().requires_grad_(), k, v).grad_fn is None
        assert not saved
        fa3.flash_attn_func(q.requires_grad_(), k, v)
    assert len(saved) == 5  # q, k, v, out, lse


def check_ordinary(*tensors: torch.Tensor) -> None:
    """Results may be changed in place and detached, as those of any other op."""
    for x in tensors:
        assert not x._is_view()
        assert x.is_contiguous()
        x.mul_(2)
        x.detach_()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "case", [Case(), Case(causal=True, num_heads_q=4), Case(seqlen_k=200, causal=True), Case(1, 1, 5), Case(seqlen_k=0)]
)
def test_results_are_no_views(case, dtype):
    inputs = [x.requires_grad_() for x in case.inputs(dtype, "cpu")]
    out, lse = fa3.flash_attn_func(*inputs, causal=case.causal, return_lse=True)
    dout, dlse = case.output_grads(out.dtype, "cpu")
    check_ordinary(*torch.autograd.grad([out, lse], inputs, [dout, dlse.to(lse.dtype)]))
    check_ordinary(out, lse)
    check_ordinary(*fa3.flash_attn_func(*(x.detach() for x in inputs), causal=case.causal, return_lse=True))


@pytest.mark.parametrize("straight_through", [False, True])
def test_results_of_fp8_are_no_views(straight_through):
    inputs = [x.requires_grad_() for x in Case(head_dim=40).inputs(torch.bfloat16, "cpu")]
    options = {"smooth_k": True, "return_lse": True, "straight_through": straight_through}
    check_ordinary(*fa3.flash_attn_fp8_func(*inputs, **options))
    x = fa3.quantize_fp8(*inputs, smooth_k=True)
    check_ordinary(x.q_descale, x.k_descale, x.v_descale, x.transform.k_mean)
    assert not any(y._is_view() for y in (x.q, x.k, x.v))


# --- numbers and flags of numpy's


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.array])
def test_numpy_softmax_scale(kind):
    q, k, v = Case().inputs(torch.bfloat16, "cpu")
    scale = kind(0.25)
    assert torch.equal(fa3.flash_attn_func(q, k, v, scale), fa3.flash_attn_func(q, k, v, 0.25))
    for function in (fa3.flash_attn_fp8_func, lambda *x, **options: fa3.validate_fp8(*x, **options).rmse):
        assert torch.equal(function(q, k, v, softmax_scale=scale), function(q, k, v, softmax_scale=0.25))
    as_a_model_writes_it = 1 / np.sqrt(q.shape[-1])
    assert torch.equal(fa3.flash_attn_func(q, k, v, as_a_model_writes_it), fa3.flash_attn_func(q, k, v))
    assert torch.equal(fa3.flash_attn_func(q, k, v, np.int64(2)), fa3.flash_attn_func(q, k, v, 2))


@pytest.mark.parametrize("kind", [np.bool_, np.array])
def test_numpy_flags(kind):
    yes, no = kind(True), kind(False)
    q, k, v = Case().inputs(torch.bfloat16, "cpu")
    expected = fa3.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(fa3.flash_attn_func(q, k, v, causal=yes, deterministic=no), expected)
    assert len(fa3.flash_attn_func(q, k, v, return_lse=yes)) == 2
    assert fa3.explain(q, k, v, causal=yes, v_transposed=no) == fa3.explain(q, k, v, causal=True)
    options = {"incoherent": False, "smooth_k": True, "rotary_interleaved": False}
    of_numpy = {name: kind(value) for name, value in options.items()}
    expected = fa3.flash_attn_fp8_func(q, k, v, causal=True, **options)
    got = fa3.flash_attn_fp8_func(q, k, v, causal=yes, return_lse=no, straight_through=no, **of_numpy)
    assert torch.equal(got, expected)
    x = fa3.quantize_fp8(q, k, v, v_transposed=yes)
    assert x.v.shape == (2, 2, 64, 256)
    scales = {"q_descale": x.q_descale, "k_descale": x.k_descale, "v_descale": x.v_descale}
    assert fa3.flash_attn_func(x.q, x.k, x.v, **scales, v_transposed=yes).shape == q.shape


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.array])
def test_numpy_integers(kind):
    q, k, v = Case().inputs(torch.bfloat16, "cpu")
    got = fa3.flash_attn_func(q, k, v, window_size=(kind(-1), kind(0)), attention_chunk=kind(0), num_splits=kind(1))
    assert torch.equal(got, fa3.flash_attn_func(q, k, v, causal=True))
    x, expected = fa3.quantize_fp8(q, k, v, seed=kind(3), block_size=kind(128)), fa3.quantize_fp8(q, k, v, seed=3)
    assert torch.equal(x.q.float(), expected.q.float())
    assert type(x.transform.seed) is int


class _Deterministic(TorchDispatchMode):
    """The last argument of each op of fa3 that ran; torch leaves out what equals its default, False."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fa3":
            self.seen[func] = len(args) == len(func._schema.arguments) and args[-1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("argument", [False, True])
@pytest.mark.parametrize("of_torch", [False, True])
def test_deterministic_reaches_the_backward(argument, of_torch):
    """Asked for by the argument, or by torch's own switch when the forward runs."""
    q, k, v = (x.requires_grad_() for x in Case().inputs(torch.bfloat16, "cpu"))
    with _Deterministic() as ops_of_fa3:
        torch.use_deterministic_algorithms(of_torch)
        try:
            out = fa3.flash_attn_func(q, k, v, deterministic=argument)
        finally:
            torch.use_deterministic_algorithms(False)
        out.sum().backward()
    expected = argument or of_torch
    assert ops_of_fa3.seen == {ops.portable_fwd: expected, ops.portable_bwd: expected}


def test_meta_tensors():
    q, k, v = (x.to("meta") for x in Case(seqlen_k=300).inputs(torch.float16, "cpu"))
    out, lse = fa3.flash_attn_func(q, k, v, return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (2, 2, 129), torch.float32)


# --- backend


def test_backend_nests_and_restores():
    assert current_backend() == "auto"
    with fa3.backend("portable"):
        with fa3.backend("hopper"):
            assert current_backend() == "hopper"
            with pytest.raises(KeyError), fa3.backend("auto"):
                raise KeyError
            assert current_backend() == "hopper"
        assert current_backend() == "portable"
    assert current_backend() == "auto"


def test_backend_blocks_that_overlap():
    """Each takes back its own choice, and finds it among equal ones: in every order of leaving, as threads have it."""
    names = ("portable", "hopper", "portable")
    for order in itertools.permutations(range(3)):
        blocks = [fa3.backend(name) for name in names]
        for block in blocks:
            block.__enter__()
        left = list(range(3))
        for leaving in order:
            blocks[leaving].__exit__(None, None, None)
            left.remove(leaving)
            assert current_backend() == (names[left[-1]] if left else "auto")


def test_backend_blocks_of_many_threads():
    def enter_and_leave(name: str) -> None:
        for _ in range(2000):
            with fa3.backend(name):
                current_backend()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(enter_and_leave, ["portable", "hopper"] * 4))
    assert current_backend() == "auto"


def test_backend_refuses_other_names():
    with pytest.raises(ValueError, match="backend: name must be one of auto, portable, hopper, got 'cuda'"):
        fa3.backend("cuda").__enter__()
    assert current_backend() == "auto"


def test_backend_from_the_environment():
    show = "import fa3; from fa3._backend import current_backend; print(current_backend())"
    assert run_python(show, FA3_BACKEND="portable").stdout == "portable\n"
    refused = run_python(show, FA3_BACKEND="fast")
    assert refused.stderr.endswith("ValueError: FA3_BACKEND must be one of auto, portable, hopper, got 'fast'\n")


def test_availability():
    reason = fa3.unavailable_reason()
    assert fa3.is_available() is (reason is None)
    assert reason is None or len(reason) > 10


# --- the ops of the compiled library


def test_ops_are_defined_where_the_library_is_loaded(tmp_path):
    """Their schemas, shapes and derivatives come from Python: here beside a library that implements none of them."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    package = shutil.copytree(Path(fa3.__file__).parent, tmp_path / "fa3", ignore=shutil.ignore_patterns("*.so"))
    (tmp_path / "empty.c").write_text("int fa3_nothing;\n")
    subprocess.run([compiler, "-shared", "-fPIC", tmp_path / "empty.c", "-o", package / "_C.abi3.so"], check=True)
    code = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
import fa3
from fa3 import _backend, ops

_backend._hopper_refusal = lambda device_index: None
for name in ("fwd", "bwd", "fwd_fp8", "quantize_fp8"):
    op, twin = getattr(ops, name), getattr(ops, f"portable_{name}")
    assert str(op._schema).replace("fa3::", "fa3::portable_") == str(twin._schema), op._schema
with FakeTensorMode():
    q, k, v = (torch.empty(2, n, 2, 64, dtype=torch.bfloat16, device="cuda:0", requires_grad=True) for n in (5, 7, 7))
    out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert out.requires_grad and lse.requires_grad
    grads = ops.bwd(out, lse, q, k, v, out, lse, 0.125, -1, 0, 0, False)
    print(tuple(out.shape), tuple(lse.shape), *(tuple(x.shape) for x in grads))
    (q8, q_descale, _), (k8, k_descale, _) = (ops.quantize_fp8(x, *[None] * 3, False, False, 128) for x in (q, k))
    scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": k_descale}
    print(tuple(fa3.flash_attn_func(q8, k8, k8, **scales).shape))
print(fa3.checkpoint_save_ops() == [ops.portable_fwd, ops.fwd, ops.portable_fwd_fp8, ops.fwd_fp8])
"""
    result = run_python(code, folder=tmp_path, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert result.stdout.splitlines() == [
        "(2, 5, 2, 64) (2, 2, 5) (2, 5, 2, 64) (2, 7, 2, 64) (2, 7, 2, 64)",
        "(2, 5, 2, 64)",
        "True",
    ], result.stderr


# --- explain


def test_explain_sdpa():
    q, k, v = Case().inputs(torch.bfloat16, "cpu")
    explanation = fa3.explain(q, k, v, causal=True)
    assert (explanation.path, explanation.backward) == ("sdpa-cpu", "portable")
    assert "square causal" in str(explanation)


def test_explain_portable():
    q, k, v = Case(seqlen_q=100, seqlen_k=300).inputs(torch.bfloat16, "cpu")
    explanation = fa3.explain(q, k, v, causal=True)
    assert (explanation.path, explanation.tile) == ("portable", (100, 300))
    assert "path      portable\nbackward  portable\ntile      100 queries x 300 keys" in str(explanation)
    with fa3.backend("portable"):
        assert 'the backend is "portable"' in str(fa3.explain(q, k, v, causal=True))


def test_explain_refusal():
    q, k, v = Case().inputs(torch.bfloat16, "cpu")
    with fa3.backend("hopper"):
        explanation = fa3.explain(q, k, v)
    assert (explanation.path, explanation.backward) == ("refused", None)
    assert "need CUDA tensors" in str(explanation)


def test_one_query_is_causal_or_not():
    """Causal hides nothing from a single query: the same path, and results that are equal to the bit."""
    q, k, v = Case(seqlen_q=1, seqlen_k=300).inputs(torch.bfloat16, "cpu")
    assert fa3.explain(q, k, v, causal=True) == fa3.explain(q, k, v)
    assert torch.equal(fa3.flash_attn_func(q, k, v, causal=True), fa3.flash_attn_func(q, k, v))


def test_explain_checks_its_arguments():
    q, k, v = Case().inputs(torch.bfloat16, "cpu")
    with pytest.raises(ValueError, match=re.escape("v.shape[1] (seqlen_k) must equal k.shape[1] = 129, got 128")):
        fa3.explain(q, k, v[:, 1:])


def test_explain_hopper(monkeypatch):
    """The arithmetic of a Hopper call, with a table of kernels and a device that are made up."""
    table = [
        {"name": f"{name}_bf16_hdim{d}", "pass": name, "dtype": "bf16", "head_dim": d, "tile_m": m, "tile_n": n}
        for name, d, m, n in (("fwd", 64, 128, 192), ("fwd", 128, 128, 176), ("bwd", 128, 64, 128))
    ]
    monkeypatch.setattr("fa3._library.kernel_table", lambda: table)
    module = sys.modules["fa3._explain"]
    monkeypatch.setattr("fa3._backend.choose_path", lambda device, function: "hopper")
    rows = {64: (0, -1), 72: (1, 2), 136: (-1, -1)}
    monkeypatch.setattr(module, "_selected_rows", lambda q, *others: rows[q.shape[3]])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a Hopper GPU")
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    case = Case(seqlen_q=300, num_heads_q=6, head_dim=72, layout="unaligned")
    explanation = fa3.explain(*case.inputs(torch.bfloat16, "cpu"))
    assert (explanation.path, explanation.backward) == ("hopper", "hopper")
    assert (explanation.kernel, explanation.tile) == (table[1], (128, 176))
    assert explanation.backward_kernel == table[2]
    assert (explanation.num_m_blocks, explanation.num_tiles, explanation.grid) == (3, 36, 36)
    assert [copy[0] for copy in explanation.copies] == ["q", "k", "v"]
    assert "head_dim 72 runs as 128" in str(explanation)
    assert "bwd_bf16_hdim128" in str(explanation)
    assert "in tiles of 64 queries x 128 keys, head_dim 128" in str(explanation)
    assert not fa3.explain(*Case(head_dim=72).inputs(torch.bfloat16, "cpu")).copies
    assert fa3.explain(*Case(head_dim=72).inputs(torch.float32, "cpu")).path == "refused"

    no_backward = fa3.explain(*Case(head_dim=64).inputs(torch.bfloat16, "cpu"))
    assert (no_backward.path, no_backward.backward, no_backward.backward_kernel) == ("hopper", "refused", None)
    assert "this build has no backward kernel for head_dim 64" in str(no_backward)
    nothing = fa3.explain(*Case(head_dim=136).inputs(torch.bfloat16, "cpu"))
    assert (nothing.path, nothing.backward) == ("refused", None)
    empty = fa3.explain(*Case(head_dim=72, seqlen_k=0).inputs(torch.bfloat16, "cpu"))
    assert (empty.path, empty.backward, empty.kernel) == ("hopper", "hopper", None)


# --- FLOP counts and imports


def test_flop_counter():
    """Forward 4 and backward 10 FLOPs per visible pair and element of head_dim."""
    q, k = torch.randn(3, 2, 4, 16, requires_grad=True), torch.randn(3, 5, 2, 16)
    with FlopCounterMode(display=False) as counter:
        fa3.flash_attn_func(q, k, k, causal=True).sum().backward()
    pairs = 3 * 4 * (4 + 5)
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    assert counts == {"fa3.portable_fwd": 4 * pairs * 16, "fa3.portable_bwd": 10 * pairs * 16}


def test_import_is_cheap():
    """`import fa3` brings nothing of weight that torch with its FLOP counter has not brought."""
    code = """
import sys, time, torch, torch.utils.flop_counter
before, start = set(sys.modules), time.perf_counter()
import fa3
print(time.perf_counter() - start)
print(*(set(sys.modules) - before))
"""
    seconds, modules = run_python(code).stdout.splitlines()
    assert {name.partition(".")[0] for name in modules.split()} <= {"fa3"} | set(sys.stdlib_module_names)
    assert float(seconds) < 1.0
