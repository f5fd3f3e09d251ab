"""Depths: no deeper than needed, deep enough where it pays, within memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from planner.cost.candidate import StageOptions
from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.plan import Plan
from planner.options.solving import DepthRule
from planner.schedule.registry import find
from planner.schedule.schedule import PipelineShape, warm_up_depths
from planner.simulator.pipeline_costs import StageCosts
from planner.simulator.simulate_plan import simulated_s
from planner.solver import search_plan as solve
from planner.solver.by_hand import equal_blocks
from planner.solver.evaluate.depths import DepthChoice, PipelineTimes, choose_depths, price_depths
from planner.solver.evaluate.evaluation import priced, simulated
from planner.solver.problem.budget import Budget
from planner.solver.problem.problem import Problem
from planner.solver.tuning.record import STANDARD
from tests.samples import layer, profile
from tests.schedule.test_streams import make_shape
from tests.simulator.pipelines import TransferTimes, pipeline


def chosen(times: PipelineTimes) -> DepthChoice:
    """By simulations without a limit."""
    choice = choose_depths(times)
    assert choice is not None
    return choice


def equal_work(replicas: tuple[int, ...], transfer_s: float, deepest: int = 99) -> PipelineTimes:
    """Every worker is busy for one second per minibatch."""
    shape: PipelineShape = make_shape(replicas, "1f1b")
    stages = [StageCosts(r / 3, 2 * r / 3, 0.0) for r in replicas]
    made = pipeline(shape, stages, TransferTimes(transfer_s, transfer_s))
    return PipelineTimes(made, busiest_s=1.0, deepest=(deepest,) * len(replicas))


@pytest.mark.parametrize("replicas", [(1, 1), (1, 1, 1), (7, 1), (15, 1), (1,) * 8, (4,)])
def test_where_messages_are_free_the_published_depths_stay(replicas: tuple[int, ...]) -> None:
    choice = chosen(equal_work(replicas, 0.0))
    assert choice.depths == warm_up_depths(replicas)
    assert choice.seconds_per_unit == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("replicas", "transfer_s"),
    [
        ((1, 1), 0.4),
        ((2, 1, 1), 0.0),
        ((2, 1, 1), 0.1),
        ((4, 3, 1), 0.1),
        ((9, 5, 1, 1), 0.1),
        ((1, 1, 1, 1), 0.4),
    ],
)
def test_deeper_pipelines_reach_their_busiest_resource(
    replicas: tuple[int, ...], transfer_s: float
) -> None:
    times = equal_work(replicas, transfer_s)
    published = price_depths(times, warm_up_depths(replicas))
    assert published is not None
    choice = chosen(times)
    assert published.seconds_per_unit > 1.3
    assert choice.seconds_per_unit == pytest.approx(1.0)
    assert all(depth >= least for depth, least in zip(choice.depths, published.depths, strict=True))
    assert choice.depths[-1] == 1


def test_each_update_of_lateness_is_earned() -> None:
    """7-1 with transfers of 0.04: 2.3% slower than its busiest worker, which is not worth one more
    update of delay.
    """
    assert chosen(equal_work((7, 1), 0.04)).depths == (2, 1)
    assert chosen(equal_work((7, 1), 0.04)).seconds_per_unit == pytest.approx(1.023, abs=0.0005)


@pytest.mark.parametrize("replicas", [(2, 1), (7, 1), (2, 1, 1), (1, 1, 1, 1), (4, 3, 1), (4, 4)])
@pytest.mark.parametrize("transfer_s", [0.05, 0.2, 0.4, 0.6])
def test_no_depth_that_is_less_late_is_nearly_as_fast(
    replicas: tuple[int, ...], transfer_s: float
) -> None:
    times = equal_work(replicas, transfer_s)
    choice, published = chosen(times), warm_up_depths(replicas)
    for most in range(max(published), max(choice.depths)):
        less_late = tuple(
            max(least, min(depth, most))
            for least, depth in zip(published, choice.depths, strict=True)
        )
        other = price_depths(times, less_late)
        assert other is not None
        earned = times.tuning.evaluate.min_speedup_per_stale_update ** (
            max(choice.depths) - max(less_late)
        )
        assert other.seconds_per_unit >= choice.seconds_per_unit * earned * (1 - 1e-9)


@pytest.mark.parametrize("replicas", [(2, 1), (7, 1), (2, 1, 1), (1, 1, 1, 1), (4, 3, 1)])
def test_faster_links_hardly_make_a_pipeline_slower_or_later(replicas: tuple[int, ...]) -> None:
    """Time alone may grow where a faster link lets a depth gain less than its lateness must
    earn.
    """
    choices = [
        chosen(equal_work(replicas, transfer_s)) for transfer_s in (0.6, 0.5, 0.4, 0.2, 0.05)
    ]
    speedup = STANDARD.evaluate.min_speedup_per_stale_update
    counted_s = [choice.seconds_per_unit * speedup ** max(choice.depths) for choice in choices]
    assert all(faster <= slower * speedup for slower, faster in pairwise(counted_s))


def test_what_is_far_from_the_time_to_beat_is_simulated_once_and_roughly() -> None:
    times = equal_work((2, 1, 1), 0.1)
    choice = choose_depths(times, below_s=0.5)
    assert choice is not None
    assert choice.depths > warm_up_depths((2, 1, 1))
    assert not times.budget.known  # what is rough is not kept, and no other depth was tried
    whole = price_depths(times, choice.depths)
    assert whole is not None
    assert choice.seconds_per_unit == pytest.approx(whole.seconds_per_unit, rel=0.05)


def test_memory_bounds_the_depth_and_the_price_says_so() -> None:
    choice = chosen(equal_work((1, 1), 0.4, deepest=2))
    assert choice.depths == (2, 1)
    assert choice.seconds_per_unit == pytest.approx(1.4, rel=0.02)


CHAIN = profile(
    *(layer(f"l{n}", 1, 2, output_bytes=3, saved_bytes=100, weight_bytes=10**6) for n in range(3))
)


def flush_plan(cluster: Cluster, microbatches: int, depth: DepthRule = "auto") -> Plan:
    return solve(
        CHAIN,
        cluster,
        schedule="1f1b-flush",
        microbatches=microbatches,
        depth=depth,
        recompute="never",
        time_limit_s=None,
    )


def depths_of(plan: Plan) -> list[int]:
    return [stage.in_flight for stage in plan.stages]


def test_flush_hides_its_messages_behind_more_microbatches() -> None:
    """Three stages of 3 s; messages of 0.6 s each way between them, which every microbatch waits
    for at 3, 2, 1.
    """
    cluster, count = flat_cluster(3, 5.0), 16
    published, plan = flush_plan(cluster, count, "published"), flush_plan(cluster, count)
    assert depths_of(published) == [3, 2, 1]
    assert depths_of(plan) == [5, 3, 1]
    # The microbatches one after the other on the last stage; before and after, the first one's way
    # there and back.
    least_s = count * 3 + 2 * 3 + 4 * 0.6
    assert plan.predicted.seconds_per_minibatch == pytest.approx(least_s)
    assert published.predicted.seconds_per_minibatch > 1.2 * least_s
    assert plan.predicted.seconds_per_minibatch == pytest.approx(simulated_s(plan))
    assert [stage.memory.activations_bytes for stage in plan.stages] == [500, 300, 100]


def test_memory_and_the_minibatch_bound_the_microbatches_in_flight() -> None:
    free = flush_plan(flat_cluster(3, 5.0), 16)
    held = max(stage.memory.total_bytes for stage in free.stages)
    assert depths_of(flush_plan(flat_cluster(3, 5.0, held), 16)) == [5, 3, 1]
    assert depths_of(flush_plan(flat_cluster(3, 5.0, held - 1), 16)) == [4, 3, 1]
    assert depths_of(flush_plan(flat_cluster(3, 5.0), 4)) == [4, 3, 1]


def test_no_more_are_in_flight_than_gain_something() -> None:
    cluster = flat_cluster(3, 5.0)
    assert (
        depths_of(flush_plan(cluster, 2))
        == depths_of(flush_plan(cluster, 2, "published"))
        == [2, 2, 1]
    )


@pytest.mark.parametrize(("stages", "replicas"), [(4, 1), (4, 2), (12, 2), (12, 4)])
@pytest.mark.parametrize("bandwidth", [1.0, 2.0, 4.0])
def test_replicas_need_whole_microbatches_to_hide_their_messages(
    stages: int, replicas: int, bandwidth: float
) -> None:
    """At the published depths of 1f1b-flush every microbatch waits for its messages over every
    boundary.
    """
    costs = LayerCosts(profile(*(layer(f"h.{n}", output_bytes=1) for n in range(stages))))
    cluster = flat_cluster(stages * replicas, bandwidth)
    problem = Problem(
        costs, Setting(cluster, find("1f1b-flush"), 48 * replicas), budget=Budget.unlimited()
    )
    cut = [replace(stage, options=StageOptions(replicas)) for stage in equal_blocks(costs, stages)]
    plan = priced(problem, cut)
    published = simulated(replace(problem, depth="published"), plan)
    assert published.seconds > plan.seconds * 1.1
    assert simulated(problem, plan).seconds == pytest.approx(plan.seconds, rel=1e-3)
