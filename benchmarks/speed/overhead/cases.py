"""The cases that are measured, and the operations of their stages alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

import planner
from planner.cost.candidate import candidates
from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.executor.run.context import HeldStage, PipelineContext
from planner.formats.cluster import flat_cluster
from planner.formats.plan import Plan
from planner.schedule.instructions import Unit
from planner.schedule.registry import find
from planner.solver.assemble import assemble
from planner.solver.evaluate.evaluation import priced
from planner.solver.problem.problem import Problem
from planner.solver.problem.states import uncut_groups

MODEL = Path(__file__).with_name("model.py")
WORKERS = 3
SAMPLES = 8  # per microbatch


@dataclass(frozen=True)
class Case:
    """A worker of a straight pipeline of three stages."""

    schedule: str
    microbatches: int
    stage: int

    @property
    def name(self) -> str:
        """What a column of the table is called."""
        where = ("first", "middle", "last")[self.stage]
        return f"{self.schedule}, {self.microbatches} per update, {where} stage"


CASES = (
    Case("1f1b-flush", 8, 1),
    Case("1f1b-flush", 8, 0),
    Case("1f1b-flush", 8, 2),
    Case("1f1b", 1, 1),
)


def plan_of(case: Case) -> Plan:
    """Return the plan with a third of the layers in each stage."""
    layer_costs = LayerCosts(planner.estimate(MODEL, device="cpu", batch_size=SAMPLES))
    groups = uncut_groups(layer_costs)
    cuts = [len(groups) * stage // WORKERS for stage in range(WORKERS + 1)]
    parts = [[layer for group in groups[a:b] for layer in group] for a, b in pairwise(cuts)]
    problem = Problem(
        layer_costs, Setting(flat_cluster(WORKERS, 1e9), find(case.schedule), case.microbatches)
    )
    return assemble(problem, priced(problem, candidates(parts, (1,) * WORKERS)))


def bare_unit(context: PipelineContext, stage: HeldStage) -> Callable[[], None]:
    """Return a function that runs the stage's operations on one unit, forward and backward, and
    nothing else.
    """
    module = stage.module
    inputs = module._read(context.data.batch(Unit(0))) if module.needs_batch else []
    received = [torch.randn(spec.shape(SAMPLES)) for spec in module.received]
    numbers = module._numbers_for(inputs, received)
    fixed = (context.place.compute, module._key, None, *inputs)
    run = module._code.run
    gradients = [torch.ones(spec.shape(SAMPLES)) for spec in module.sent]

    def unit() -> None:
        values = [value.detach().requires_grad_() for value in received]
        results = run(*fixed, *values, *numbers)
        if module.has_loss:  # the last one; the others are kept to be compared
            torch.autograd.backward(results[-1])
        else:
            torch.autograd.backward(results, gradients)

    return unit


def bare_update(stage: HeldStage) -> Callable[[], None]:
    """Return a function that steps the stage's optimizer and drops the gradients."""
    parameters, optimizer = stage.optimizer.parameters, stage.optimizer.optimizer
    assert optimizer is not None

    def update() -> None:
        optimizer.step()
        for parameter in parameters:
            parameter.grad = None

    return update
