"""NewestMuon under late gradients, against late gradients made in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.convergence.emulation import LateWeights, lateness
from planner.model.spec import load_model_file
from planner.workers.job import TrainResult
from tests.executor import eager
from tests.executor.eager import Case
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile
from tests.executor.reference import Weights

MINIBATCHES = 11
NEWEST_MUON = """
from docs.examples.newest_muon import NewestMuon

def optimizer(named_parameters):
    return NewestMuon(named_parameters, lr=0.02)
"""


def assert_late(case: Case, late: Sequence[int], outcome: tuple[TrainResult, Weights]) -> None:
    """Equal, to rounding, to one process whose stages have gradients that are `late`."""
    spec = load_model_file(case.path)
    model = eager.build(spec)
    optimizer = spec.optimizer(dict(model.named_parameters()))
    size = case.plan.minibatch_size
    assert size is not None
    names = eager.stage_names(structural_profile(case.path, size), case.plan)
    stages = [[model.get_parameter(name) for name in own] for own in names]
    weights = LateWeights(stages, late)
    losses = []
    for batch in eager.minibatches(spec, size, 1):
        optimizer.zero_grad()
        weights.put_older()
        loss = eager.loss_of(spec, model, batch)
        torch.autograd.backward(loss)
        weights.put_newest()
        optimizer.step()
        losses.append(float(loss.detach()))
    result, trained = outcome
    assert [entry.loss for entry in result.losses] == pytest.approx(losses, rel=1e-4)
    eager.assert_close(trained, model)


@pytest.mark.parametrize(
    ("schedule", "microbatches", "late"),
    [("1f1b", 1, [1, 0]), pytest.param("2bw", 2, [1, 1], marks=pytest.mark.slow)],
)
def test_runs_equal_late_gradients_in_one_process(
    tmp_path: Path, schedule: str, microbatches: int, late: Sequence[int]
) -> None:
    path = write_model(tmp_path, "language", "momentum", samples=8 * MINIBATCHES, more=NEWEST_MUON)
    profile = structural_profile(path, 8 // microbatches)
    case = Case(path, make_plan(profile, (1, 1), schedule, microbatches), epochs=1)
    (outcome,) = eager.run_cases([case])
    assert_late(case, late, outcome)


@pytest.mark.slow
def test_four_stages_equal_late_gradients_in_one_process(tmp_path: Path) -> None:
    path = write_model(tmp_path, "language", "momentum", samples=8 * MINIBATCHES, more=NEWEST_MUON)
    case = Case(path, make_plan(structural_profile(path, 8), (1, 1, 1, 1)), epochs=1)
    (outcome,) = eager.run_cases([case])
    assert_late(case, lateness("1f1b", 4), outcome)
