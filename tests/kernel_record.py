"""The record of what the compiler made of every kernel: opcode counts, shapes of WGMMA, registers.

    python tests/kernel_record.py           compares the built library with tests/kernel_record.json
    python tests/kernel_record.py --write   writes that file anew
    python tests/kernel_record.py A.o B.o   compares two object files (or libraries), for a look at one kernel

A change of the source that should not change the machine code is held to that; one that should is seen to, and the
commit says what it gave. A counts file is only comparable with code of the same compiler, which it names.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from sass import Instruction, read_registers, read_sass

RECORD = Path(__file__).with_suffix(".json")


def opcode_counts(code: list[Instruction]) -> dict[str, int]:
    """How often each opcode occurs: with its shape and types for WGMMA, else without modifiers. NOPs only pad."""
    names = (x.name if "GMMA" in x.name else x.name.split(".")[0] for x in code)
    return dict(sorted(Counter(name for name in names if name != "NOP").items()))


def records(path: Path) -> dict[str, dict[str, Any]]:
    """A record for each kernel of a library or an object file, by symbol."""
    registers = read_registers(path)
    return {
        symbol: {"registers": registers[symbol], "opcodes": opcode_counts(code)}
        for symbol, code in read_sass(path).items()
    }


def library_record() -> dict[str, Any]:
    """The record of the library that is built, its kernels named as a reader knows them."""
    from fa3 import _library

    report, found = _library.build_report(), records(_library.LIBRARY)
    names = {row["symbol"]: row["name"] for row in report["kernels"]}
    names |= {row["symbol"]: f"{row['name']}/{function_name(row['symbol'])}" for row in report["helper_kernels"]}
    return {"nvcc": report["nvcc"], "kernels": {names[symbol]: record for symbol, record in sorted(found.items())}}


def function_name(symbol: str) -> str:
    """The function of a mangled symbol, with the width that the quantizer's kernels are made for."""
    name = re.search(r"[a-z][a-z_]+8?_kernel", symbol)[0]
    width = re.search(r"QuantizeConfig.*?ELi(\d+)E", symbol)
    return f"{name}_{width[1]}" if width else name


def differences(old: dict[str, dict], new: dict[str, dict]) -> list[str]:
    """One line for each kernel whose record changed, is new or is gone."""
    lines = []
    for name in sorted(old.keys() | new.keys()):
        if name not in old or name not in new:
            lines.append(f"{name}: {'new' if name not in old else 'gone'}")
        elif old[name] != new[name]:
            lines.append(f"{name}: {describe_change(old[name], new[name])}")
    return lines


def describe_change(old: dict[str, Any], new: dict[str, Any]) -> str:
    before, after = Counter(old["opcodes"]), Counter(new["opcodes"])
    changed = [f"{op} {before[op]} -> {after[op]}" for op in sorted(before | after) if before[op] != after[op]]
    if old["registers"] != new["registers"]:
        changed.insert(0, f"registers {old['registers']} -> {new['registers']}")
    return f"{before.total()} -> {after.total()} instructions; " + ", ".join(changed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("objects", nargs="*", type=Path, metavar="OBJECT", help="two files to compare")
    parser.add_argument("--write", action="store_true", help=f"write {RECORD.name}")
    arguments = parser.parse_args()
    if arguments.objects:
        # By function: types and namespaces, which a symbol names too, may have other names now.
        old, new = ({function_name(symbol): r for symbol, r in records(path).items()} for path in arguments.objects)
    elif arguments.write:
        RECORD.write_text(json.dumps(library_record(), indent=1) + "\n")
        return 0
    else:
        new_record, record = library_record(), json.loads(RECORD.read_text())
        if new_record["nvcc"] != record["nvcc"]:
            print(f"the record is of nvcc {record['nvcc']}, the library of {new_record['nvcc']}")
            return 2
        old, new = record["kernels"], new_record["kernels"]
    lines = differences(old, new)
    print("\n".join(lines) or f"{len(new)} kernels, as recorded")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.exit(main())
