"""Runs whose workers are killed and stopped at random moments end as the one that nobody
touched: they name the worker and the cause, go on from their last checkpoint, and compute the same
to the bit.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.campaigns.kills.run import killed, reference

KILLS_PER_RUN = 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "schedule"), [("1-1", "1f1b"), ("2-1", "1f1b"), ("1-1-1", "1f1b-flush")]
)
def test_killed_runs_restart_and_end_as_if_nothing_had_happened(
    config: str, schedule: str, tmp_path: Path
) -> None:
    expected = reference(config, schedule, tmp_path)
    draw = random.Random(f"{config} {schedule}")
    outcome = killed(config, schedule, tmp_path, expected, KILLS_PER_RUN, draw)
    assert outcome.problems == []
    assert len(outcome.kills) == KILLS_PER_RUN
    assert all(kill.named for kill in outcome.kills if kill.told_s is not None)
