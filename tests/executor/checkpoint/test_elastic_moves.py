"""Runs that lose hosts and move to other plans: what one computes that is stopped and resumed under
the same plans.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from planner.formats.files import replace
from planner.formats.plan import save_plan
from planner.formats.profile import save_profile
from planner.options.training import DriftOptions, ElasticOptions
from planner.workers.job import Job
from tests.executor.checkpoint.test_elastic import FAILS, SEED, losses, resumed, start
from tests.executor.plans import make_plan
from tests.executor.run.test_left_out import alone, without
from tests.executor.run.test_move import FORWARD_S, cut
from tests.executor.sleeping import sleeping_profile, write_sleeping

EVERY = 20  # copies
FAILS_AT = 53
STEPS = 110
WINDOW = 10
# Moves after the first window to the plan for so many workers, and writes when.
MOVES = """
import os

from planner.executor.run import drift_watch, replan
from planner.formats.plan import load_plan

NEXT = Path(__file__).with_name(f"next-{os.environ.get('WORLD_SIZE', '0')}.json")
NOTES = Path(__file__).with_name("moves")

def settle(self, end, samples_per_s):
    if not self.moves and not self._decided:
        self._settle(load_plan(NEXT), end)

def moved(self, plan, minibatch, seconds, *, then=replan.Replanner.moved):
    then(self, plan, minibatch, seconds)
    if os.environ["RANK"] == "0":
        with NOTES.open("a") as file:
            file.write(f"{minibatch} ")

# As a supervisor would, which there is none of here, a worker that is left out ends after others.
def awaited(self, key):
    deadline = time.monotonic() + 30
    while not self._store.check([key]):
        if time.monotonic() > deadline:
            raise RuntimeError("the others are gone")
        time.sleep(0.05)
    return self._store.get(key)

# In workers alone: the process of the test loads this file, too.
if "RANK" in os.environ:
    replan.Replanner.look = settle
    replan.Replanner._await = awaited
    if not hasattr(replan.Replanner, "noted"):  # and workers do so for each plan
        replan.Replanner.noted = True
        replan.Replanner.moved = moved
    drift_watch._LOOKS_EVERY_S = 0.05
"""


@pytest.mark.slow
@pytest.mark.parametrize("leaves_out", [False, True])
def test_a_host_is_lost_after_a_move(tmp_path: Path, leaves_out: bool) -> None:
    path = write_sleeping(tmp_path, forward_s=FORWARD_S)
    profile = sleeping_profile(path, FORWARD_S)
    save_profile(profile, tmp_path / "profile.json")
    path.write_text(path.read_text("utf-8") + FAILS + MOVES, encoding="utf-8")
    three = cut(profile, (2, 1, 1), "1f1b-flush", 2)
    other = cut(profile, (1, 1, 2), "1f1b-flush", 2)
    if leaves_out:
        other = without(cut(profile, (1, 3), "1f1b-flush", 2), [1], 3)
    two = cut(profile, (2, 2), "1f1b-flush", 2)
    last = cut(profile, (3, 1), "1f1b-flush", 2)
    if leaves_out:
        last = without(make_plan(profile, (1,), "1f1b-flush", 2), [0], 2)
    save_plan(other, tmp_path / "next-3.json")
    save_plan(last, tmp_path / "next-2.json")
    job = Job(
        model=str(path),
        plan=three,
        steps=STEPS,
        seed=SEED,
        elastic=ElasticOptions(elastic=(1, 4), rendezvous="nowhere:1", copy_every=EVERY),
        drift=DriftOptions(
            drift_window=WINDOW, profile=str(tmp_path / "profile.json"), replan=True
        ),
        run="one run",
    )
    copied = FAILS_AT // EVERY * EVERY
    (tmp_path / "fails-at").write_text(f"{FAILS_AT} {copied} 3", encoding="utf-8")

    assert start(job, range(3), tmp_path) is None
    shutil.rmtree(tmp_path / "memory-1")
    result = start(replace(job, plan=two), (0, 2), tmp_path)

    assert result is not None, (tmp_path / "workers.log").read_text("utf-8")
    assert result.first_minibatch == copied
    (event,) = result.restarts
    assert f"training goes on from minibatch {copied} with the plan 1-1" in event
    first, second = map(int, (tmp_path / "moves").read_text("utf-8").split())
    assert first < copied < second
    assert [move.minibatch for move in result.moves] == [second]

    (tmp_path / "fails-at").unlink(missing_ok=True)
    plans = [alone(each) for each in (three, other, two, last)]
    assert losses(result) == resumed(path, plans, (first, copied, second, STEPS), tmp_path)
