"""The stopwatch adds up what it should, and every case runs."""

from __future__ import annotations

import time

import pytest

from benchmarks.speed.overhead.__main__ import measure, table
from benchmarks.speed.overhead.cases import CASES, Case
from benchmarks.speed.overhead.parts import Stopwatch


def test_a_part_has_its_own_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def work(seconds: float) -> None:
        nonlocal now
        now += seconds

    watch = Stopwatch(call_s=(0.0, 0.0))
    inner = watch.timed("inner", work)
    monkeypatch.setattr(time, "thread_time", lambda: now)

    def outer() -> None:
        work(2)
        inner(3)
        inner(1)

    watch.timed("outer", outer)()
    assert watch.microseconds(units=2) == pytest.approx({"inner": 2e6, "outer": 1e6})


@pytest.mark.parametrize(
    "case",
    [CASES[0], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[1:])],
    ids=lambda case: case.name,
)
def test_every_case_is_measured(case: Case) -> None:
    result = measure(case, pairs=2, units=8)
    assert len(result.pairs_us) == 2
    assert {"messages", "heartbeat", "instruction stream"} <= result.parts_us.keys()
    assert len(table([result]).splitlines()) == len(result.parts_us) - 2 + 2 + 4
