"""Cases that nobody chose, compared with their predictions: what benchmarks that draw and run them share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tabulate import tabulate


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


class Draw(Protocol):
    """Returns so many random cases, each in words: the same for the same seed."""

    def __call__(self, seed: int, count: int, /) -> Sequence[Sequence[object]]: ...


def asked(doc: str | None, in_words: Draw, *, cases: int, seconds: float) -> tuple[argparse.Namespace, range] | None:
    """Read the command line; return it and the numbers of the cases to run, or None if they were only to be listed.

    Args:
        doc: the benchmark's description.
        in_words: for the list.
        cases: how many are drawn, by default.
        seconds: of each run, by default.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True, help="another one draws other cases")
    parser.add_argument("--cases", type=int, default=cases, help="how many are drawn (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="continue with this one, counted from 0")
    parser.add_argument("--until", type=int, help="stop before this one")
    parser.add_argument("--seconds", type=float, default=seconds, help="of each run, after its start-up")
    parser.add_argument("--list", action="store_true", help="show the cases, and run none")
    parser.add_argument("--save", action="store_true", help="keep each run, and write the tables")
    arguments = parser.parse_args()
    if arguments.list:
        print(tabulate([[number, *words] for number, words in enumerate(in_words(arguments.seed, arguments.cases))]))
        return None
    end = arguments.cases if arguments.until is None else min(arguments.until, arguments.cases)
    return arguments, range(arguments.first, end)
