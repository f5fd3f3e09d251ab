"""The numbers that pages state: what each means, which way is better, and how much it varies
between two runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.kept import environment
from planner.formats.files import write_text

STATED = Path(__file__).with_name("headlines.json")
Verdict = Literal["holds", "better", "worse", "new", "not measured"]


@dataclass(frozen=True)
class Number:
    """A number that a page states.

    Attributes:
        name: of the part that measures it and of the number: "testbed.median".
        what: for people.
        kind: measured, emulated, simulated or estimated.
        form: format specification; "%" at its end shows a share in per cent.
        better: "lower" or "higher".
        spread: by how much two runs of the same code may differ, as a share of the number.
        least: the same in the number's own unit, where that is more: a share of a small number says
            nothing.
        of_machine: whether it is a time that a slower processor lengthens; it is scaled by the
            yardstick then.
    """

    name: str
    what: str
    kind: Literal["measured", "emulated", "simulated", "estimated"]
    form: str
    better: Literal["lower", "higher"] = "lower"
    spread: float = 0.1
    least: float = 0.0
    of_machine: bool = False

    def shown(self, value: float | None) -> str:
        """Return the value as pages show it."""
        return "" if value is None else f"{value:{self.form}}"

    def verdict(self, stated: float | None, now: float | None) -> Verdict:
        """Compare a new value with the stated one."""
        if now is None:
            return "not measured"
        if stated is None:
            return "new"
        allowed = max(self.spread * abs(stated), self.least)
        if abs(now - stated) <= allowed:
            return "holds"
        return "better" if (now < stated) == (self.better == "lower") else "worse"


@dataclass(frozen=True)
class Stated:
    """A number as it was measured last: its value, when, on which machine, and that machine's
    yardstick.
    """

    value: float
    date: str
    environment: str
    yardstick_s: float


def read_stated(path: Path = STATED) -> dict[str, Stated]:
    """Return the stated numbers by name."""
    if not path.exists():
        return {}
    return {
        name: Stated(**each) for name, each in json.loads(path.read_text(encoding="utf-8")).items()
    }


def write_stated(found: Mapping[str, float], yardstick_s: float, path: Path = STATED) -> None:
    """Replace the stated numbers that were found by today's."""
    today = {
        name: vars(Stated(value, time.strftime("%Y-%m-%d"), environment(), yardstick_s))
        for name, value in found.items()
    }
    kept = {name: vars(each) for name, each in read_stated(path).items()}
    write_text(path, json.dumps(dict(sorted({**kept, **today}.items())), indent=1) + "\n")


@dataclass(frozen=True)
class Compared:
    """A number beside what is stated; `stated` is scaled to the speed of this machine where it
    depends on it.
    """

    number: Number
    stated: float | None
    now: float | None

    @property
    def verdict(self) -> Verdict:
        """What the comparison says."""
        return self.number.verdict(self.stated, self.now)

    def row(self) -> list[str]:
        """Return the line of the table."""
        shown = self.number.shown
        return [
            self.number.what,
            self.number.kind,
            shown(self.stated),
            shown(self.now),
            self.verdict,
        ]


def compared(
    numbers: Sequence[Number],
    stated: Mapping[str, Stated],
    found: Mapping[str, float],
    yardstick_s: float,
) -> Iterator[Compared]:
    """Yield each number with its stated and its new value."""
    for number in numbers:
        known = stated.get(number.name)
        value = None if known is None else known.value
        if known is not None and number.of_machine:
            value = known.value * yardstick_s / known.yardstick_s
        yield Compared(number, value, found.get(number.name))


def yardstick() -> float:
    """Return the processor seconds of a fixed piece of Python and numpy: how fast this machine is
    for what we time.
    """
    import numpy as np

    def once() -> float:
        began = time.process_time()
        table = {number: number * number for number in range(200_000)}
        total = sum(table[number] for number in range(0, 200_000, 3))
        values = np.arange(400_000, dtype=np.float64)
        for _ in range(40):
            values = np.sqrt(values * values + total % 7)
        return time.process_time() - began

    once()
    return min(once() for _ in range(5))
