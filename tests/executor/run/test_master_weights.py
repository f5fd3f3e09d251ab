"""Weights in half precision with masters train as float32 weights do that are rounded where they
are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

import planner
from planner.errors import InputError
from planner.formats.cluster import flat_cluster
from planner.formats.plan import Plan
from planner.model.options import ModuleOptions
from planner.model.spec import TrainingSpec, load_model_file
from planner.options.training import CheckpointOptions, TrainingOptions
from planner.workers.job import Job, TrainResult
from tests.executor import eager
from tests.executor.eager import SEED, Case
from tests.executor.models import write_model
from tests.executor.plans import in_groups, make_plan, sharded, structural_profile
from tests.executor.processes import run_jobs
from tests.executor.reference import Weights, delayed_updates, plain_training

pytestmark = pytest.mark.usefixtures("warm_start")

SAMPLES, STEPS = 32, 6
HALF = ModuleOptions(half=torch.bfloat16)


class Rounded(nn.Module):
    """The unsplit model with float32 weights, which are rounded to half precision in every
    forward.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self._dtype, self._model = dtype, (model,)  # in a tuple, so that names stay the model's
        for name, parameter in model.named_parameters():
            with torch.no_grad():
                parameter.copy_(parameter.to(dtype))
            self.register_parameter(name.replace(".", "|"), parameter)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        (model,) = self._model
        rounded = {
            name.replace("|", "."): each.to(self._dtype) for name, each in self.named_parameters()
        }

        def half(leaf: Tensor) -> Tensor:
            return leaf.to(self._dtype) if leaf.is_floating_point() else leaf

        output: Tensor = functional_call(
            model, rounded, *tree_map_only(Tensor, half, (args, kwargs))
        )
        return output.float()


def plan_of(
    path: Path, replicas: tuple[int, ...], schedule: str = "1f1b-flush", microbatches: int = 2
) -> Plan:
    return make_plan(structural_profile(path, 4, HALF), replicas, schedule, microbatches)


def plain(
    spec: TrainingSpec, microbatches: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[float], Weights]:
    """Ordinary training of the unsplit model."""
    model = Rounded(eager.build(spec), dtype)
    batches = eager.minibatches(spec, 4 * microbatches, 9)

    def losses(model: nn.Module, minibatch: int) -> list[Tensor]:
        return [eager.loss_of(spec, model, part) for part in batches[minibatch].split(microbatches)]

    found, weights = plain_training(model, spec.optimizer, losses, STEPS)
    return found, {name.replace("|", "."): tensor.to(dtype) for name, tensor in weights.items()}


def losses(result: TrainResult) -> list[float | None]:
    return [entry.loss for entry in result.losses]


def test_pipelines_equal_their_references_to_the_bit(tmp_path: Path) -> None:
    paths = {
        name: write_model(tmp_path, "language", name, samples=SAMPLES)
        for name in ("adamw", "momentum")
    }
    schedules = ["1f1b-flush", "zb-h1"]
    cases = [
        Case(paths["momentum"], plan_of(paths["momentum"], (1, 1), each), steps=STEPS)
        for each in schedules
    ]
    cases.append(Case(paths["adamw"], plan_of(paths["adamw"], (1, 1), "1f1b", 1), steps=STEPS))
    *flushed, stashed = eager.run_cases(cases)
    expected, weights = plain(load_model_file(paths["momentum"]), 2)
    for result, found in flushed:
        # the mean of two losses, added up in another way
        assert losses(result) == pytest.approx(expected, rel=1e-6)
        assert_equal(found, weights)

    spec = load_model_file(paths["adamw"])
    batches = eager.minibatches(spec, 4, 9)
    names = eager.stage_names(structural_profile(paths["adamw"], 4, HALF), cases[-1].plan)
    expected, weights = delayed_updates(
        Rounded(eager.build(spec)),
        [[name.replace(".", "|") for name in each] for each in names],
        (1, 1),
        spec.optimizer,
        lambda model, minibatch: eager.loss_of(spec, model, batches[minibatch]),
        STEPS,
    )
    assert losses(stashed[0]) == expected
    assert_equal(
        stashed[1], {name.replace("|", "."): tensor.bfloat16() for name, tensor in weights.items()}
    )


def assert_equal(found: Weights, expected: Weights) -> None:
    assert found.keys() >= expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    "levels",
    [
        pytest.param((3,), id="some"),
        pytest.param((0, 1, 2), id="the others", marks=pytest.mark.slow),
    ],
)
def test_replicas_and_divided_layers_train_as_one_process(
    levels: Sequence[int], tmp_path: Path
) -> None:
    """Replicas divide nothing at level 0."""
    tied, attention = (
        write_model(tmp_path, name, "adamw", samples=SAMPLES) for name in ("tied", "attention")
    )
    whole, options = plan_of(tied, (2,)), TrainingOptions(clip_grad_norm=0.5)
    alone = eager.run_cases(
        [Case(path, plan_of(path, (1,)), options, STEPS) for path in (tied, attention)]
    )
    plans = [(tied, sharded(whole, level) if level else whole) for level in levels]
    plans.append((attention, in_groups(plan_of(attention, (1,)), 2)))
    runs = eager.run_cases([Case(path, plan, options, STEPS) for path, plan in plans])
    for (path, plan), (result, weights) in zip(plans, runs, strict=True):
        expected, one = alone[path == attention]
        assert losses(result) == pytest.approx(losses(expected), rel=5e-3), plan.config
        for name, tensor in one.items():
            torch.testing.assert_close(weights[name], tensor, rtol=2e-2, atol=2e-2, msg=name)


