"""Re-measure every number that README, docs/benchmarks.md's first table and docs/gpu-truth.md
state.

python -m benchmarks.headlines            # compare; exit status 1 where one is worse by more than
                                          # its spread
python -m benchmarks.headlines --write    # and state today's numbers: headlines.json and the pages
python -m benchmarks.headlines --pages    # write the stated numbers into the pages; measure nothing
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from tabulate import tabulate

from benchmarks.headlines.alone import measure_alone
from benchmarks.headlines.numbers import compared, read_stated, write_stated, yardstick
from benchmarks.headlines.pages import write_pages
from benchmarks.headlines.parts import NUMBERS, PARTS, NotHereError
from benchmarks.kept import environment


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, compare, and write if asked; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.headlines",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts (default: all)"
    )
    parser.add_argument("--write", action="store_true", help="state today's numbers")
    parser.add_argument(
        "--pages", action="store_true", help="only write the stated numbers into the pages"
    )
    arguments = parser.parse_args(argv)
    if arguments.pages:
        for path in write_pages(read_stated()):
            print(path)
        return 0
    # Where a container sets it, each process compiles the package anew, as no user's does.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    print(f"{environment()}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    unit_s, found, failed, skipped = yardstick(), dict[str, float](), list[str](), list[str]()
    for name in arguments.only:
        began = time.monotonic()
        try:
            found |= measure_alone(name)
        except NotHereError as reason:
            skipped.append(f"{name}: {reason}")
        # the other parts still tell something, and the exit status tells of this one
        except RuntimeError as error:
            failed.append(str(error))
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    asked = [number for number in NUMBERS if number.name.partition(".")[0] in arguments.only]
    lines = list(compared(asked, read_stated(), found, unit_s))
    headers = ["number", "kind", "stated", "now", "verdict"]
    print(
        tabulate([line.row() for line in lines], headers, tablefmt="github", disable_numparse=True)
    )
    print(f"\nyardstick {unit_s:.3f} s: times that were stated on another machine are scaled by it")
    for line in (
        *(f"not measured: {each}" for each in skipped),
        *(f"failed: {each}" for each in failed),
    ):
        print(line)
    if arguments.write:
        write_stated(found, unit_s)
        write_pages(read_stated())
    return int(bool(failed) or any(line.verdict == "worse" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
