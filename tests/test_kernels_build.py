"""The compiled kernels, read without a GPU: ptxas's report and the SASS. Both show what a slow kernel does not say."""

from __future__ import annotations

import functools
import json
import os
import re

import kernel_record
import pytest
from cuda_tools import find_tool
from sass import Instruction, architectures, read_sass
from tiles import BWD_TILES, FWD_FP8_TILES, FWD_TILES, BwdTile, FwdTile

from fa3 import _library

# What ptxas writes where it gave up a pipeline of WGMMAs or setmaxnreg, and so most of the speed. C7517 (a wait) and
# C7519 (an arrive) are harmless in themselves; the SASS shows where a wait is one too many.
BAD_MESSAGES = re.compile(r"\bC75(0[89]|1[0-6]|18|20)\b")
ENTRY_REGISTERS = {2: 168, 3: 128}  # per thread, by consumer warpgroups: 64 K by all threads, rounded down to 8
QUANTIZERS = [(element, width) for element in ("bfloat16_t", "half_t") for width in (64, 128, 256)]
KERNELS = [kernel["name"] for kernel in _library.build_report().get("kernels", [])]


def missing(reason: str) -> None:
    """Skips; with FA3_REQUIRE_KERNELS=1, as in CI, fails."""
    if os.environ.get("FA3_REQUIRE_KERNELS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(autouse=True)
def _built():
    if not _library.is_loaded():
        missing(f"needs the compiled library: {_library.unavailable_reason()}")


def each(pattern: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [name for name in KERNELS if re.match(pattern, name)] or ["none"])


each_kernel, each_forward, each_backward = each(""), each("fwd_(bf|fp)16"), each("bwd_")
each_fp8_forward = each("fwd_e4m3")


def kernel(name: str) -> dict:
    """Its row of the table."""
    row = next((row for row in _library.kernel_table() if row["name"] == name), None)
    return row or missing(f"the library has no kernel {name!r}")


def tile_of(name: str) -> FwdTile | BwdTile:
    """Its row of csrc/fwd/tiles.h or csrc/bwd/tiles.h: fwd_bf16_hdim128_long is made from fwd::kHdim128Long."""
    direction, dtype, tile = name.split("_", 2)
    if dtype == "e4m3":
        return FWD_FP8_TILES[tile]
    return {"fwd": FWD_TILES, "bwd": BWD_TILES}[direction][tile]


# --- ptxas


def test_report_and_library_hold_the_same_kernels():
    assert len(KERNELS) > 0
    assert sorted(KERNELS) == sorted(row["name"] for row in _library.kernel_table())


def test_no_bad_messages():
    messages = _library.build_report()["ptxas_messages"]
    assert not [message for message in messages if BAD_MESSAGES.search(message)]


@each_kernel
def test_no_spills(name):
    row = kernel(name)
    assert (row["stack_bytes"], row["spill_stores_bytes"], row["spill_loads_bytes"]) == (0, 0, 0)


def test_no_spills_in_the_helpers():
    """The kernels that the backward runs before and after the main one, and the quantizer's."""
    rows = _library.build_report()["helper_kernels"]
    assert len(rows) >= 2 * sum(name.startswith("bwd_") for name in KERNELS) + len(QUANTIZERS)
    for row in rows:
        assert (row["stack_bytes"], row["spill_stores_bytes"], row["spill_loads_bytes"]) == (0, 0, 0), row


@each_kernel
def test_registers_at_entry(name):
    row = kernel(name)
    assert row["registers"] == ENTRY_REGISTERS[row["consumer_warpgroups"]]


@each_kernel
def test_tile_is_the_sources(name):
    """The library is not older than the tiles.h, as far as that shows."""
    row, tile = kernel(name), tile_of(name)
    assert (row["head_dim"], row["tile_m"], row["tile_n"]) == (tile.head_dim, tile.tile_m, tile.tile_n)
    if row["pass"] == "fwd":
        assert (row["stages"], row["consumer_warpgroups"]) == (tile.stages_kv, tile.consumer_warpgroups)
    else:
        assert row["stages"] == tile.stages_q


# --- SASS


@functools.cache
def all_sass() -> dict[str, list[Instruction]]:
    """The instructions of every kernel in the library, by symbol."""
    if find_tool("cuobjdump") is None:
        missing("needs cuobjdump (pip install nvidia-cuda-cuobjdump)")
    return read_sass(_library.LIBRARY)


def test_architecture():
    assert all_sass()
    assert architectures(_library.LIBRARY) == {"sm_90a"}


def test_machine_code_is_as_recorded():
    """tests/kernel_record.py: a change of the code that changes the machine code has to say so."""
    all_sass()
    new, recorded = kernel_record.library_record(), json.loads(kernel_record.RECORD.read_text())
    if new["nvcc"] != recorded["nvcc"]:
        pytest.skip(f"the record is of nvcc {recorded['nvcc']}, and this library is of {new['nvcc']}")
    built = {name: row for name, row in recorded["kernels"].items() if name in new["kernels"]}
    assert len(built) == len(new["kernels"])
    assert kernel_record.differences(built, new["kernels"]) == []


def sass(name: str) -> list[Instruction]:
    return all_sass()[kernel(name)["symbol"]]


def count(instructions: list[Instruction], prefix: str) -> int:
    return sum(x.name.startswith(prefix) for x in instructions)


def innermost_loop(code: list[Instruction], inside: Instruction) -> list[Instruction]:
    """The shortest loop around an instruction."""
    loops = []
    for x in code:
        if match := re.search(r"\bBRA\b.* 0x([0-9a-f]+)$", x.text):
            target = int(match[1], 16)
            if target <= inside.address <= x.address:
                loops.append((x.address - target, target, x.address))
    _, begin, end = min(loops)
    return [x for x in code if begin <= x.address <= end]


def main_loops(name: str) -> list[list[Instruction]]:
    """The loops over the blocks in between: the innermost ones around a wait for S with P V still in flight.

    The source has one; ptxas may peel it.
    """
    code = sass(name)
    loops = [innermost_loop(code, x) for x in code if is_wait(x, 1)]
    assert 1 <= len(loops) <= (1 if tile_of(name).drains else 2)
    return loops


def copies_of_gemms(name: str) -> int:
    """How often csrc/fwd/schedule_overlapped.cuh issues Q K^T in the code, and so often P V.

    Q K^T in a first block that is alone, P V in a last one that is alone, both in the blocks in between, and both where
    the last block of one tile and the first of the next go together.
    """
    return 1 + len(main_loops(name)) + (not tile_of(name).drains)


def is_wait(x: Instruction, groups: int) -> bool:
    """Whether x waits until at most this many groups of WGMMAs are in flight."""
    return x.name.startswith("WARPGROUP.DEPBAR") and x.text.endswith(f"gsb0, 0x{groups}")


def groups_of_wgmmas(code: list[Instruction]) -> int:
    """How many groups there are; asserts that there is no wait inside of one."""
    groups, inside = 0, False
    for x in code:
        if x.name.startswith("HGMMA"):
            groups += not inside
            inside = "gsb0" not in x.text  # the last of a group signals it
        else:
            assert not (inside and x.name.startswith("WARPGROUP.DEPBAR")), f"wait at {x.address:#x} inside a group"
    return groups


def test_no_local_memory():
    """Neither in the kernels of the table nor in their helpers."""
    for symbol, code in all_sass().items():
        assert count(code, "LDL") == count(code, "STL") == 0, symbol


@each_kernel
def test_registers_move_between_warpgroups(name):
    assert count(sass(name), "USETMAXREG.DEALLOC") == count(sass(name), "USETMAXREG.TRY_ALLOC") == 1


# --- SASS of the forward


@each_forward
def test_wgmma_instructions(name):
    """As many as the tile needs, in the widest shape; CUTLASS without its extended shapes takes many more."""
    row, copies = kernel(name), copies_of_gemms(name)
    element = {"bf16": ".BF16", "fp16": ""}[row["dtype"]]
    shapes: dict[str, int] = {}
    for n, gemms in ((row["tile_n"], row["head_dim"] // 16), (row["head_dim"], row["tile_n"] // 16)):
        shape = f"HGMMA.64x{n}x16.F32{element}"
        shapes[shape] = shapes.get(shape, 0) + gemms * copies
    found = [x.name for x in sass(name) if x.name.startswith("HGMMA")]
    assert {shape: found.count(shape) for shape in found} == shapes


@each_forward
def test_wgmmas_are_not_serialized(name):
    """One wait for each first, last or shared block, two in a loop, and none inside a group of WGMMAs."""
    code, copies, loops = sass(name), copies_of_gemms(name), len(main_loops(name))
    waits = [x for x in code if x.name.startswith("WARPGROUP.DEPBAR")]
    assert sum(is_wait(x, 1) for x in waits) == loops
    assert sum(is_wait(x, 0) for x in waits) == len(waits) - loops == copies + 1
    assert groups_of_wgmmas(code) == 2 * copies


@each_forward
def test_main_loops(name, record_property):
    """One Q K^T, one P V, two waits, and few registers moved to the uniform file."""
    row = kernel(name)
    gemms = row["head_dim"] // 16 + row["tile_n"] // 16
    for loop in main_loops(name):
        assert count(loop, "HGMMA") == gemms
        assert count(loop, "WARPGROUP.DEPBAR") == 2
        assert count(loop, "LDL") == count(loop, "STL") == count(loop, "CALL") == 0
        # The descriptors of a head_dim of 256 are more than the uniform registers hold; elsewhere one is enough.
        assert count(loop, "R2UR") <= (3 * gemms if row["head_dim"] == 256 else gemms // 2)
        wait_s, wait_o = (next(i for i, x in enumerate(loop) if is_wait(x, groups)) for groups in (1, 0))
        overlapped, exponentials = count(loop[wait_s:wait_o], "MUFU.EX2"), count(loop, "MUFU.EX2")
        assert exponentials >= row["tile_n"] // 2  # two rows, a quarter of the columns
        summary = f"{overlapped} of {exponentials} MUFU.EX2 before the wait for P V, {len(loop)} instructions"
        record_property("main_loop", summary)
        print(f"{name}: {summary}, {count(loop, 'R2UR')} R2UR")


@each_forward
def test_tma_moves_the_tiles(name):
    """Loads of Q, K and V and stores of O, 64 columns each or fewer; lse is all that is written another way."""
    row = kernel(name)
    slabs = -(-row["head_dim"] // 64)
    assert count(sass(name), "UTMALDG.5D") >= (row["consumer_warpgroups"] + 2) * slabs
    assert count(sass(name), "UTMASTG.5D") >= slabs
    stores = [x.name for x in sass(name) if re.match(r"ST[GL]?\b", x.name)]
    assert len(stores) <= 2 * copies_of_gemms(name)  # two rows of lse
    assert count(sass(name), "LDG") == 0


# --- SASS of the FP8 forward


def groups_of_qgmmas(code: list[Instruction]) -> list[list[str]]:
    """The FP8 products, group by group; asserts that there is no wait inside of one."""
    groups, inside = [], False
    for x in code:
        if x.name.startswith("QGMMA"):
            if not inside:
                groups.append([])
            groups[-1].append(x.name)
            inside = "gsb0" not in x.text  # the last of a group signals it
        else:
            assert not (inside and x.name.startswith("WARPGROUP.DEPBAR")), f"wait at {x.address:#x} inside a group"
    return groups


@each_fp8_forward
def test_both_products_are_fp8(name):
    """Q K^T over head_dim and P V over the keys, 32 at a time, and nothing in 16 bits."""
    tile, code = tile_of(name), sass(name)

    def products(columns: int, depth: int) -> list[str]:
        return [f"QGMMA.64x{columns}x32.F32.E4M3.E4M3"] * (depth // 32)

    part, last = (products(tile.pv_columns + sums, tile.tile_n) for sums in (0, 8))  # of P's rows
    parts = tile.head_dim // tile.pv_columns
    # S of the first block and of the others, and of two warpgroups that of the next tile's first; P V in its parts, or
    # with the next S and of the last block.
    pv = [last] * 2 if tile.overlaps else [part] * (parts - 1) + [last]
    expected = [products(tile.tile_n, tile.head_dim)] * (3 if tile.consumer_warpgroups == 2 else 2) + pv
    assert sorted(groups_of_qgmmas(code)) == sorted(expected)
    assert count(code, "HGMMA") == 0


@each_fp8_forward
def test_v_is_transposed_in_shared_memory(name):
    """By ldmatrix.trans, byte permutations and stmatrix, 32 keys of 16 channels at a time, in a loop for each warp."""
    tile, code = tile_of(name), sass(name)
    loads = [x for x in code if x.name.startswith("LDSM.16.MT88.4")]
    if tile.v_transposed:
        assert not loads  # it comes so
        return
    assert len(loads) == tile.tile_n // 32 * tile.head_dim // 16
    loops = {loop[0].address: loop for loop in (innermost_loop(code, x) for x in loads)}
    assert len(loops) == 3
    for loop in loops.values():
        num_loads = count(loop, "LDSM.16.MT88.4")
        assert count(loop, "STSM.16.M88.4") == num_loads
        assert count(loop, "PRMT") == 4 * num_loads
        assert len(loop) < 7 * num_loads + 100  # without address arithmetic


# --- SASS of the backward


def step_loops(name: str) -> list[list[Instruction]]:
    """The innermost loops that issue WGMMAs, each once: the steps of a consumer warpgroup.

    ptxas puts the spinning of waits at the end of the code, from where it branches back: what lies between looks like a
    loop too, but one that begins inside of another and ends outside of it.
    """
    loops = {}
    for x in sass(name):
        if x.name.startswith("HGMMA") and (loop := innermost_loop(sass(name), x)):
            loops[loop[0].address] = loop
    spans = [(loop[0].address, loop[-1].address) for loop in loops.values()]
    nested = [
        loop
        for loop, (begin, end) in zip(loops.values(), spans, strict=True)
        if not any(other_begin < begin <= other_end < end for other_begin, other_end in spans)
    ]
    return [loop for loop in nested if not any(other is not loop and other[0] in loop for other in nested)]


@each_backward
def test_backward_step(name, record_property):
    """The products of a step, none inside of another; with narrow heads no wait for all of them."""
    row, tile = kernel(name), tile_of(name)
    element = {"bf16": ".BF16", "fp16": ""}[row["dtype"]]
    shapes = {x.name for x in sass(name) if x.name.startswith("HGMMA")}
    assert all(re.fullmatch(rf"HGMMA\.64x\d+x16\.F32{re.escape(element)}", shape) for shape in shapes), shapes
    loops = step_loops(name)
    if row["head_dim"] <= 128:  # csrc/bwd/consumer.cuh: S, dP, dV, dK, dQ
        assert [groups_of_wgmmas(loop) for loop in loops] == [5]
        assert not any(is_wait(x, 0) for x in loops[0])
    else:  # csrc/bwd/consumer_split.cuh: S, dV, or dP, dK, and each half of dQ in slices
        slices = row["head_dim"] // 2 // tile.dq_columns
        assert [groups_of_wgmmas(loop) for loop in loops] == [2 + slices, 2 + slices]
    exponentials = row["tile_m"] * row["tile_n"] // 128  # per thread of the warpgroups that have S
    if row["head_dim"] <= 128:
        exponentials //= 2
    assert sum(count(loop, "MUFU.EX2") for loop in loops) == exponentials
    for loop in loops:
        summary = f"{count(loop, 'HGMMA')} HGMMA, {count(loop, 'R2UR')} R2UR, {len(loop)} instructions"
        record_property("step", summary)
        print(f"{name}: {summary}")


@each_backward
def test_dq_writer_adds_in_bulk(name):
    """dQ is added to global memory by TMA alone: no atomic and no reduction of the threads touches it."""
    names = {x.name.split(".")[0] for x in sass(name)}
    assert "UBLKRED" in names
    assert not names & {"RED", "REDG", "REDS", "ATOM", "ATOMG"}


@each_backward
def test_tma_moves_the_tiles_of_the_backward(name):
    """Loads of Q, K, V and dO, bulk copies of lse and D, and stores of dK and dV."""
    slabs = -(-kernel(name)["head_dim"] // 64)
    assert count(sass(name), "UTMALDG.5D") >= 4 * slabs
    assert count(sass(name), "UTMASTG.5D") >= 2 * slabs
    assert count(sass(name), "UBLKCP") >= 2


# --- SASS of the quantizer, which is part of every build


def quantizer(function: str, element: str, width: int) -> str:
    """The symbol of quantize_fp8_kernel or column_sums_kernel."""
    wanted = re.compile(rf"{function}.*QuantizeConfig.*{element}ELi{width}E")
    found = [row["symbol"] for row in _library.build_report()["helper_kernels"] if wanted.search(row["symbol"])]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize(("element", "width"), QUANTIZERS)
def test_quantizer(element, width):
    """Stages of the Hadamard transform that are shuffled, half of the values each, and rows that TMA moves."""
    names = [x.name for x in all_sass()[quantizer("quantize_fp8_kernel", element, width)]]
    shuffled_stages = {64: 0, 128: 1, 256: 2}[width]
    assert sum(name.startswith("SHFL.BFLY") for name in names) == 32 * shuffled_stages
    assert sum("SATFINITE.E4M3" in name for name in names) == 64 // 2
    slabs = width // 64  # of x, of cosines and of sines: before the loop and in it
    assert sum(name.startswith("UTMALDG.5D") for name in names) == 2 * 3 * slabs
    assert sum(name.startswith("UTMASTG.5D") for name in names) == -(-width // 128) + 1  # rows, transposed V
    assert sum(name.startswith("STG") for name in names) <= 2  # descale
    assert (names.count("LDSM.16.MT88.4"), names.count("STSM.16.M88.4")) == (4, 4)


@pytest.mark.parametrize(("element", "width"), QUANTIZERS)
def test_quantizer_fills_an_sm(element, width):
    """512 threads per SM, as csrc/quantize/config.h has it, and no function called, which would cost registers."""
    for function in ("quantize_fp8_kernel", "column_sums_kernel"):
        symbol = quantizer(function, element, width)
        row = next(row for row in _library.build_report()["helper_kernels"] if row["symbol"] == symbol)
        assert row["registers"] <= 128
        assert not any(x.name.startswith("CALL") for x in all_sass()[symbol])
