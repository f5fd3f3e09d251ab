"""Workers that are killed while a run moves to another plan: the run ends with the reason, and
leaves nothing behind.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

import planner
from planner.errors import PlannerError
from planner.formats.plan import Plan, save_plan
from planner.workers.job import TrainResult
from tests.executor.plans import make_plan
from tests.executor.run.test_left_out import without
from tests.executor.run.test_move import cut
from tests.executor.sleeping import sleeping_profile, write_sleeping

# Moves after the first window, and may end worker 1 at some point of it.
MORE = """
import json
import os
import signal
from pathlib import Path

from planner.executor.checkpoint import handover
from planner.executor.run import drift_watch, left_out, move, replan
from planner.formats.plan import load_plan

HERE = Path(__file__).parent
POINT = json.loads((HERE / "kill.json").read_text())

def settle(self, end, samples_per_s):
    if not self.moves and not self._decided:
        self._settle(load_plan(HERE / "next.json"), end)

# In workers alone: the process of the test loads this file, too, and other tests follow in it.
IN_WORKER = "RANK" in os.environ
if IN_WORKER:
    replan.Replanner.look = settle
    drift_watch._LOOKS_EVERY_S = 0.05
    with (HERE / f"pids-{os.environ['RANK']}").open("a") as file:
        file.write(f"{os.getpid()} ")

def before(owner, name):
    original = getattr(owner, name)

    def killed(*args, **kwargs):
        if os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, killed)

OWNERS = {"exchange_files": handover, "check_schedule": move, "pipeline_context": move}
if not IN_WORKER:
    pass
elif POINT == "restore":
    before(handover.Handover, "restore")
elif POINT == "ratio":
    before(left_out.IdleDevice, "ratio")
elif POINT == "full":
    def full(*args):
        raise OSError(28, "No space left on device")
    handover.write_part = full
elif POINT:
    before(OWNERS[POINT], POINT)
"""


def run(folder: Path, point: str, steps: int = 160, *, leaves_out: bool = False) -> TrainResult:
    path = write_sleeping(folder)
    profile = sleeping_profile(path)
    planner.save_profile(profile, folder / "profile.json")
    path.write_text(path.read_text("utf-8") + MORE, encoding="utf-8")
    (folder / "kill.json").write_text(json.dumps(point), encoding="utf-8")
    before, after = plans(profile)
    if leaves_out:
        after = without(make_plan(profile, (1,), "1f1b-flush", 2), [1], 2)
    save_plan(after, folder / "next.json")
    return planner.train(
        path,
        before,
        steps=steps,
        drift_window=10,
        profile=str(folder / "profile.json"),
        replan=True,
        hang_timeout_s=30.0,
    )


def plans(profile: planner.Profile) -> Sequence[Plan]:
    return [cut(profile, stages, "1f1b-flush", 2) for stages in ((2, 2), (3, 1))]


def in_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("plan-held-*-move-*")}


@pytest.mark.parametrize(
    "point", ["check_schedule", "exchange_files", "pipeline_context", "restore"]
)
@pytest.mark.slow
def test_a_killed_worker_ends_the_run(tmp_path: Path, point: str) -> None:
    before = in_memory()
    with pytest.raises(PlannerError, match=r"worker 1 .* was killed by SIGKILL"):
        run(tmp_path, point)
    assert in_memory() <= before


@pytest.mark.slow
def test_a_worker_that_is_killed_while_it_is_left_out_ends_the_run(tmp_path: Path) -> None:
    before = in_memory()
    with pytest.raises(PlannerError, match=r"worker 1 was killed by SIGKILL") as raised:
        run(tmp_path, "ratio", leaves_out=True)
    assert "stage" not in raised.value.message
    assert in_memory() <= before


@pytest.mark.slow
def test_processes_stay_and_nothing_is_left_in_memory(tmp_path: Path) -> None:
    before = in_memory()
    result = run(tmp_path, "")
    assert [move.after for move in result.moves] == ["1-1 (3+2 layers)"]
    assert in_memory() <= before
    pids = [(tmp_path / f"pids-{rank}").read_text("utf-8").split() for rank in range(2)]
    assert [len(each) for each in pids] == [2, 2]  # the model file was read for each plan
    assert [len(set(each)) for each in pids] == [1, 1]


@pytest.mark.slow
def test_without_room_the_plan_stays(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = run(tmp_path, "full")
    assert not result.moves
    assert [loss.minibatch for loss in result.losses] == list(range(160))
    told = capfd.readouterr().err
    assert "the run keeps its plan, because its state cannot be moved" in told
    assert "No space left on device" in told
