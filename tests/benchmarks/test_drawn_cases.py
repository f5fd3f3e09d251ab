"""Drawn cases are run, kept and tabulated by seed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import drawn_cases
from benchmarks.drawn_cases import Compared, compare
from benchmarks.kept import marks

PAGE = "before\n\n{}\n\nold\n\n{}\nafter\n"


@dataclass(frozen=True)
class Row(Compared):
    name: str


def draw(seed: int, count: int) -> list[str]:
    return [f"{seed}/{number}" for number in range(count)]


def run(cases: Sequence[str], chosen: Sequence[int], seconds: float) -> Iterator[tuple[int, Row]]:
    for number in chosen:
        yield number, Row(cases[number], predicted_s=seconds, measured_s=2.0)


def table(rows: Sequence[Row], about: str) -> str:
    return (
        f"{about.rpartition(', ')[2]}: {' '.join(f'{row.name} {row.error:+.0%}' for row in rows)}"
    )


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The README of a benchmark."""
    monkeypatch.setattr(drawn_cases, "ROOT", tmp_path)
    readme = tmp_path / "benchmarks" / "toy" / "README.md"
    readme.parent.mkdir(parents=True)
    readme.write_text(PAGE.format(*marks("drawn", "toy.drawn")))
    return readme


def written(arguments: str, monkeypatch: pytest.MonkeyPatch, *, whole: bool = False) -> str | None:
    monkeypatch.setattr(sys, "argv", ["drawn", *arguments.split()])
    return compare(
        "Toy.",
        "toy.drawn",
        Row,
        draw=draw,
        words=lambda case: [case],
        run=run,
        table=table,
        cases=3,
        seconds=1.0,
        whole=whole,
    )


def test_rows_that_are_kept_are_tabulated_by_seed_and_others_alone(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert written("--seed 1 --first 1 --save", monkeypatch) == "seed 1: 1/1 -50% 1/2 -50%"
    assert written("--seed 2 --cases 1 --seconds 3 --save", monkeypatch) == (
        "seed 1: 1/1 -50% 1/2 -50%\n\nseed 2: 2/0 +50%"
    )
    text = written("--seed 1 --until 1 --save", monkeypatch)
    assert text == "seed 1: 1/0 -50% 1/1 -50% 1/2 -50%\n\nseed 2: 2/0 +50%"
    first, last = marks("drawn", "toy.drawn")
    assert toy.read_text() == f"before\n\n{first}\n\n{text}\n\n{last}\nafter\n"

    capsys.readouterr()
    assert written("--seed 1 --first 2 --seconds 2", monkeypatch) is None
    assert capsys.readouterr().out == "seed 1: 1/2 +0%\n"
    assert written("--seed 1 --list", monkeypatch) is None
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:-1]] == [
        ["0", "1/0"],
        ["1", "1/1"],
        ["2", "1/2"],
    ]
    assert "1/2 -50%" in toy.read_text()


def test_a_page_of_one_seed_waits_for_all_of_its_cases(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert written("--seed 1 --until 2 --save", monkeypatch, whole=True) is None
    assert "old" in toy.read_text()
    assert (
        written("--seed 1 --first 2 --save", monkeypatch, whole=True)
        == "seed 1: 1/0 -50% 1/1 -50% 1/2 -50%"
    )
    assert (
        written("--seed 2 --save", monkeypatch, whole=True) == "seed 2: 2/0 -50% 2/1 -50% 2/2 -50%"
    )
    assert "old" not in toy.read_text()
