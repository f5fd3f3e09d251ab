"""Runs whose workers are killed and stopped at random moments end as the one that nobody
touched.
"""

from __future__ import annotations

import pytest

from benchmarks.kills.__main__ import measure, table


@pytest.mark.slow
def test_killed_runs_restart_and_end_as_if_nothing_had_happened() -> None:
    outcomes = measure(kills=6, per_run=3, seed=1)
    assert [problem for outcome in outcomes for problem in outcome.problems] == []
    kills = [kill for outcome in outcomes for kill in outcome.kills]
    assert len(kills) == 6
    assert all(kill.named for kill in kills if kill.told_s is not None)
    assert "median" in table(kills)
