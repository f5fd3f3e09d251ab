"""Cases that nobody chose, compared with their predictions: what benchmarks that draw and run them
share.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tabulate import tabulate

from benchmarks.kept import ROOT, Results, marks, write_between

CaseT = TypeVar("CaseT")
RowT = TypeVar("RowT", bound="Compared")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A case that was predicted and measured; `failure` where it did not run."""

    predicted_s: float = 0.0  # per minibatch
    measured_s: float = 0.0
    failure: str = ""

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_s / self.measured_s - 1


def compare(
    doc: str | None,
    module: str,
    kind: type[RowT],
    *,
    draw: Callable[[int, int], Sequence[CaseT]],
    words: Callable[[CaseT], Sequence[object]],
    run: Callable[[Sequence[CaseT], Sequence[int], float], Iterable[tuple[int, RowT]]],
    table: Callable[[Sequence[RowT], str], str],
    cases: int,
    seconds: float,
    page: Path | None = None,
    whole: bool = False,
) -> str | None:
    """Draw cases as the command line asks, run them, and print a table for each seed.

    To save, each row is kept when it has run, and the tables are written into a page between the
    marks of `module`.

    Args:
        doc: the benchmark's description.
        module: its name in this package, whose last part is the name of its results.
        kind: of the rows.
        draw: so many cases of a seed: the same for the same seed.
        words: of a case, for the list.
        run: those of all cases that have these numbers, for so many seconds each; yields each
            number with its row.
        table: of rows, and the text of when and where they were measured.
        cases: how many are drawn, by default.
        seconds: of each run, by default.
        page: the README of the folder, by default.
        whole: whether the page shows this seed alone, once all of its cases have run; else it shows
            all seeds.

    Returns:
        What was written into the page; None where nothing was.
    """
    arguments = _asked(doc, cases, seconds)
    drawn = draw(arguments.seed, arguments.cases)
    if arguments.list:
        print(tabulate([[number, *words(case)] for number, case in enumerate(drawn)]))
        return None
    folder, part = _folder_of(module), module.rpartition(".")[2]
    ran = run(drawn, range(len(drawn))[arguments.first : arguments.until], arguments.seconds)
    results = Results(folder, save=arguments.save)
    kept = results.measured(
        part, kind, ((f"{arguments.seed}:{number}", row) for number, row in ran)
    )
    own = [key for key in kept if key.startswith(f"{arguments.seed}:")]
    tables = []
    for seed in (
        [str(arguments.seed)] if whole else dict.fromkeys(key.partition(":")[0] for key in kept)
    ):
        keys = sorted(
            (key for key in kept if key.startswith(f"{seed}:")),
            key=lambda key: int(key.partition(":")[2]),
        )
        tables.append(
            table([kept[key] for key in keys], f"{results.about(part, keys)}, seed {seed}")
        )
    text = "\n\n".join(tables)
    print(text)
    if not arguments.save or (whole and len(own) < len(drawn)):
        return None
    write_between(page or folder / "README.md", marks(part, module), text)
    return text


def _folder_of(module: str) -> Path:
    """Return the innermost folder of a module's name: its results are there."""
    folder = ROOT / "benchmarks"
    for name in module.split("."):
        if (folder / name).is_dir():
            folder /= name
    return folder


def _asked(doc: str | None, cases: int, seconds: float) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, required=True, help="another one draws other cases")
    parser.add_argument(
        "--cases", type=int, default=cases, help="how many are drawn (default: %(default)s)"
    )
    parser.add_argument(
        "--first", type=int, default=0, help="continue with this one, counted from 0"
    )
    parser.add_argument("--until", type=int, help="stop before this one")
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="of each run, after its start-up"
    )
    parser.add_argument("--list", action="store_true", help="show the cases, and run none")
    parser.add_argument("--save", action="store_true", help="keep each run, and write the tables")
    return parser.parse_args()
