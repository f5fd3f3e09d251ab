"""A plan that is not one of the model is refused by every worker.

What does not say what is computed changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

import planner
from planner.errors import PlanError, PlannerError
from planner.executor.communication.control import join_group
from planner.executor.run import stages as stages_of_workers
from planner.executor.run import train as train_of_workers
from planner.executor.run.build_context import pipeline_context
from planner.executor.run.stages import build_modules
from planner.formats.plan import Plan
from planner.model.spec import load_model_file
from planner.workers.job import Job
from planner.workers.place import CPU
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile
from tests.executor.processes import run_jobs

pytestmark = pytest.mark.usefixtures("warm_start")

SIZE = 4
Edit = Callable[[list[list[str]]], object]

EDITS: dict[str, tuple[Edit, str]] = {
    "without its last layer": (lambda layers: layers[-1].pop(), "no stage has the layer"),
    "without its first layer": (lambda layers: layers[0].pop(0), "where the model has 'embed'"),
    "with layers swapped": (lambda layers: layers[0].reverse(), "where the model has 'embed'"),
    "with stages swapped": (lambda layers: layers.reverse(), "where the model has 'loss'"),
    "cut elsewhere": (
        lambda layers: layers[1].insert(0, layers[0].pop()),
        "does not send the value",
    ),
}


def edited(plan: Plan, edit: Edit) -> Plan:
    """The plan with other layers in its stages, as an editor would leave it."""
    layers = [list(stage.layers) for stage in plan.stages]
    edit(layers)
    stages = [
        stage.model_copy(update={"layers": tuple(own)})
        for stage, own in zip(plan.stages, layers, strict=True)
    ]
    return Plan.model_validate_json(
        plan.model_copy(update={"stages": tuple(stages)}).model_dump_json()
    )


@pytest.fixture
def language(tmp_path: Path) -> tuple[Path, Plan]:
    path = write_model(tmp_path, "language", "adamw")
    return path, make_plan(structural_profile(path, SIZE), (1, 1), "1f1b-flush")


@pytest.mark.parametrize("name", EDITS)
def test_every_worker_refuses_an_edited_plan(name: str, language: tuple[Path, Plan]) -> None:
    path, plan = language
    edit, message = EDITS[name]
    job = Job(model=str(path), plan=edited(plan, edit), steps=2)
    for stage in range(2):
        with pytest.raises(PlanError, match=message) as error:
            build_modules(job, [stage], load_model_file(str(path)), "cpu")
        assert "plan solve" in error.value.hint


def test_training_does_not_start(language: tuple[Path, Plan]) -> None:
    path, plan = language
    weights = path.with_name("weights.pt")
    edit, message = EDITS["without its last layer"]
    with pytest.raises(PlannerError, match=message):  # of a worker
        planner.train(path, edited(plan, edit), steps=2, save_weights=weights)
    assert not weights.exists()


def test_other_fields_change_no_bit(language: tuple[Path, Plan], tmp_path: Path) -> None:
    path, plan = language
    first, last = plan.stages
    wrong = [
        transfer.model_copy(
            update={"output_bytes": 1, "gradient_bytes": 10**6, "values": transfer.values[::-1]}
        )
        for transfer in plan.transfers
    ]
    other_ranks = (
        first.model_copy(update={"ranks": last.ranks}),
        last.model_copy(update={"ranks": first.ranks}),
    )
    plans = [
        plan,
        plan.model_copy(update={"transfers": tuple(wrong)}),
        plan.model_copy(update={"stages": other_ranks}),
        plan.model_copy(
            update={"stages": (first.model_copy(update={"forward_s": 9.0, "in_flight": 1}), last)}
        ),
    ]
    jobs = [
        Job(
            model=str(path), plan=each, steps=6, seed=3, save_weights=str(tmp_path / f"{number}.pt")
        )
        for number, each in enumerate(plans)
    ]
    run_jobs(jobs, tmp_path)
    expected, *others = (torch.load(str(job.save_weights), weights_only=True) for job in jobs)
    for weights in others:
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_a_run_without_any_loss_is_an_error(
    language: tuple[Path, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reason: here the check of the plan is left out."""
    path, _ = language
    plan = make_plan(structural_profile(path, SIZE), (1,), "1f1b-flush")
    weights = tmp_path / "weights.pt"
    less = edited(plan, EDITS["without its last layer"][0])
    job = Job(model=str(path), plan=less, steps=3, save_weights=str(weights))
    variables = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    join_group()
    try:
        with mock.patch.object(stages_of_workers, "check_same_model"):
            context = pipeline_context(job, load_model_file(str(path)), CPU)
        priority = mock.patch.object(train_of_workers, "_let_messages_interrupt")  # of this process
        with (
            priority,
            pytest.raises(PlannerError, match="no worker has computed a loss, of 3 minibatches"),
        ):
            train_of_workers.train(context)
    finally:
        torch.distributed.destroy_process_group()
    assert not weights.exists()
