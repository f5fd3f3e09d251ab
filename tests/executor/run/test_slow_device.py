"""A device that becomes too slow to be worth its place, and recovers: all of it by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import planner
from planner.formats.profile import save_profile
from tests.executor.run.test_move import cut
from tests.executor.sleeping import fast_again, sleeping_profile, slow_now, write_sleeping

FORWARD_S = 0.002
STEPS = 700
TIMEOUT_S = 250
# Writes how far the run is, and how many moves worker 0 made; the next may follow soon.
NOTES = """
import os

from planner.executor.run import replan

HERE = Path(__file__).parent

def on_update(minibatch, loss, metrics):
    (HERE / "updates").write_text(str(minibatch))

def moved(self, plan, minibatch, seconds, *, then=replan.Replanner.moved):
    then(self, plan, minibatch, seconds)
    self._rests_until_s = 0.0
    if self._rank == 0:
        (HERE / f"move-{len(self.moves)}").touch()

if "RANK" in os.environ and not hasattr(replan.Replanner, "noted"):
    replan.Replanner.noted = True
    replan.Replanner.moved = moved
"""


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_it_is_left_out_and_taken_in_again(tmp_path: Path) -> None:
    path = write_sleeping(tmp_path, forward_s=FORWARD_S)
    profile = sleeping_profile(path, FORWARD_S)
    save_profile(profile, tmp_path / "profile.json")
    path.write_text(path.read_text("utf-8") + NOTES, encoding="utf-8")
    plan = cut(profile, (2, 2), "1f1b-flush", 4)

    thread = threading.Thread(target=disturb, args=(tmp_path,), daemon=True)
    thread.start()
    result = planner.train(
        path,
        plan,
        steps=STEPS,
        drift_window=10,
        profile=str(tmp_path / "profile.json"),
        replan=True,
        replan_gain=0.01,
        hang_timeout_s=60.0,
    )
    thread.join()

    # On a busy machine others may follow, because nothing keeps this run from it.
    out, back = [move for move in result.moves if move.left_out or move.taken_in][:2]
    assert out.left_out == (1,)
    assert back.taken_in == (1,)
    assert [loss.minibatch for loss in result.losses] == list(range(STEPS))


def disturb(folder: Path) -> None:
    """Make worker 1 slower after 60 updates, until the run has moved."""
    await_that(lambda: updates(folder) >= 60)
    slow_now(folder, 1, 30.0)
    await_that((folder / "move-1").exists)
    fast_again(folder)


def updates(folder: Path) -> int:
    path = folder / "updates"
    return int((path.read_text("utf-8") if path.exists() else "") or 0)


def await_that(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.02)
