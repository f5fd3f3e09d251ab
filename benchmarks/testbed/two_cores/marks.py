"""Marks: when a process had trained how many minibatches. The benchmark reads them from outside."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "TWO_CORES_MARKS"  # file of this process; without it no marks are written


@dataclass(frozen=True)
class Mark:
    """The end of an optimizer step, in seconds of the machine's clock, and the minibatches until
    then.
    """

    s: float
    minibatches: float


class Marker:
    """Appends to the file that the environment names."""

    def __init__(self) -> None:
        path = os.environ.get(VARIABLE)
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def mark(self, minibatches: float) -> None:
        """Note that so many minibatches are done by now."""
        if self._file is not None:
            os.write(self._file, f"{time.monotonic_ns()} {minibatches}\n".encode())


def read_marks(path: Path, since_s: float = 0.0) -> list[Mark]:
    """Return the marks in a file from `since_s` on; none if there is no file yet."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    marks = [Mark(int(ns) / 1e9, float(count)) for ns, count in map(str.split, whole.splitlines())]
    return [mark for mark in marks if mark.s >= since_s]


def rate(marks: list[Mark]) -> float:
    """Return the minibatches per second between the first mark and the last; 0 if there are fewer
    than two.
    """
    if len(marks) < 2:
        return 0.0
    return (marks[-1].minibatches - marks[0].minibatches) / (marks[-1].s - marks[0].s)