@pytest.mark.slow
def test_statistics_of_batches_stay_in_float32(tmp_path: Path) -> None:
    path = write_model(tmp_path, "convolutional", "momentum", samples=SAMPLES)
    cut, alone = (plan_of(path, replicas, microbatches=1) for replicas in ((1, 1), (1,)))
    (result, weights), (expected, one) = (
        eager.run_one(path, plan, TrainingOptions(), steps=3) for plan in (cut, alone)
    )
    divided, _ = eager.run_one(path, plan_of(path, (1,)), TrainingOptions(), steps=3)
    assert losses(result) == losses(expected)
    assert_equal(weights, one)
    kinds = {
        name.rpartition(".")[2]: str(tensor.dtype)
        for name, tensor in weights.items()
        if ".norm." in name
    }
    assert kinds["running_mean"] == kinds["weight"] == "torch.float32"
    assert weights["stem.weight"].dtype == torch.bfloat16
    for level in (2, 3):
        plan = sharded(plan_of(path, (2,)), level)
        result, _ = eager.run_one(path, plan, TrainingOptions(), steps=3)
        assert losses(result) == pytest.approx(losses(divided), rel=5e-3)


def test_losses_in_float16_are_scaled(tmp_path: Path) -> None:
    path = write_model(tmp_path, "language", "momentum", samples=SAMPLES)
    options = ModuleOptions(half=torch.float16)
    plan = make_plan(structural_profile(path, 4, options), (1, 1), "1f1b-flush", 2)
    result, _ = eager.run_one(path, plan, TrainingOptions(), steps=STEPS)
    assert losses(result) == pytest.approx(
        plain(load_model_file(path), 2, torch.float16)[0], rel=1e-3
    )


@pytest.mark.parametrize(
    "levels",
    [
        pytest.param((None, 3, None), id="some"),
        pytest.param((None, 1, 3, None), id="all", marks=pytest.mark.slow),
    ],
)
def test_masters_go_on_in_any_plan(levels: Sequence[int | None], tmp_path: Path) -> None:
    """From a pipeline (None) to a divided optimizer, to divided weights, to a pipeline: replicas
    add in another order.
    """
    path = write_model(tmp_path, "tied", "adamw", samples=SAMPLES)
    cut, whole = plan_of(path, (1, 1)), plan_of(path, (2,))
    course = [cut if level is None else sharded(whole, level) for level in levels]
    job = Job(
        model=str(path),
        plan=cut,
        steps=2 * len(course),
        seed=SEED,
        save_weights=str(tmp_path / "whole.pt"),
    )
    jobs = [job]
    for number, plan in enumerate(course):
        resume = "auto" if number else None
        checkpoints = CheckpointOptions(
            checkpoint_folder=str(tmp_path / "checkpoints"), checkpoint_every=2, resume=resume
        )
        changed = {"plan": plan, "steps": 2 * (number + 1), "checkpoints": checkpoints}
        jobs.append(
            job.model_copy(update=changed | {"save_weights": str(tmp_path / f"{number}.pt")})
        )
    expected, *rest = run_jobs(jobs, tmp_path)
    assert [loss for result in rest for loss in losses(result)] == pytest.approx(
        losses(expected), rel=1e-3
    )
    last = f"{len(course) - 1}.pt"
    one, other = (torch.load(tmp_path / name, weights_only=True) for name in ("whole.pt", last))
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=2e-2, atol=2e-2, msg=name)


def test_the_way_from_a_measured_profile(tmp_path: Path) -> None:
    path = write_model(tmp_path, "language", "adamw", samples=SAMPLES)
    how: dict[str, Any] = {
        "batch_size": 4,
        "dtype": "bfloat16",
        "master_weights": True,
        "seconds": 0.1,
    }
    profile = planner.profile(path, **how)
    trained = sum(layer.weight_bytes for layer in profile.layers)
    assert sum(layer.gradient_bytes for layer in profile.layers) == 2 * trained
    counters = 4 * 13  # Adam's steps, one per tensor
    assert sum(layer.optimizer_bytes for layer in profile.layers) == (2 + 4) * trained + counters
    assert (profile.autocast, profile.master_weights) == (None, "bfloat16")
    plan = planner.price(profile, flat_cluster(2, 1e9), 2, schedule="1f1b-flush", microbatches=2)
    assert len(planner.train(path, plan, steps=3).losses) == 3
    with pytest.raises(
        InputError, match="all-reduces gradients in the weights' own type, which is bfloat16"
    ):
        planner.train(path, plan, steps=3, baseline="data-parallel")
    with pytest.raises(InputError, match="needs no master weights"):
        planner.profile(path, batch_size=4, master_weights=True)
