"""Save a benchmark's results as records, and write the tables made of them into the docs.

Long tables are measured a part at a time. `results.json` in the benchmark's folder has every result
with its date and machine. The page in the docs is written from it.
"""

from __future__ import annotations

import contextlib
import json
import platform
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from planner.formats.files import write_text

ROOT = Path(__file__).resolve().parents[1]
ANCHORS = ROOT.parent / "shared" / "anchors"  # published numbers, where they are at hand
PAPERS = ROOT / "docs" / "papers.md"

T = TypeVar("T")


@contextlib.contextmanager
def printed(folder: Path, *, save: bool, name: str = "results.md") -> Iterator[None]:
    """Write what is printed within the context also into the folder's file, with date and machine,
    to save.
    """
    lines: list[str] = []

    class Both:
        def write(self, text: str) -> int:
            lines.append(text)
            return shown.write(text)

        def flush(self) -> None:
            shown.flush()

    shown = sys.stdout
    with contextlib.redirect_stdout(Both()):
        yield
    if save:
        header = f"{time.strftime('%Y-%m-%d')}, {environment()}.\n\n"
        write_text(folder / name, header + "".join(lines).strip() + "\n")


def environment() -> str:
    """Return the date, machine and versions that today's numbers belong to."""
    models = [
        line
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    cpu = f"{len(models)} x {models[0].split(': ')[1]}" if models else platform.machine()
    system = f"{platform.system()} {platform.release()}"
    return f"{cpu}, {system}, Python {platform.python_version()}, torch {version('torch')}"


class Results:
    """Results of one benchmark. Each part has a record per row, a dataclass of plain values.

    Args:
        folder: of the benchmark.
        save: whether to write each record when it is added, so that an interrupted run keeps its
            rows.
        machine: the text that each record has beside its date.
        name: of the file of records.
    """

    def __init__(
        self,
        folder: Path,
        *,
        save: bool,
        machine: str | None = None,
        name: str = "results.json",
    ) -> None:
        self._save = save
        self._machine = machine
        self._folder = folder
        self._path = folder / name
        self._parts: dict[str, dict[str, dict[str, Any]]] = {}
        if self._path.exists():
            self._parts = json.loads(self._path.read_text(encoding="utf-8"))

    def add(self, part: str, key: str, record: Any) -> None:
        """Replace the row's earlier result by today's."""
        about = {"date": time.strftime("%Y-%m-%d"), "environment": self._machine or environment()}
        self._parts.setdefault(part, {})[key] = about | asdict(record)
        if self._save:
            write_text(self._path, json.dumps(self._parts, indent=1) + "\n")

    def records(self, part: str, kind: type[T]) -> dict[str, T]:
        """Return the rows of a part, by key."""
        rows = self._parts.get(part, {})
        return {
            key: kind(
                **{
                    name: value
                    for name, value in row.items()
                    if name not in ("date", "environment")
                }
            )
            for key, row in rows.items()
        }

    def parts(self, name: str) -> list[str]:
        """Return the parts whose names begin like this, in the order in which they were first
        measured.
        """
        return [part for part in self._parts if part.startswith(name)]

    def measured(self, part: str, kind: type[T], rows: Iterable[tuple[str, T]]) -> dict[str, T]:
        """Add rows by their keys, and print each when it comes; return what tables show.

        That is these rows alone, or all of the part, if they are saved.
        """
        own: dict[str, T] = {}
        for key, row in rows:
            print(f"{key}: {row}", file=sys.stderr, flush=True)
            self.add(part, key, row)
            own[key] = row
        return self.records(part, kind) if self._save else own

    def about(self, part: str, keys: Collection[str] | None = None) -> str:
        """Return when and where the part was measured, or its rows of these keys."""
        dates: dict[str, set[str]] = {}
        for key, row in self._parts.get(part, {}).items():
            if keys is None or key in keys:
                dates.setdefault(row["environment"], set()).add(row["date"])
        return "; ".join(
            f"{', '.join(sorted(dates[machine]))}, {machine}" for machine in sorted(dates)
        )

    def show(self, text: str, picture: str = "") -> None:
        """Print the tables; to save, write them into the benchmark's section of the page about
        papers.

        Args:
            text: the tables.
            picture: Markdown that precedes them on the page.
        """
        print(text)
        if not self._save:
            return
        module = ".".join(self._folder.relative_to(ROOT / "benchmarks").parts)
        content = f"{picture}\n\n{text}" if picture else text
        write_between(PAPERS, marks(self._folder.name, module), content)


def marks(name: str, module: str | None = None) -> tuple[str, str]:
    """Return the comments in a page between which a benchmark writes; `module` where it has another
    name.
    """
    return f"<!-- {name}: written by benchmarks.{module or name} -->", f"<!-- end of {name} -->"


def write_between(page: Path, around: tuple[str, str], content: str) -> None:
    """Replace the text between its marks in a page."""
    write_text(page, between_marks(page.read_text(encoding="utf-8"), around, content))


def between_marks(page: str, around: tuple[str, str], content: str) -> str:
    """Return the page with the text between its marks replaced."""
    first, last = around
    before, rest = page.split(first)
    return f"{before}{first}\n\n{content}\n\n{last}{rest.split(last)[1]}"


def number(value: float | None) -> str:
    """Format a number for a table, with two decimals; None is empty."""
    return "" if value is None else f"{value:.2f}"


def share(value: float | None) -> str:
    """Format a share for a table, in per cent."""
    return "" if value is None else f"{value:.0%}"
