"""A device that becomes too slow to be worth its place, and recovers: all of it by itself."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

import planner
from benchmarks.testbed.replan import real
from planner.formats.plan import load_plan
from planner.options.training import DriftOptions, RunOptions

SLOW_AFTER, FAST_AFTER = 60, 110  # updates
STEPS = 900
TIMEOUT_S = 200


def disturb(times: Path, slow: Path) -> None:
    """Make worker 1 slower for a while, as its updates pass."""
    deadline = time.monotonic() + TIMEOUT_S
    for count, act in ((SLOW_AFTER, slow.touch), (FAST_AFTER, slow.unlink)):
        while not times.exists() or len(times.read_text("utf-8").splitlines()) < count:
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
        act()


@pytest.mark.slow
def test_it_is_left_out_and_taken_in_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = tmp_path / "times"
    slow = tmp_path / "slow"
    monkeypatch.setenv("REPLAN_TIMES", str(times))
    monkeypatch.setenv("REPLAN_SLOW", str(slow))
    monkeypatch.setenv("REPLAN_SLOWER", "20")
    case = real.CASES[0]
    assert case.emulated
    real.solved(case, tmp_path)
    profile = str(tmp_path / "profile.json")
    drift = DriftOptions(window=10, profile=profile, replan=True, replan_gain=0.01)

    thread = threading.Thread(target=disturb, args=(times, slow), daemon=True)
    thread.start()
    result = planner.train(
        case.model,
        load_plan(tmp_path / "plan.json"),
        steps=STEPS,
        drift=drift,
        run_options=RunOptions(hang_timeout_s=60.0),
    )
    thread.join()

    out, back = [move for move in result.moves if move.left_out or move.taken_in]
    assert out.left_out == (1,)
    assert back.taken_in == (1,)
    assert [loss.minibatch for loss in result.losses] == list(range(STEPS))
    assert all(report.stage is not None for report in result.reports)
