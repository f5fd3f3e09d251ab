"""Stages that stay while a run changes its plan keep their tensors."""

from __future__ import annotations

import torch
from torch import nn

from planner.executor.checkpoint.stage_parts import Restorable
from planner.executor.checkpoint.staying import staying_stages, take_staying
from planner.formats.cluster import flat_cluster
from planner.formats.plan import Plan
from tests.simulator.plans import equal_layers, plan_of

CLUSTER = flat_cluster(3, 1e9)


def plan_with(cuts: tuple[int, int]) -> Plan:
    """Three stages of six layers that are cut after so many."""
    plan = plan_of(equal_layers(3), (1, 1, 1), CLUSTER, schedule="1f1b-flush")
    names = [f"l{number}" for number in range(6)]
    parts = [names[: cuts[0]], names[cuts[0] : cuts[1]], names[cuts[1] :]]
    stages = [
        stage.model_copy(update={"layers": tuple(part)})
        for stage, part in zip(plan.stages, parts, strict=True)
    ]
    return plan.model_copy(update={"stages": tuple(stages)})


def on_ranks(plan: Plan, *ranks: int) -> Plan:
    stages = [
        stage.model_copy(update={"ranks": (rank,)})
        for stage, rank in zip(plan.stages, ranks, strict=True)
    ]
    return plan.model_copy(update={"stages": tuple(stages)})


def test_a_stage_stays_with_its_layers_and_its_worker() -> None:
    before = plan_with((2, 4))
    assert staying_stages(before, before) == {0: 0, 1: 1, 2: 2}
    assert staying_stages(before, plan_with((3, 4))) == {2: 2}
    assert staying_stages(before, plan_with((2, 3))) == {0: 0}
    assert staying_stages(before, on_ranks(before, 1, 0, 2)) == {2: 2}


def restorable(stage: int, seed: int, factor: float = 1.0) -> Restorable:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1 * factor)
    return Restorable(stage, 0, module, optimizer, factor)


def train(own: Restorable, steps: int) -> None:
    drawn = torch.Generator().manual_seed(steps)
    assert own.optimizer is not None
    for _ in range(steps):
        own.optimizer.zero_grad()
        own.module(torch.randn(8, 3, generator=drawn)).square().mean().backward()
        own.optimizer.step()


def test_it_trains_on_as_if_nothing_had_happened() -> None:
    plan = plan_with((2, 4))
    old = restorable(1, seed=0)
    train(old, 3)
    assert old.optimizer is not None
    moments = [state["exp_avg"] for state in old.optimizer.state.values()]

    staying, others = take_staying(plan, plan, [old])
    new = restorable(1, seed=1)
    staying[1].restore(new)

    assert not others
    assert new.optimizer is not None
    kept = [state["exp_avg"] for state in new.optimizer.state.values()]
    assert all(one is other for one, other in zip(moments, kept, strict=True))

    expected = restorable(1, seed=0)
    train(expected, 3)
    train(expected, 5)
    train(new, 5)
    for name, tensor in expected.module.state_dict().items():
        assert torch.equal(tensor, new.module.state_dict()[name])


def test_learning_rates_become_those_of_the_new_plan() -> None:
    plan = plan_with((2, 4))
    old = restorable(1, seed=0, factor=1.0)
    train(old, 1)
    staying, _ = take_staying(plan, plan, [old])
    new = restorable(1, seed=0, factor=0.5)
    staying[1].restore(new)
    assert new.optimizer is not None
    assert [group["lr"] for group in new.optimizer.param_groups] == [0.05]
