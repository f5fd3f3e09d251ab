"""Run `plan selftest`, and write its table into the README beside this file.

python -m benchmarks.selftest --save
python -m benchmarks.selftest --device cuda --save
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tabulate import tabulate

from benchmarks.kept import environment, marks, write_between
from planner.profiler.this_machine import keep_freed_pages
from planner.selfcheck.run import Row, SelftestReport, selftest

README = Path(__file__).with_name("README.md")


def main() -> int:
    """Run the self-test, print its table, and write it if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write the table into the README")
    arguments = parser.parse_args()
    keep_freed_pages()
    report = selftest(device=arguments.device, workers=arguments.workers, on_row=_show)
    print(str(report))
    if arguments.save:
        write_between(README, marks(f"selftest_{report.device}", "selftest"), section(report))
    return 0 if report.passed else 1


def section(report: SelftestReport) -> str:
    """Return the report as Markdown."""
    rows = [
        [row.check, row.name, row.result, row.found, f"{row.seconds:.0f}"] for row in report.rows
    ]
    table = tabulate(
        rows,
        ["check", "case", "result", "found", "seconds"],
        tablefmt="github",
        disable_numparse=True,
    )
    results = [row.result for row in report.rows]
    counts = ", ".join(
        f"{results.count(result)} {result}" for result in ("passed", "failed", "skipped")
    )
    about = f"{report.date}, {report.workers} workers, {environment()}."
    return f"{about}\n{counts}, in {report.seconds:.0f} s.\n\n{table}"


def _show(row: Row) -> None:
    print(f"{row.result:8}{row.check}: {row.name} ({row.seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
