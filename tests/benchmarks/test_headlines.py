"""The numbers on the pages are the stated ones, and a verdict says what it should."""

from pathlib import Path

import pytest

from benchmarks.headlines.alone import measure_alone
from benchmarks.headlines.numbers import Number, Stated, compared, read_stated, write_stated
from benchmarks.headlines.pages import PAGES, filled, marked
from benchmarks.headlines.parts import NUMBERS, PARTS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_the_stated_numbers(page: Path) -> None:
    text = page.read_text("utf-8")
    assert marked(text) <= set(read_stated())
    assert filled(text, read_stated()) == text, "python -m benchmarks.headlines --pages"


def test_every_number_belongs_to_a_part() -> None:
    names = [number.name for number in NUMBERS]
    assert len(set(names)) == len(names)
    assert {name.partition(".")[0] for name in names} == set(PARTS)
    assert set(read_stated()) <= set(names)


@pytest.mark.parametrize(
    ("better", "stated", "now", "verdict"),
    [
        ("lower", 10.0, 10.9, "holds"),
        ("lower", 10.0, 11.1, "worse"),
        ("lower", 10.0, 8.9, "better"),
        ("higher", 10.0, 8.9, "worse"),
        ("higher", 10.0, 11.1, "better"),
        ("lower", None, 1.0, "new"),
        ("lower", 1.0, None, "not measured"),
    ],
)
def test_verdicts(better: str, stated: float | None, now: float | None, verdict: str) -> None:
    number = Number(
        "a.b",
        "a number",
        "measured",
        ".1f",
        better,  # type: ignore[arg-type]
        spread=0.1,
    )
    assert number.verdict(stated, now) == verdict


def test_times_are_scaled_to_the_machine_and_ratios_are_not() -> None:
    """Code that takes twice as long on a machine of half the speed is as fast as it was."""
    time_s = Number("a.time", "a time", "measured", ".1f", of_machine=True)
    ratio = Number("a.ratio", "a ratio", "measured", ".1f")
    known = {
        name: Stated(3.0, "2026-11-23", "a machine", yardstick_s=0.1)
        for name in ("a.time", "a.ratio")
    }
    found = {"a.time": 6.0, "a.ratio": 6.0}
    verdicts = [each.verdict for each in compared([time_s, ratio], known, found, yardstick_s=0.2)]
    assert verdicts == ["holds", "worse"]


def test_numbers_that_were_not_measured_stay_stated(tmp_path: Path) -> None:
    path = tmp_path / "headlines.json"
    write_stated({"a.one": 1.0, "a.two": 2.0}, 0.1, path)
    write_stated({"a.one": 3.0}, 0.2, path)
    assert {name: each.value for name, each in read_stated(path).items()} == {
        "a.one": 3.0,
        "a.two": 2.0,
    }


def test_a_part_is_measured_in_a_process_of_its_own() -> None:
    """A process keeps its peak of memory when it becomes another program: what `search` started
    after `testbed` had the testbed's.
    """
    with pytest.raises(RuntimeError, match="'nothing' ended with exit code 1"):
        measure_alone("nothing")
