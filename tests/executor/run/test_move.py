"""Runs that move to another plan: to the bit what runs do that stop there and resume under it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import planner
from planner.executor.checkpoint.staying import staying_stages
from planner.executor.communication.control import join_group
from planner.executor.run import drift_watch
from planner.executor.run.build_context import pipeline_context
from planner.executor.run.replan import Replanner
from planner.executor.run.train import train
from planner.formats.cluster import flat_cluster
from planner.formats.drift import plan_words
from planner.formats.plan import Plan, load_plan, save_plan
from planner.formats.profile import Profile, save_profile
from planner.model.spec import load_model_file
from planner.options.training import CheckpointOptions, DriftOptions, TrainingOptions
from planner.workers.job import Job, TrainResult
from planner.workers.place import CPU
from tests.executor.plans import make_plan, scattered, sharded
from tests.executor.processes import run_workers
from tests.executor.sleeping import sleeping_profile, write_sleeping

WINDOW = 10
STEPS = 85
FORWARD_S = 0.0005  # of a layer: enough that the watch keeps up with training


def run_both(arguments: Sequence[str]) -> None:
    """Train a job that moves, after its first window, to the plans in files, one after the other;
    then the same as runs of their own, each of which resumes from the checkpoint of the one before.
    """
    job_path, hosts, *paths = arguments
    if hosts == "apart":  # as torchrun numbers hosts of one worker each
        os.environ |= {"GROUP_RANK": os.environ["RANK"], "LOCAL_RANK": "0"}
    job = Job.model_validate_json(Path(job_path).read_text("utf-8"))
    plans = [load_plan(path) for path in paths]

    def settle(self: Replanner, end: int, samples_per_s: float) -> None:
        if len(self.moves) < len(plans) and not self._decided:
            self._settle(plans[len(self.moves)], end)

    Replanner.look = settle  # type: ignore[method-assign]
    drift_watch._LOOKS_EVERY_S = 0.05  # windows are short here
    join_group()
    moving = _train(job)
    if moving is not None:
        _write(moving, Path(f"{job_path}.moving"))

    ends: list[object] = [None]
    if moving is not None:
        ends = [[*(move.minibatch for move in moving.moves), STEPS]]
    torch.distributed.broadcast_object_list(ends)
    for number, part in enumerate(stopping(job, [job.plan, *plans], ends[0])):
        stopped = _train(part)
        if stopped is not None:
            _write(stopped, Path(f"{job_path}.stopping-{number}"))
    torch.distributed.destroy_process_group()


def stopping(job: Job, plans: Sequence[Plan], ends: object) -> Iterator[Job]:
    """Yield the runs that stop where the moving one changes its plan."""
    assert isinstance(ends, list)
    folder = Path(job.model).parent
    for number, (plan, end) in enumerate(zip(plans, ends, strict=True)):
        checkpoints = CheckpointOptions(
            checkpoint_every=end,
            checkpoint_folder=str(folder / "stops"),
            resume="auto" if number else None,
        )
        changes = {
            "plan": plan,
            "steps": end,
            "checkpoints": checkpoints,
            "drift": DriftOptions(drift_window=0),
            "save_weights": str(folder / "stopping.pt"),
        }
        yield job.model_copy(update=changes)


def _train(job: Job) -> TrainResult | None:
    return train(pipeline_context(job, load_model_file(job.model), CPU))


def _write(result: TrainResult, path: Path) -> None:
    path.write_text(result.model_dump_json(), encoding="utf-8")


def _read(path: Path) -> TrainResult:
    return TrainResult.model_validate_json(path.read_text("utf-8"))


def job_of(folder: Path, plan: Plan, **more: object) -> Job:
    drift = DriftOptions(drift_window=WINDOW, profile=str(folder / "profile.json"), replan=True)
    job = Job(model=str(folder / "sleeping.py"), plan=plan, steps=STEPS, drift=drift)
    return job.model_copy(update={"save_weights": str(folder / "moving.pt"), **more})


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    found = sleeping_profile(write_sleeping(tmp_path, forward_s=FORWARD_S), FORWARD_S)
    save_profile(found, tmp_path / "profile.json")
    return found


def cut(profile: Profile, stages: Sequence[int], schedule: str, microbatches: int) -> Plan:
    """The plan with so many blocks per stage."""
    cluster = flat_cluster(len(stages), 1e9)
    return planner.price(profile, cluster, stages, schedule=schedule, microbatches=microbatches)


def check_same(
    job: Job, plans: Sequence[Plan], folder: Path, hosts: str = "together"
) -> TrainResult:
    """Check that the moving run has the losses and weights of the stopping ones; return it."""
    paths = []
    for number, each in enumerate(plans[1:]):
        paths.append(str(folder / f"next-{number}.json"))
        save_plan(each, paths[-1])
    path = folder / "job.json"
    path.write_text(job.model_dump_json(), encoding="utf-8")

    run_workers(run_both, [str(path), hosts, *paths], folder / "workers.log", job.plan.workers)

    result = _read(Path(f"{path}.moving"))
    assert len(result.moves) == len(plans) - 1
    stopped = [_read(Path(f"{path}.stopping-{number}")) for number in range(len(plans))]
    assert [loss.minibatch for loss in result.losses] == list(range(STEPS))
    assert result.losses == tuple(loss for part in stopped for loss in part.losses)

    weights = torch.load(folder / "moving.pt")
    expected = torch.load(folder / "stopping.pt")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    return result


@pytest.mark.parametrize(
    "schedule",
    [
        "1f1b-flush",
        "1f1b",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("gpipe", "2bw")),
    ],
)
def test_another_cut(tmp_path: Path, profile: Profile, schedule: str) -> None:
    microbatches = 1 if schedule == "1f1b" else 2
    before = cut(profile, (2, 2), schedule, microbatches)
    after = cut(profile, (3, 1), schedule, microbatches)
    result = check_same(job_of(tmp_path, before), [before, after], tmp_path)
    assert result.config == "1-1"
    assert result.moves[0].before == plan_words(before)
    assert result.moves[0].after == plan_words(after)
    assert ("drained its pipeline" in str(result.moves[0])) == (schedule in ("1f1b", "2bw"))


@pytest.mark.parametrize("shards", [False, True])
def test_data_parallel_and_back(tmp_path: Path, profile: Profile, shards: bool) -> None:
    pipeline = scattered(make_plan(profile, (1, 1), "1f1b-flush", 2))
    replicated = make_plan(profile, (2,), "1f1b-flush", 2)
    plans = [pipeline, sharded(replicated) if shards else replicated, pipeline]
    check_same(job_of(tmp_path, pipeline), plans, tmp_path)


def test_the_state_goes_from_host_to_host(tmp_path: Path, profile: Profile) -> None:
    before = cut(profile, (2, 2), "1f1b-flush", 2)
    plans = [
        before,
        make_plan(profile, (2,), "1f1b-flush", 2),
        cut(profile, (1, 3), "1f1b-flush", 2),
    ]
    check_same(job_of(tmp_path, before), plans, tmp_path, hosts="apart")


def test_a_stage_stays(tmp_path: Path, profile: Profile) -> None:
    before = cut(profile, (2, 1, 1), "1f1b-flush", 2)
    after = cut(profile, (1, 2, 1), "1f1b-flush", 2)
    assert staying_stages(before, after) == {2: 2}
    check_same(job_of(tmp_path, before), [before, after], tmp_path)


def test_checkpoints_and_evaluations_go_on(tmp_path: Path, profile: Profile) -> None:
    path = tmp_path / "sleeping.py"
    path.write_text(path.read_text() + EVALUATION, encoding="utf-8")
    before = cut(profile, (2, 2), "1f1b-flush", 2)
    after = cut(profile, (1, 3), "1f1b-flush", 2)
    kept = CheckpointOptions(checkpoint_every=25, checkpoint_folder=str(tmp_path / "kept"), keep=10)
    job = job_of(tmp_path, before, checkpoints=kept, options=TrainingOptions(evaluate_every=30))

    result = check_same(job, [before, after], tmp_path)

    assert [each.minibatch for each in result.evaluations] == [30, 60, 85]
    steps = sorted(each.name for each in (tmp_path / "kept").glob("step-*"))
    assert steps == [f"step-{number:08}" for number in (25, 50, 75, 85)]


EVALUATION = """
def evaluation_dataset():
    return torch.utils.data.Subset(Samples(), range(8))
"""
