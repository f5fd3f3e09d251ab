"""The records of a self-test: what a case found, and the report of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from planner.formats.files import Record

if TYPE_CHECKING:
    from planner.selftest.lab import Lab

Result = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """What a case found.

    Attributes:
        result: whether it is as it should be; "skipped" where the case cannot run on this machine.
        found: in words, with the numbers; why the case was skipped.
        value: the number that was judged, if there is one.
        limit: the most, or the least, that it may be.
    """

    result: Result
    found: str
    value: float | None = None
    limit: float | None = None


def passed(found: str) -> Outcome:
    """Return the outcome of a case that only looks."""
    return Outcome("passed", found)


def skipped(reason: str) -> Outcome:
    """Return the outcome of a case that cannot run here."""
    return Outcome("skipped", reason)


def judged(good: bool, found: str, value: float | None = None, limit: float | None = None) -> Outcome:
    """Return the outcome of a case that is good or not."""
    return Outcome("passed" if good else "failed", found, value, limit)


@dataclass(frozen=True)
class Case:
    """One row to be: its name, and what finds its outcome; whatever that raises fails the row."""

    name: str
    run: Callable[[], Outcome]


@dataclass(frozen=True)
class Check:
    """A kind of cases, under one name.

    Attributes:
        name: for the user to choose it by.
        question: what its rows answer.
        cases: made one after the other, each run before the next is made.
    """

    name: str
    question: str
    cases: Callable[[Lab], Iterator[Case]]


class Row(Record):
    """One case of a check, and what came of it."""

    check: str
    name: str
    result: Result
    found: str  # what was measured; why the case was skipped, or how it failed
    value: float | None = None  # the number that was judged
    limit: float | None = None  # the most, or the least, that it may be
    seconds: float


class SelftestReport(Record):
    """The rows of a self-test on one machine."""

    version: str  # of planner
    date: str
    device: str
    workers: int
    rows: tuple[Row, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether no row failed."""
        return not self.count("failed")

    def count(self, result: Result) -> int:
        """Return how many rows have this result."""
        return sum(row.result == result for row in self.rows)
