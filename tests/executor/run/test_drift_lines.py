"""Which differences from the plan are worth a line."""

from __future__ import annotations

from planner.executor.run.drift_lines import DriftLines
from planner.formats.drift import Drift, WorkerDrift


def drift(ratio: float, better: str | None = None) -> Drift:
    return Drift(
        since=100,
        seen=200,
        workers=(WorkerDrift(rank=1, stage=1, host="b", ratio=ratio),),
        config="1-1",
        planned_samples_per_s=10.0,
        measured_samples_per_s=8.0,
        expected_samples_per_s=8.0,
        better_config=better,
        better_samples_per_s=None if better is None else 9.0,
    )


def test_what_can_be_mended_is_said_at_once() -> None:
    lines = DriftLines()
    found = drift(1.5, better="1-1 (3+1 layers)")
    assert lines.found(found) is found
    assert lines.passed() is None


def test_what_cannot_be_mended_is_said_when_it_lasts() -> None:
    lines = DriftLines()
    found = drift(1.5)
    assert lines.found(found) is None
    assert [lines.passed() for _ in range(4)] == [None, found, None, None]


def test_what_comes_and_goes_is_not_said() -> None:
    lines = DriftLines()
    for _ in range(10):
        assert lines.found(drift(1.5)) is None
        assert lines.passed() is None
        assert lines.found(drift(1.0)) is None
        assert lines.passed() is None


def test_the_end_of_what_was_said_is_said_too() -> None:
    lines = DriftLines()
    lines.found(drift(1.5, better="1-1 (3+1 layers)"))
    over = drift(1.0)
    assert lines.found(over) is None
    assert [lines.passed() for _ in range(2)] == [None, over]


def test_each_line_waits_twice_as_long_as_the_one_before() -> None:
    lines = DriftLines()
    waited = []
    for number in range(4):
        lines.found(drift(1.5 + number))
        count = 1
        while lines.passed() is None:
            count += 1
        waited.append(count)
    assert waited == [2, 4, 8, 16]
