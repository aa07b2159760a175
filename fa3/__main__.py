"""`python -m fa3 [--json]`: what is installed here, whether the Hopper kernels can run, and which ones there are."""

from __future__ import annotations

import argparse
import json

from fa3 import _report


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m fa3", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON for other programs to read")
    options = parser.parse_args(arguments)
    report = _report.collect()
    print(json.dumps(report, indent=2) if options.json else _report.render(report))


if __name__ == "__main__":
    main()
