"""Train the unsplit model of a model file in plain PyTorch, on the data that the workers have, in
their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.model.batch import Batch, collate
from planner.model.loss import loss_of as loss_of_output
from planner.model.spec import TrainingSpec
from planner.options.training import TrainingOptions
from planner.workers.job import Job, TrainResult
from tests.executor.processes import run_jobs
from tests.executor.reference import Weights

SEED = 3


@dataclass(frozen=True)
class Case:
    """A run of a plan, for a number of minibatches or epochs."""

    path: Path
    plan: Plan
    options: TrainingOptions = field(default_factory=TrainingOptions)
    steps: int | None = None
    epochs: int | None = None


def run_cases(cases: Sequence[Case]) -> list[tuple[TrainResult, Weights]]:
    """Train all cases, which need the same number of workers, in one set of real processes."""
    folder = cases[0].path.parent
    jobs = [
        Job(
            model=str(case.path),
            plan=case.plan,
            steps=case.steps,
            epochs=case.epochs,
            seed=SEED,
            options=case.options,
            save_weights=str(folder / f"weights-{index}.pt"),
        )
        for index, case in enumerate(cases)
    ]
    results = run_jobs(jobs, folder)
    return [
        (result, torch.load(str(job.save_weights), weights_only=True))
        for job, result in zip(jobs, results, strict=True)
    ]


def run_one(
    path: Path,
    plan: Plan,
    options: TrainingOptions,
    *,
    steps: int | None = None,
    epochs: int | None = None,
) -> tuple[TrainResult, Weights]:
    """Train in real processes; return the result and the weights."""
    (outcome,) = run_cases([Case(path, plan, options, steps, epochs)])
    return outcome


def stage_names(profile: Profile, plan: Plan) -> list[list[str]]:
    """Return the names of each stage's parameters."""
    parameters = {layer.name: layer.parameters for layer in profile.layers}
    return [[name for layer in stage.layers for name in parameters[layer]] for stage in plan.stages]


def build(spec: TrainingSpec) -> nn.Module:
    """Build the model as the workers initialise it."""
    torch.manual_seed(SEED)
    return spec.build_model()


def minibatches(spec: TrainingSpec, size: int, epochs: int) -> list[Batch]:
    """Return the minibatches of `epochs`, each a permutation of the dataset, with what remains in
    the last one.
    """
    dataset = spec.dataset()
    assert dataset is not None
    count = len(dataset)  # type: ignore[arg-type]
    batches = []
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(SEED * 1_000_003 + epoch)
        order = torch.randperm(count, generator=generator).tolist()
        batches += [
            collate([dataset[i] for i in order[start : start + size]])
            for start in range(0, count, size)
        ]
    return batches


def loss_of(spec: TrainingSpec, model: nn.Module, batch: Batch) -> Tensor:
    """Run the forward and return the loss."""
    return loss_of_output(model(*batch.args, **batch.kwargs), batch.target, spec.loss)


def train(
    spec: TrainingSpec,
    model: nn.Module,
    batches: list[Batch],
    step: Callable[[torch.optim.Optimizer], object] = lambda optimizer: optimizer.step(),
    optimizer: torch.optim.Optimizer | None = None,
) -> list[float]:
    """Train and return the losses; `step` is called after each backward."""
    optimizer = spec.optimizer(list(model.parameters())) if optimizer is None else optimizer
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(spec, model, batch)
        torch.autograd.backward(loss)
        step(optimizer)
        losses.append(float(loss.detach()))
    return losses


def assert_close(weights: Weights, model: nn.Module) -> None:
    """Check that the weights equal the model's, to rounding."""
    expected = model.state_dict()
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
