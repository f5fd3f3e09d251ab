"""A time limit ends whatever is going on, and leaves a plan with an honest bound."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from planner.cost.layer_costs import LayerCosts
from planner.cost.network.link import Link
from planner.cost.setting import Setting
from planner.cost.work import Integers
from planner.formats.cluster import Cluster, flat_cluster, hierarchical_cluster
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.options.solving import Progress
from planner.schedule.one_stage import ONE_F_ONE_B
from planner.schedule.schedule import Channel, PipelineShape
from planner.simulator.pipeline_costs import PipelineCosts, StageCosts
from planner.solver import search_plan as solve
from planner.solver.clock import Clock, OutOfTimeError
from planner.solver.improve.branches import improved_paths
from planner.solver.problem.budget import Budget
from planner.solver.problem.problem import Limits, Problem
from planner.solver.problem.replica_models import replica_model
from planner.solver.problem.result import RESOLUTION
from planner.solver.problem.states import Chain
from planner.solver.search.chain.fewest import FewestReplicas
from planner.solver.search.chain.search import Search
from planner.solver.search.levels.relaxed import Relaxed
from planner.solver.search.pipeline_search import PipelineSearch
from tests.samples import layer, profile

CHAIN = profile(
    *(
        layer(f"l{n}", 1 + n * 37 % 11, 2, output_bytes=1 + n * 29 % 7, weight_bytes=n)
        for n in range(40)
    )
)
# Two branches of six layers, between one layer and another.
BRANCHES = profile(
    layer("in", output_bytes=3),
    *(
        layer(f"{b}{n}", 1 + n * 7 % 5, output_bytes=1 + n, weight_bytes=90)
        for b in "ab"
        for n in range(6)
    ),
    layer("out"),
    edges=[edge for b in "ab" for edge in pairwise(("in", *(f"{b}{n}" for n in range(6)), "out"))],
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

    @property
    def over(self) -> bool:
        """Whether it passed at an earlier look."""
        return next(copy(self.number)) > self.looks


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
    assert not hurried.solver.exhausted

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


class CountedStages:
    """Counts the stages of the exact search, in all and after its clock passed."""

    def __init__(self, clock: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all = 0
        self.late = 0
        fewest = FewestReplicas.fewest

        def counted(
            self_: FewestReplicas, state: int, ends: Integers, *rest: Any
        ) -> tuple[Integers, NDArray[np.bool_]]:
            self.all += len(ends)
            self.late += len(ends) * clock.over
            return fewest(self_, state, ends, *rest)

        monkeypatch.setattr(FewestReplicas, "fewest", counted)


@pytest.mark.parametrize("below_s", [math.inf, 1e9])
@pytest.mark.parametrize("looks", [0, 5, 60, 150])
def test_a_search_looks_at_no_stage_after_the_clock_passed(
    looks: int, below_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = Chain(LayerCosts(CHAIN))
    best = Search(space, replica_model(Link(5.0)), Limits(8)).best()
    assert best is not None

    clock = Looks(looks=looks)
    counted = CountedStages(clock, monkeypatch)
    search = Search(space, replica_model(Link(5.0)), Limits(8, clock=clock))
    try:
        path = search.best(below_s)
    except OutOfTimeError:
        assert looks < len(space) - 1  # as many as a walk takes
    else:
        assert path is not None
        assert path.seconds >= best.seconds * (1 - RESOLUTION)
        assert search.interrupted
    assert counted.late == 0


def test_the_improvement_of_a_graph_ends_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its searches look for plans that are faster than one that is there, so that nothing is lost
    where they end.
    """
    problem = Problem(LayerCosts(BRANCHES), Setting(flat_cluster(4, 5.0), ONE_F_ONE_B, 1))
    search = PipelineSearch(problem)
    path = search.best()
    assert path is not None

    counted = CountedStages(Looks(looks=10**6), monkeypatch)
    list(improved_paths(search, path))
    whole = counted.all

    clock = Looks(looks=20)
    counted = CountedStages(clock, monkeypatch)
    budget = Budget(clock)
    hurried = PipelineSearch(replace(problem, budget=budget))
    list(improved_paths(hurried, path))
    assert 0 < counted.all < whole
    assert counted.late == 0
