"""A synchronous start, and NewestMuon under late gradients, against late gradients made in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.convergence.emulation import LateWeights, lateness
from planner.api.running import make_job
from planner.errors import InputError, ModelFileError
from planner.executor.run.stages import check_sizes
from planner.model.spec import load_model_file
from planner.options.training import TrainArguments, TrainingOptions
from planner.plan.shape import shape_of, synchronous_minibatches, synchronous_part
from planner.workers.job import TrainResult
from tests.executor import eager
from tests.executor.eager import Case
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile
from tests.executor.reference import Weights
from tests.schedule.check import check_streams

MINIBATCHES = 11
START = TrainingOptions(synchronous_start=0.2)
NEWEST_MUON = """
from docs.examples.newest_muon import NewestMuon

def optimizer(named_parameters):
    return NewestMuon(named_parameters, lr=0.02)
"""


def assert_late(case: Case, late: Sequence[int], start: int, outcome: tuple[TrainResult, Weights]) -> None:
    """Equal, to rounding, to one process whose stages have gradients that are `late` from minibatch `start` on."""
    spec = load_model_file(case.path)
    model = eager.build(spec)
    optimizer = spec.optimizer(dict(model.named_parameters()))
    size = case.plan.minibatch_size
    assert size is not None
    names = eager.stage_names(structural_profile(case.path, size), case.plan)
    stages = [[model.get_parameter(name) for name in own] for own in names]
    weights = LateWeights(stages, late)
    losses = []
    for number, batch in enumerate(eager.minibatches(spec, size, 1)):
        optimizer.zero_grad()
        if number >= start:
            weights.put_older()
        loss = eager.loss_of(spec, model, batch)
        torch.autograd.backward(loss)
        if number >= start:
            weights.put_newest()
        optimizer.step()
        losses.append(float(loss.detach()))
    result, trained = outcome
    assert [entry.loss for entry in result.losses] == pytest.approx(losses, rel=1e-4)
    eager.assert_close(trained, model)


def test_runs_equal_late_gradients_in_one_process(tmp_path: Path) -> None:
    path = write_model(tmp_path, "language", "momentum", samples=8 * MINIBATCHES, more=NEWEST_MUON)
    async_plan = make_plan(structural_profile(path, 8), (1, 1))
    double_buffered = make_plan(structural_profile(path, 4), (1, 1), "2bw", 2)
    cases = [
        Case(path, async_plan, epochs=1),
        Case(path, async_plan, TrainingOptions(synchronous_start=0.4), epochs=1),
        Case(path, double_buffered, TrainingOptions(synchronous_start=3), epochs=1),
    ]
    late, started, buffered = eager.run_cases(cases)
    assert_late(cases[0], [1, 0], 0, late)
    assert_late(cases[1], [1, 0], 4, started)
    assert_late(cases[2], [1, 1], 3, buffered)
    assert late[0].synchronous_start is None
    start = started[0].synchronous_start
    assert start is not None
    assert (start.minibatches, start.schedule, start.microbatches) == (4, "1f1b-flush", 4)
    assert start.samples_per_s > 0


@pytest.mark.slow
def test_four_stages_equal_late_gradients_in_one_process(tmp_path: Path) -> None:
    path = write_model(tmp_path, "language", "momentum", samples=8 * MINIBATCHES, more=NEWEST_MUON)
    case = Case(path, make_plan(structural_profile(path, 8), (1, 1, 1, 1)), epochs=1)
    (outcome,) = eager.run_cases([case])
    assert_late(case, lateness("1f1b", 4), 0, outcome)


@pytest.mark.slow
def test_replicas_start_together(tmp_path: Path) -> None:
    """With 2-1 the first stage's updates average two minibatches later, and one in the synchronous start."""
    path = write_model(tmp_path, "language", "momentum", samples=8 * MINIBATCHES)
    plan = make_plan(structural_profile(path, 8), (2, 1))
    whole = Case(path, plan, TrainingOptions(synchronous_start=MINIBATCHES), epochs=1)
    (outcome,) = eager.run_cases([whole])
    assert_late(whole, [0, 0], MINIBATCHES, outcome)


def test_the_start_divides_the_same_minibatches(tmp_path: Path) -> None:
    path = write_model(tmp_path, "language", "momentum", samples=8)
    plan = make_plan(structural_profile(path, 12), (2, 1, 1))
    part = synchronous_part(plan)
    assert part.minibatch_size == plan.minibatch_size == 12
    assert part.microbatches == 6  # the most that divide 12, of up to two for each of three stages
    assert sum(stage.forward_s for stage in part.stages) * 6 == pytest.approx(sum(s.forward_s for s in plan.stages))
    check_streams(shape_of(part), minibatches=5)
    double_buffered = make_plan(structural_profile(path, 4), (1, 1), "2bw", 3)
    assert synchronous_part(double_buffered).microbatches == 3


def test_shares_and_numbers_of_minibatches() -> None:
    assert synchronous_minibatches(0.2, 400) == 80
    assert synchronous_minibatches(80, 400) == 80
    assert synchronous_minibatches(500, 400) == 400


def test_what_a_start_does_not_go_with_is_said(tmp_path: Path) -> None:
    path = write_model(tmp_path, "language", "momentum", samples=8)
    profile = structural_profile(path, 4)
    plan = make_plan(profile, (1, 1))
    for options, words in (
        (TrainingOptions(synchronous_start=1.5), r"`synchronous_start=1\.5` is neither a share"),
        (TrainingOptions(synchronous_start=0.2, accumulate=2), r"with `accumulate` an update later has others"),
        (TrainingOptions(synchronous_start=0.2, scale_lr=True), r"with `scale_lr` an update later has others"),
    ):
        with pytest.raises(InputError, match=words):
            make_job(path, plan, TrainArguments(options=options))
    with pytest.raises(InputError, match=r"is for asynchronous schedules, and the plan's, 1f1b-flush, is synchronous"):
        make_job(path, make_plan(profile, (1, 1), "1f1b-flush", 2), TrainArguments(options=START))
    with pytest.raises(InputError, match=r"`synchronous_start` is for plans, not for data-parallel"):
        make_job(path, plan, TrainArguments(options=START, baseline="data-parallel"))


def test_models_of_one_batch_size_cannot_start_synchronously() -> None:
    class Fixed:
        fixed_batch_size = 8
        least_batch_size = 1

    with pytest.raises(ModelFileError, match=r"a minibatch of the synchronous start has microbatches of 2 samples"):
        check_sizes([Fixed()], [2], of_start=True)  # type: ignore[list-item]
