"""Write the stated numbers into the pages, between their marks.

<!--number: quickstart.speedup-->1.29<!--/-->      the number as pages show it
<!--date: quickstart.speedup-->2026-11-23<!--/-->  when it was measured
<!--table: all--> ... <!--/table-->                every number, with its kind and date
<!--table: gpu--> ... <!--/table-->                errors of estimates against published runs, a
                                                   line per source
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tabulate import tabulate

from benchmarks.headlines.numbers import Number, Stated
from benchmarks.headlines.parts import APART_SOURCES, NUMBERS, SOURCES
from benchmarks.kept import ROOT
from planner.formats.files import write_text

PAGES = tuple(ROOT / name for name in ("README.md", "docs/benchmarks.md", "docs/gpu-truth.md"))
_MARK = re.compile(r"(<!--(number|date):\s([\w. -]+?)-->).*?(<!--/-->)")
_TABLE = re.compile(r"(<!--table: (\w+)-->\n).*?(<!--/table-->)", re.DOTALL)
_GPU_SOURCES = tuple(f"gpu.{source}." for source in (*SOURCES, *APART_SOURCES))
_GPU_COLUMNS = {
    "rows": "rows",
    "mean": "mean absolute error",
    "median": "median",
    "calibrated": "calibrated on other rows",
    "by_job": "on other jobs",
    "tau": "tau",
    "regret": "regret",
    "worst_regret": "worst job",
    "memory": "memory of stages",
    "worst_memory": "worst stage",
}


def filled(page: str, stated: Mapping[str, Stated]) -> str:
    """Return the page with its marks filled from the stated numbers; a number that nobody stated is
    left as it is.
    """
    by_name = {number.name: number for number in NUMBERS}

    def one(found: re.Match[str]) -> str:
        if (known := stated.get(found[3])) is None:
            return found[0]
        return (
            found[1]
            + (known.date if found[2] == "date" else by_name[found[3]].shown(known.value))
            + found[4]
        )

    def table(found: re.Match[str]) -> str:
        made = gpu_table(stated) if found[2] == "gpu" else all_table(stated)
        return f"{found[1]}\n{made}\n\n{found[3]}"

    return _TABLE.sub(table, _MARK.sub(one, page))


def marked(page: str) -> set[str]:
    """Return the names of the numbers that a page states."""
    return {found[3] for found in _MARK.finditer(page)}


def write_pages(stated: Mapping[str, Stated]) -> list[Path]:
    """Fill all pages; return those that changed."""
    changed = []
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        if (new := filled(page, stated)) != page:
            write_text(path, new)
            changed.append(path)
    return changed


def all_table(stated: Mapping[str, Stated]) -> str:
    """Return every stated number but those of single GPU sources, which have a table of
    their own.
    """
    rows = [
        [number.what, number.shown(known.value), number.kind, known.date]
        for number in NUMBERS
        if (known := stated.get(number.name)) is not None
        and not number.name.startswith(_GPU_SOURCES)
    ]
    return tabulate(rows, ["what", "value", "kind", "date"], tablefmt="pipe", disable_numparse=True)


def gpu_table(stated: Mapping[str, Stated]) -> str:
    """Return a line per source of published runs."""
    by_name: dict[str, Number] = {number.name: number for number in NUMBERS}

    def cell(source: str, column: str) -> str:
        name = f"gpu.{source}.{column}"
        return by_name[name].shown(stated[name].value) if name in stated else ""

    apart = [source for source in APART_SOURCES if f"gpu.{source}.rows" in stated]
    rows = [
        [source, *(cell(source, column) for column in _GPU_COLUMNS)]
        for source in (*SOURCES, *apart)
    ]
    return tabulate(
        rows, ["source", *_GPU_COLUMNS.values()], tablefmt="pipe", disable_numparse=True
    )
