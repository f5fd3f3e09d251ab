"""Evaluation in the pipeline equals evaluation of the unsplit model, and does not change
training.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.errors import ModelFileError
from planner.executor.run.evaluator import evaluation_points
from planner.formats.plan import Plan
from planner.model.batch import collate
from planner.model.loss import loss_of
from planner.model.spec import TrainingSpec, load_model_file
from planner.options.training import TrainingOptions
from planner.schedule.instructions import (
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    Update,
    matching_receive,
)
from planner.schedule.one_stage import GPIPE, ONE_F_ONE_B
from planner.schedule.schedule import Channel, PipelineShape, stream
from planner.workers.job import Evaluation
from tests.executor import eager
from tests.executor.eager import Case
from tests.executor.models import EVALUATION, write_model
from tests.executor.plans import make_plan, structural_profile
from tests.executor.reference import Weights

SAMPLES, EVERY, STEPS = 30, 4, 11


def expected(spec: TrainingSpec, weights: Weights, minibatch: int) -> Evaluation:
    """Evaluate the unsplit model, in the same batches: a block's control flow depends on the mean
    of its batch.
    """
    model = spec.build_model()
    model.load_state_dict(weights)
    dataset = spec.evaluation_dataset()
    totals = {"loss": 0.0, "accuracy": 0.0, "largest": 0.0}
    for start in (0, 4, 8):
        batch = collate([dataset[index] for index in range(start, min(10, start + 4))])
        with torch.no_grad():
            output = model.eval()(*batch.args, **batch.kwargs)
            found = {"loss": float(loss_of(output, batch.target, spec.loss))}
        for name, value in (found | spec.metrics(output, batch.target)).items():
            totals[name] += value * batch.size / 10
    return Evaluation(minibatch=minibatch, samples=10, loss=totals.pop("loss"), metrics={**totals})


def assert_same(found: Evaluation, wanted: Evaluation) -> None:
    assert (found.minibatch, found.samples) == (wanted.minibatch, wanted.samples)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
    assert found.metrics == pytest.approx(wanted.metrics, rel=1e-5)


def cases(path: Path, plan: Plan) -> list[Case]:
    """Make a case with evaluation and one without."""
    options = TrainingOptions(evaluate_every=EVERY)
    return [Case(path, plan, options, STEPS), Case(path, plan, TrainingOptions(), STEPS)]


@pytest.mark.parametrize(
    ("replicas", "others"),
    [
        pytest.param((1, 1), [("gpipe", 2)], id="1-1", marks=pytest.mark.slow),
        pytest.param((2, 1), [("1f1b-flush", 2)], id="2-1", marks=pytest.mark.slow),
        pytest.param((1, 2), [("2bw", 4)], id="1-2", marks=pytest.mark.slow),
    ],
)
def test_evaluation_is_that_of_the_unsplit_model_and_disturbs_nothing(
    replicas: tuple[int, ...], others: list[tuple[str, int]], tmp_path: Path
) -> None:
    """Covers BatchNorm, dropout, skips and blocks; training is equal to the bit."""
    runs: list[Case] = []
    for model in ("convolutional", "language", "blocks"):
        path = write_model(tmp_path, model, "momentum", samples=SAMPLES, more=EVALUATION)
        profile = structural_profile(path, 4)
        runs += cases(path, make_plan(profile, replicas))
        if model == "convolutional":
            for schedule, microbatches in others:
                runs += cases(path, make_plan(profile, replicas, schedule, microbatches))
    outcomes = eager.run_cases(runs)
    for index in range(0, len(runs), 2):
        (evaluated, weights), (plain, same_weights) = outcomes[index : index + 2]
        assert evaluated.losses == plain.losses
        for name, tensor in weights.items():
            assert torch.equal(tensor, same_weights[name]), name
        assert [each.minibatch for each in evaluated.evaluations] == [4, 8, 11]
        assert_same(
            evaluated.evaluations[-1], expected(load_model_file(runs[index].path), weights, STEPS)
        )


def test_an_evaluation_in_between_sees_the_weights_of_that_moment(tmp_path: Path) -> None:
    """A run that ends there evaluates the same: without replicas, all stages have had the same
    updates.
    """
    path = write_model(tmp_path, "language", "momentum", samples=SAMPLES, more=EVALUATION)
    plan = make_plan(structural_profile(path, 4), (1, 1))
    longer = Case(path, plan, TrainingOptions(evaluate_every=EVERY), STEPS)
    shorter = Case(path, plan, TrainingOptions(evaluate_every=100), EVERY)
    (one, _), (other, _) = eager.run_cases([longer, shorter])
    assert one.evaluations[0].loss == other.evaluations[0].loss
    assert one.evaluations[0].metrics == other.evaluations[0].metrics


def test_points_are_where_all_stages_end_a_round() -> None:
    shape = PipelineShape(((0, 1), (2, 3, 4), (5,)), (Channel(0, 1), Channel(1, 2)), ONE_F_ONE_B)
    assert evaluation_points(shape, 0, 30, 5) == [6, 12, 18, 24, 30]
    assert evaluation_points(shape, 0, 10, 5) == [6, 10]
    assert evaluation_points(shape, 10, 17, 5) == [16], (
        "the multiples are the run's, the rounds the segment's"
    )
    assert evaluation_points(shape, 10, 15, 5) == [15], "all rounds end where the segment does"
    flush = PipelineShape(((0,), (1,)), (Channel(0, 1),), GPIPE, microbatches=4)
    assert evaluation_points(flush, 0, 7, 3) == [3, 6]


@pytest.mark.parametrize("replicas", [(1, 1), (2, 1), (2, 3, 1), (1, 3)])
def test_stopping_at_such_points_cannot_deadlock(replicas: tuple[int, ...]) -> None:
    """Until a stage stops, it needs nothing that another stage sends only after its own stop."""
    ranks, first = [], 0
    for count in replicas:
        ranks.append(tuple(range(first, first + count)))
        first += count
    channels = tuple(Channel(stage, stage + 1) for stage in range(len(replicas) - 1))
    shape = PipelineShape(tuple(ranks), channels, ONE_F_ONE_B)
    (point,) = evaluation_points(shape, 0, 12, 12)
    sent, needed = set(), set()
    for stage, own in enumerate(ranks):
        for rank in own:
            left = point // len(own)
            for instruction in stream(shape, stage, rank, 60):
                match instruction:
                    case Update():
                        left -= 1
                        if not left:
                            break
                    case SendActivation() | SendGradient():
                        sent.add((matching_receive(instruction, rank), instruction.peer_rank))
                    case ReceiveActivation() | ReceiveGradient():
                        needed.add((instruction, rank))
    assert needed <= sent


def test_evaluation_needs_data(tmp_path: Path) -> None:
    spec = load_model_file(write_model(tmp_path, "language", "sgd"))
    with pytest.raises(
        ModelFileError, match=r"has no evaluation_dataset\(\), which `evaluate_every` needs"
    ):
        spec.evaluation_dataset()


def test_metrics_must_be_numbers(tmp_path: Path) -> None:
    more = "\ndef metrics(output, target):\n    return output\n"
    spec = load_model_file(write_model(tmp_path, "language", "sgd", more=more))
    with pytest.raises(
        ModelFileError, match=r"metrics\(\) at .* returned a Tensor, not numbers by name"
    ):
        spec.metrics(torch.zeros(2), None)


def test_stages_that_share_a_weight_evaluate_with_its_newest_copy(tmp_path: Path) -> None:
    """Under 1f1b the last stage applies the gradients of other stages some minibatches later."""
    path = write_model(tmp_path, "tied", "momentum", samples=SAMPLES, more=EVALUATION)
    plan = make_plan(structural_profile(path, 4), (1, 1), "1f1b")
    run, weights = eager.run_one(path, plan, TrainingOptions(evaluate_every=2), steps=6)
    plain, same_weights = eager.run_one(path, plan, TrainingOptions(), steps=6)
    assert_same(run.evaluations[-1], expected(load_model_file(path), weights, 6))
    assert run.losses == plain.losses
    for name, tensor in weights.items():
        assert torch.equal(tensor, same_weights[name]), name
