"""Compressed activations and gradients: training equals that of one process which rounds at the
same places.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from planner.executor.run.data import make_batches
from planner.formats.names import CodecName
from planner.formats.plan import Plan
from planner.model.spec import TrainingSpec, load_model_file
from planner.schedule.instructions import Unit
from planner.workers.job import Job
from tests.executor.models import OPTIMIZERS
from tests.executor.plans import make_plan, structural_profile
from tests.executor.processes import run_jobs
from tests.executor.reference import delayed_updates, double_buffered, plain_training
from tests.workers.test_coding import as_int8

BATCH_SIZE, SEED, STEPS = 8, 3, 6

# A skip that every block uses, and integers, cross all cuts.
MODEL = """
import torch
from torch import nn

class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 90)

    def forward(self, x):
        return self.linear(x), self.linear(x) * 2, (x[:, 0] > 0).long()

class Middle(nn.Linear):
    def forward(self, values):
        x, skip, side = values
        return torch.tanh(super().forward(x)) * (1 + side[:, None]) + skip, skip, side

class Head(nn.Linear):
    def forward(self, values):
        return super().forward(values[0] + values[1])

def build_model():
    return nn.Sequential(First(), Middle(90, 90), Middle(90, 90), Head(90, 4))

def blocks(model):
    return list(model)

def example_batch(batch_size):
    return (torch.randn(batch_size, 6),), torch.randint(0, 4, (batch_size,))

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def optimizer(parameters):
    return OPTIMIZER
"""

ROUND: dict[CodecName, Callable[[Tensor], Tensor]] = {
    "bfloat16": lambda x: x.bfloat16().float(),
    "int8": as_int8,
}


class Rounded(torch.autograd.Function):
    """A value that is rounded, as is its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, codec: CodecName) -> Tensor:
        """Round the value."""
        ctx.codec = codec
        return ROUND[codec](value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Round the gradient."""
        return ROUND[ctx.codec](gradient), None


def rounded(value: Tensor, codec: CodecName) -> Tensor:
    """Round a value that has a gradient."""
    if not value.requires_grad:
        return value
    made: Tensor = Rounded.apply(value, codec)  # type: ignore[no-untyped-call]
    return made


def compressed(plan: Plan, codec: CodecName) -> Plan:
    """The plan on links that code values so."""
    return plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"compress": codec})})


def forward_loss(spec: TrainingSpec, plan: Plan, model: nn.Module, unit: Unit) -> Tensor:
    """Run the unsplit model, rounding at the plan's cuts between workers."""
    batch = make_batches(spec, BATCH_SIZE, plan.microbatches, SEED).batch(unit)
    cuts = {
        after.layers[0] for before, after in pairwise(plan.stages) if before.ranks != after.ranks
    }
    (values,) = batch.args
    for name, block in model.named_children():
        if name in cuts:
            values = [rounded(value, plan.cluster.compress) for value in values]
        values = block(values)
    assert spec.loss is not None
    return spec.loss(values, batch.target)


def expected(path: Path, plan: Plan) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of one process."""
    spec = load_model_file(str(path))
    torch.manual_seed(SEED)
    model = spec.build_model()
    if plan.schedule.asynchronous:
        names = [
            [f"{layer}.{name}" for layer in s.layers for name in NAMES[layer]] for s in plan.stages
        ]

        def unit_loss(module: nn.Module, minibatch: int, microbatch: int = 0) -> Tensor:
            return forward_loss(spec, plan, module, Unit(minibatch, microbatch))

        if plan.schedule.divides:
            return double_buffered(
                model, names, plan.replicas, spec.optimizer, unit_loss, STEPS, plan.microbatches
            )
        return delayed_updates(model, names, plan.replicas, spec.optimizer, unit_loss, STEPS)
    return plain_training(
        model,
        spec.optimizer,
        lambda module, minibatch: [
            forward_loss(spec, plan, module, Unit(minibatch, number))
            for number in range(plan.microbatches)
        ],
        STEPS,
    )


NAMES = {
    "0": ("linear.weight", "linear.bias"),
    **dict.fromkeys("123", ("weight", "bias")),
    "loss": (),
}
ASYNCHRONOUS: list[tuple[CodecName, str, int]] = [("bfloat16", "1f1b", 1), ("int8", "1f1b", 1)]


@pytest.mark.parametrize(
    ("cases", "replicas", "chunks"),
    [
        pytest.param(
            [
                *ASYNCHRONOUS,
                ("bfloat16", "gpipe", 3),
                ("int8", "1f1b-flush", 4),
                ("bfloat16", "zb-h1", 4),
                ("int8", "2bw", 3),
            ],
            (1, 1, 1),
            1,
            id="1-1-1",
        ),
        pytest.param(
            [("int8", "interleaved", 4), ("bfloat16", "zb-v", 4)], (1, 1, 1, 1), 2, id="two chunks"
        ),
        pytest.param(ASYNCHRONOUS, (2, 1), 1, id="2-1", marks=pytest.mark.slow),
    ],
)
def test_training_equals_one_process_that_rounds_at_the_cuts(
    cases: list[tuple[CodecName, str, int]], replicas: tuple[int, ...], chunks: int, tmp_path: Path
) -> None:
    """To the bit under asynchronous schedules; the others add up microbatches in another order."""
    path = tmp_path / "model.py"
    path.write_text(MODEL.replace("OPTIMIZER", OPTIMIZERS["adamw"]), encoding="utf-8")
    profile = structural_profile(path, BATCH_SIZE)
    jobs = []
    for number, (codec, schedule, microbatches) in enumerate(cases):
        plan = compressed(
            make_plan(profile, replicas, schedule, microbatches, chunks=chunks), codec
        )
        weights = str(tmp_path / f"{number}.pt")
        jobs.append(Job(model=str(path), plan=plan, steps=STEPS, seed=SEED, save_weights=weights))
    for job, result in zip(jobs, run_jobs(jobs, tmp_path), strict=True):
        losses, trained = expected(path, job.plan)
        got = torch.load(str(job.save_weights), weights_only=True)
        if job.plan.schedule.asynchronous:
            assert [entry.loss for entry in result.losses] == pytest.approx(losses, rel=1e-6)
            assert all(torch.equal(got[name], tensor) for name, tensor in trained.items())
            continue
        assert [entry.loss for entry in result.losses] == pytest.approx(losses, rel=1e-4), (
            job.plan.schedule
        )
        for name, tensor in trained.items():
            torch.testing.assert_close(
                got[name], tensor, rtol=1e-3, atol=1e-4, msg=f"{job.plan.schedule} {name}"
            )
