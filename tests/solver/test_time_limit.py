"""A time limit ends whatever is going on, and leaves a plan with an honest bound."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import pytest

from planner.formats.cluster import Cluster, flat_cluster, hierarchical_cluster
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.options.solving import Progress
from planner.reporting.tables.plan import plan_report
from planner.schedule.one_stage import ONE_F_ONE_B
from planner.schedule.schedule import Channel, PipelineShape
from planner.simulator.pipeline_costs import PipelineCosts, StageCosts
from planner.solver import search_plan as solve
from planner.solver.clock import Clock
from planner.solver.problem.budget import Budget
from planner.solver.search.levels.relaxed import Relaxed
from tests.samples import layer, profile

CHAIN = profile(
    *(
        layer(f"l{n}", 1 + n * 37 % 11, 2, output_bytes=1 + n * 29 % 7, weight_bytes=n)
        for n in range(40)
    )
)
LEVELS = hierarchical_cluster((4, 2), (20.0, 5.0))


@dataclass(frozen=True)
class Looks(Clock):
    """Passes when it has been looked at so often."""

    at_s: float | None = None
    looks: int = 0
    number: count[int] = field(default_factory=count)

    @property
    def passed(self) -> bool:
        return next(self.number) >= self.looks


def straight(stages: int) -> PipelineCosts:
    shape = PipelineShape(
        tuple((stage,) for stage in range(stages)),
        tuple(Channel(s, s + 1) for s in range(stages - 1)),
        ONE_F_ONE_B,
    )
    bytes_ = {(stage, stage + 1): (1, 1) for stage in range(stages - 1)}
    return PipelineCosts(
        shape, flat_cluster(stages, 3.0), (StageCosts(1.0, 2.0, 0.0),) * stages, bytes_
    )


def test_a_simulation_ends_at_the_clock() -> None:
    whole = Budget.unlimited()
    assert whole.steady_s(straight(6)) is not None
    hurried = Budget(Looks(looks=5), most=10.0**6)
    assert hurried.steady_s(straight(6), needed=True) is None
    executed = 10**6 - hurried.left
    assert 0 < executed < 300  # two backwards of the first stage of six, after it has admitted six
    assert whole.exhausted
    assert not hurried.exhausted


def test_a_simulation_ends_with_what_may_be_executed() -> None:
    budget = Budget(most=100)
    assert budget.steady_s(straight(6)) is None
    assert budget.left <= 0
    assert budget.over
    assert not budget.exhausted
    assert budget.steady_s(straight(6), needed=True) is not None  # there is nothing else to go by


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cluster", [flat_cluster(8, 5.0), LEVELS], ids=["flat", "levels"])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "1f1b-flush", "gpipe", "interleaved"])
def test_without_time_only_plans_that_take_no_search_are_simulated(
    cluster: Cluster, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurried = solved(CHAIN, cluster, schedule, 0.0)
    best = solved(CHAIN, cluster, schedule, None)
    assert hurried.solver.lower_bound_s <= best.predicted.seconds_per_minibatch * (1 + 1e-9)
    assert hurried.solver.simulated > 0
    assert hurried.predicted.by == "simulation"
    assert "others could be faster" in plan_report(hurried)

    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(Relaxed, "best", never)
    assert solved(CHAIN, cluster, schedule, 0.0).config == hurried.config


def solved(model: Profile, cluster: Cluster, schedule: str, limit_s: float | None) -> Plan:
    microbatches = 1 if schedule == "1f1b" else 8
    return solve(model, cluster, schedule=schedule, microbatches=microbatches, time_limit_s=limit_s)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_who_waits_no_longer_gets_the_best_plan_so_far(schedule: str) -> None:
    """As the first Ctrl-C of `plan solve` does, here before the search begins, which has no time
    limit.
    """
    progress = Progress()
    progress.stop.set()
    plan = solve(
        CHAIN,
        LEVELS,
        schedule=schedule,
        microbatches=1 if schedule == "1f1b" else 8,
        progress=progress,
    )
    assert (plan.solver.status, plan.solver.exhausted) == ("feasible", False)
    assert plan.predicted.by == "simulation"
