"""Whatever a plan and its options combine: it trains as one process would, or as the formula of its
schedule says, or it is refused with a sentence.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from planner.errors import PlannerError
from tests.drawn.runs import IN_DOUBLE as MODELS_IN_DOUBLE
from tests.drawn.runs import (
    DrawnRun,
    Running,
    draw_run,
    draw_run_in,
    expected_of,
    jobs_of,
    losses_by_own_loop,
    write_file,
)
from tests.drawn.trainings import losses_by_job, trained

FIRST = 4  # seeds that every run trains
PER_TEST, ALL = 20, 200
REFUSED = 0.1  # of the runs, at most
IN_DOUBLE = 1e-7  # relative, of losses, and of weights above 1, otherwise absolute
IN_BFLOAT16 = 1e-2  # in which experts compute, and weights with masters are
IN_ONE_PIECE = 2e-3  # in bfloat16, where no sum over ranks is rounded to it
WAYS: tuple[Running, ...] = ("under autocast", "with masters", "compiled")


def off_by(run: DrawnRun, folder: Path) -> float:
    """Train a drawn run in worker processes, and return by how much its losses or weights are not
    what they must be; raise PlannerError where it is refused.
    """
    path = write_file(run, folder)
    jobs = jobs_of(run, path, folder)
    losses: list[float] = []
    for number, job in enumerate(jobs):
        own = folder / f"part {number}"
        own.mkdir()
        losses += trained(job, own, losses_by_own_loop if run.own_loop else losses_by_job)

    right, weights = expected_of(run, path, jobs[0].plan)
    assert len(losses) == len(right)
    saved = torch.load(str(jobs[-1].save_weights), weights_only=True)
    of_losses = (abs(loss - true) / abs(true) for loss, true in zip(losses, right, strict=True))
    of_weights = (_off_by(saved[name], weight) for name, weight in weights.items())
    differences = [*of_losses, *of_weights]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def _off_by(weight: Tensor, true: Tensor) -> float:
    return float(((weight - true).abs() / true.abs().clamp(min=1)).max())


def check(run: DrawnRun, folder: Path) -> None:
    allowed = IN_DOUBLE if run.in_double else IN_BFLOAT16
    if run.running == "under autocast" and run.model in MODELS_IN_DOUBLE and not run.divides:
        allowed = IN_ONE_PIECE
    difference = off_by(run, folder)
    assert difference <= allowed, f"off by {difference:.1e}: {run}"


@pytest.mark.parametrize("seed", range(FIRST))
def test_a_drawn_run_trains_as_one_process(seed: int, tmp_path: Path) -> None:
    check(draw_run(seed), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(FIRST, FIRST + ALL, PER_TEST))
def test_many_drawn_runs_train_as_one_process_or_are_refused(first: int, tmp_path: Path) -> None:
    refusals = []
    for seed in range(first, first + PER_TEST):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            check(draw_run(seed), folder)
        except PlannerError as refusal:
            refusals.append(refusal)
    assert all(refusal.hint for refusal in refusals)
    assert len(refusals) <= REFUSED * PER_TEST, refusals


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, 20, 10))
@pytest.mark.parametrize("running", WAYS)
def test_drawn_runs_in_other_ways_train_as_one_process(
    first: int, running: Running, tmp_path: Path
) -> None:
    refusals = []
    for seed in range(first, first + 10):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            check(draw_run_in(running, seed), folder)
        except PlannerError as refusal:
            refusals.append(refusal)
    assert all(refusal.hint for refusal in refusals)


def test_a_seed_draws_the_same_run_again() -> None:
    assert draw_run(17) == draw_run(17)
