"""Workers that a plan leaves out and that are taken in again: to the bit what runs do that stop
there and resume under the same plans, on fewer processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from planner.executor.communication.control import join_group
from planner.executor.run import drift_watch
from planner.executor.run.build_context import pipeline_context
from planner.executor.run.replan import Replanner
from planner.executor.run.train import train
from planner.formats.cluster import DeviceKind, flat_cluster
from planner.formats.files import replace
from planner.formats.plan import Plan, load_plan, save_plan
from planner.formats.profile import Profile, save_profile
from planner.formats.timeline import load_timeline, save_timeline
from planner.model.spec import load_model_file
from planner.options.training import CheckpointOptions, DriftOptions, RunOptions, TrainingOptions
from planner.workers.job import Job, TrainResult
from planner.workers.place import CPU
from tests.executor.plans import make_plan
from tests.executor.processes import run_workers
from tests.executor.run.test_move import EVALUATION, FORWARD_S, STEPS, WINDOW, cut, job_of
from tests.executor.sleeping import sleeping_profile, write_sleeping


def run_moving(arguments: Sequence[str]) -> None:
    """Train a job that moves, after its first window, to the plans in files, one by one."""
    job_path, *paths = arguments
    plans = [load_plan(path) for path in paths]

    def settle(self: Replanner, end: int, samples_per_s: float) -> None:
        if len(self.moves) < len(plans) and not self._decided:
            self._settle(plans[len(self.moves)], end)

    Replanner.look = settle  # type: ignore[method-assign]
    drift_watch._LOOKS_EVERY_S = 0.05  # windows are short here
    run_plainly([job_path])


def run_plainly(arguments: Sequence[str]) -> None:
    """Train a job, and write its result beside it."""
    (path,) = arguments
    job = Job.model_validate_json(Path(path).read_text("utf-8"))
    join_group()
    context = pipeline_context(job, load_model_file(job.model), CPU)
    result = train(context, on_timeline=lambda found: save_timeline(found, f"{path}.timeline"))
    if result is not None:
        Path(f"{path}.result").write_text(result.model_dump_json(), encoding="utf-8")
    torch.distributed.destroy_process_group()


def moving(job: Job, plans: Sequence[Plan], folder: Path) -> TrainResult:
    """Run a job that moves to these plans."""
    paths = []
    for number, each in enumerate(plans):
        paths.append(str(folder / f"next-{number}.json"))
        save_plan(each, paths[-1])
    path = folder / "job.json"
    path.write_text(job.model_dump_json(), encoding="utf-8")
    run_workers(run_moving, [str(path), *paths], folder / "workers.log", job.plan.workers)
    return result_of(path)


def result_of(path: Path) -> TrainResult:
    return TrainResult.model_validate_json(Path(f"{path}.result").read_text("utf-8"))


def alone(plan: Plan) -> Plan:
    """The same plan for as many processes as it has work for."""
    numbers = {rank: number for number, rank in enumerate(sorted(plan.ranks))}
    stages = tuple(
        replace(stage, ranks=tuple(numbers[rank] for rank in stage.ranks)) for stage in plan.stages
    )
    return replace(plan, stages=stages, cluster=flat_cluster(plan.workers, 1e9))


def stopping(job: Job, plans: Sequence[Plan], ends: Sequence[int], folder: Path) -> TrainResult:
    """Train parts of a job under plans of their own, in processes of their own, each of which
    resumes from the checkpoint of the one before; return the last result, with all losses.
    """
    found = []
    for number, (plan, end) in enumerate(zip(plans, ends, strict=True)):
        checkpoints = CheckpointOptions(
            checkpoint_every=end,
            checkpoint_folder=str(folder / "stops"),
            resume="auto" if number else None,
        )
        part = replace(
            job,
            plan=alone(plan),
            steps=end,
            checkpoints=checkpoints,
            drift=DriftOptions(drift_window=0),
            run_options=RunOptions(),
            save_weights=str(folder / "stopping.pt"),
        )
        path = folder / f"stop-{number}.json"
        path.write_text(part.model_dump_json(), encoding="utf-8")
        run_workers(run_plainly, [str(path)], folder / "workers.log", plan.workers)
        found.append(result_of(path))
    return replace(found[-1], losses=tuple(loss for each in found for loss in each.losses))


def check_same(job: Job, plans: Sequence[Plan], folder: Path) -> TrainResult:
    """Check that the moving run has the losses and weights of the stopping ones; return it."""
    result = moving(job, plans[1:], folder)
    ends = [*(move.minibatch for move in result.moves), STEPS]
    assert len(ends) == len(plans)

    expected = stopping(job, plans, ends, folder)
    assert [loss.minibatch for loss in result.losses] == list(range(STEPS))
    assert result.losses == expected.losses

    weights = torch.load(folder / "moving.pt")
    others = torch.load(folder / "stopping.pt")
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in others)
    return result


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    found = sleeping_profile(write_sleeping(tmp_path, forward_s=FORWARD_S), FORWARD_S)
    save_profile(found, tmp_path / "profile.json")
    return found


def without(plan: Plan, ranks: Sequence[int], workers: int, speed: float = 0.25) -> Plan:
    """The plan on the other ones of so many workers, because these are slow."""
    kinds = tuple(
        DeviceKind(count=1, speed=speed if rank in ranks else 1.0) for rank in range(workers)
    )
    left = [rank for rank in range(workers) if rank not in ranks]
    stages = tuple(
        replace(stage, ranks=tuple(left[rank] for rank in stage.ranks)) for stage in plan.stages
    )
    cluster = replace(flat_cluster(workers, 1e9), kinds=kinds)
    return replace(plan, stages=stages, cluster=cluster)


@pytest.mark.parametrize(
    ("schedule", "rank"),
    [
        ("1f1b-flush", 0),
        pytest.param("1f1b-flush", 1, marks=pytest.mark.slow),
        pytest.param("1f1b", 1, marks=pytest.mark.slow),
    ],
)
def test_left_out_and_taken_in_again(
    tmp_path: Path, profile: Profile, schedule: str, rank: int
) -> None:
    microbatches = 1 if schedule == "1f1b" else 2
    both = cut(profile, (2, 2), schedule, microbatches)
    fewer = without(make_plan(profile, (1,), schedule, microbatches), [rank], 2)
    result = check_same(job_of(tmp_path, both), [both, fewer, both], tmp_path)
    assert [move.left_out for move in result.moves] == [(rank,), ()]
    assert [move.taken_in for move in result.moves] == [(), (rank,)]
    assert f"it leaves out worker {rank}" in str(result.moves[0])
    assert f"it takes in worker {rank} again" in str(result.moves[1])


def test_two_of_four_are_left_out(tmp_path: Path, profile: Profile) -> None:
    """Of the two that stay, both clip by the norm of all gradients; others would wait for them."""
    four = cut(profile, (1, 1, 1, 1), "1f1b-flush", 2)
    two = without(cut(profile, (2, 2), "1f1b-flush", 2), [0, 2], 4)
    three = without(cut(profile, (2, 1, 1), "1f1b-flush", 2), [2], 4)
    job = job_of(tmp_path, four, options=TrainingOptions(clip_grad_norm=0.1))
    result = check_same(job, [four, two, three], tmp_path)
    assert [move.left_out for move in result.moves] == [(0, 2), ()]
    assert [move.taken_in for move in result.moves] == [(), (0,)]
    assert [report.stage for report in result.reports] == [0, 1, None, 2]


@pytest.mark.slow
def test_the_run_ends_while_one_is_left_out(tmp_path: Path, profile: Profile) -> None:
    both = cut(profile, (2, 2), "1f1b-flush", 2)
    fewer = without(make_plan(profile, (1,), "1f1b-flush", 2), [0], 2)
    job = job_of(tmp_path, both)
    run_options = RunOptions(trace=str(tmp_path / "trace.json"), trace_minibatches=5)
    result = check_same(replace(job, run_options=run_options), [both, fewer], tmp_path)

    assert [report.stage for report in result.reports] == [None, 0]
    assert result.workers == 2
    assert result.samples_per_s > 0
    timeline = load_timeline(tmp_path / "job.json.timeline")
    assert timeline.workers == (1,)
    assert any("it leaves out worker 0" in line for line in timeline.drift)


def test_evaluations_and_checkpoints_go_on(tmp_path: Path, profile: Profile) -> None:
    path = tmp_path / "sleeping.py"
    path.write_text(path.read_text() + EVALUATION, encoding="utf-8")
    both = cut(profile, (2, 2), "1f1b-flush", 2)
    fewer = without(make_plan(profile, (1,), "1f1b-flush", 2), [1], 2)
    kept = CheckpointOptions(checkpoint_every=25, checkpoint_folder=str(tmp_path / "kept"), keep=10)
    job = job_of(tmp_path, both, checkpoints=kept, options=TrainingOptions(evaluate_every=30))

    result = check_same(job, [both, fewer], tmp_path)

    assert [each.minibatch for each in result.evaluations] == [30, 60, 85]
    steps = sorted(each.name for each in (tmp_path / "kept").glob("step-*"))
    assert steps == [f"step-{number:08}" for number in (25, 50, 75, 85)]


@pytest.mark.slow
def test_a_run_resumes_from_what_was_written_while_one_was_left_out(
    tmp_path: Path, profile: Profile
) -> None:
    """With all workers, as it was started."""
    both = cut(profile, (2, 2), "1f1b-flush", 2)
    fewer = without(make_plan(profile, (1,), "1f1b-flush", 2), [1], 2)
    kept = CheckpointOptions(checkpoint_every=60, checkpoint_folder=str(tmp_path / "kept"))
    first = moving(replace(job_of(tmp_path, both, checkpoints=kept), steps=60), [fewer], tmp_path)

    again = replace(kept, resume="auto")
    path = tmp_path / "again.json"
    job = replace(job_of(tmp_path, both, checkpoints=again), drift=DriftOptions(drift_window=0))
    path.write_text(job.model_dump_json(), encoding="utf-8")
    run_workers(run_plainly, [str(path)], tmp_path / "workers.log", 2)
    second = result_of(path)

    (move,) = first.moves
    expected = stopping(job, [both, fewer, both], [move.minibatch, 60, STEPS], tmp_path)
    assert (*first.losses, *second.losses) == expected.losses


@pytest.mark.slow
def test_a_plan_may_end_where_a_checkpoint_is_written(tmp_path: Path, profile: Profile) -> None:
    """Points at which a plan may end are two minibatches apart, and so are checkpoints."""
    both = cut(profile, (2, 2), "1f1b-flush", 2)
    other = cut(profile, (1, 3), "1f1b-flush", 2)
    fewer = without(make_plan(profile, (1,), "1f1b-flush", 2), [1], 2)
    kept = CheckpointOptions(checkpoint_every=WINDOW // 5, checkpoint_folder=str(tmp_path / "kept"))
    check_same(job_of(tmp_path, both, checkpoints=kept), [both, other, fewer], tmp_path)
