"""Results are kept part by part, and written to where they are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.kept import Results


@dataclass(frozen=True)
class Record:
    seconds: float
    name: str | None


def test_results_come_back_and_newer_ones_take_the_place_of_older(tmp_path: Path) -> None:
    first = Results(tmp_path, save=True)
    first.add("run", "a", Record(1.0, None))
    first.add("run", "b", Record(2.0, "two"))
    second = Results(tmp_path, save=True)
    second.add("run", "a", Record(3.0, None))
    second.add("other", "a", Record(4.0, None))
    third = Results(tmp_path, save=True)
    assert third.records("run", Record) == {"a": Record(3.0, None), "b": Record(2.0, "two")}
    assert third.records("none", Record) == {}
    assert "torch" in third.about("run")
    assert ";" not in third.about("run")


def test_a_record_names_the_machine_that_it_is_told(tmp_path: Path) -> None:
    results = Results(tmp_path, save=False, machine="a GPU")
    results.add("run", "a", Record(1.0, None))
    assert results.about("run").endswith(", a GPU")
