"""Every case of a worker's overhead runs."""

from __future__ import annotations

import pytest

from benchmarks.speed.overhead.__main__ import measure, table
from benchmarks.speed.overhead.cases import CASES, Case


@pytest.mark.parametrize(
    "case",
    [CASES[0], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[1:])],
    ids=lambda case: case.name,
)
def test_every_case_is_measured(case: Case) -> None:
    result = measure(case, pairs=2, units=8)
    assert len(result.pairs_us) == 2
    assert len(table([result]).splitlines()) == 3
