"""The lines above a plan's tables: what to use, what it gains, what stands beside it; and that
numbers agree.
"""

from __future__ import annotations

import re

import pytest

import planner
from planner.analysis.limits import busiest, simulated_limits
from planner.formats.cluster import flat_cluster, hierarchical_cluster
from planner.formats.fit import Fit, FitRow
from planner.formats.plan import Plan
from planner.formats.plan_parts import config_words
from planner.reporting.tables.answers import comparison_report, fit_report
from planner.reporting.tables.plan import plan_report, prediction_lines
from planner.schedule.registry import SCHEDULES
from planner.simulator.simulate_plan import simulate
from planner.simulator.summary import summarize
from tests.samples import layer, profile

HEAVY = profile(*(layer(f"h.{n}", 1, 2, output_bytes=10, weight_bytes=10**8) for n in range(4)))
LIGHT = profile(*(layer(f"h.{n}", 1, 2, output_bytes=10**6, weight_bytes=10**3) for n in range(4)))
SLOW = flat_cluster(4, 1e7)
SERVERS = hierarchical_cluster((2, 2), (1e9, 1e7))


def verdict(plan: Plan) -> list[str]:
    """Return the lines above the first empty one."""
    return plan_report(plan).partition("\n\n")[0].splitlines()


def test_a_pipeline_says_what_it_gains_and_how_stale_its_gradients_are() -> None:
    plan = planner.solve(HEAVY, SLOW)
    first, same, larger = verdict(plan)
    assert re.fullmatch(
        r"4 stages, \d+\.\d\dx the best baseline \(.+\), \d+% bubble; "
        r"asynchronous \(PipeDream 1F1B, gradients up to \d+ updates stale\)",
        first,
    )
    assert plan.synchronous is not None
    assert plan.synchronous_usual is not None
    assert same.startswith("1f1b-flush at the same global batch: ")
    assert larger.startswith("1f1b-flush at a global batch of 64 samples: ")
    assert same.endswith("x, no stale gradients")


def test_data_parallelism_is_named_as_the_thing_to_use() -> None:
    (line,) = verdict(planner.solve(LIGHT, flat_cluster(4, 1e9)))
    assert line == "Use data parallelism: a pipeline gains nothing here; no stale gradients"


@pytest.mark.parametrize(
    ("gpus", "line"),
    [
        (1, "One GPU; no stale gradients"),
        (2, "Use one GPU: more would not be faster; no stale gradients"),
    ],
)
def test_one_gpu_is_enough_or_all_there_is(gpus: int, line: str) -> None:
    heavy = profile(layer("only", 1, 2, weight_bytes=10**9))
    assert verdict(planner.solve(heavy, flat_cluster(gpus, 1.0)))[0] == line


def test_a_pipeline_that_was_asked_for_and_gains_nothing_says_so() -> None:
    plan = planner.solve(LIGHT, flat_cluster(4, 1e9), schedule="1f1b")
    if len(plan.stages) == 1:
        plan = planner.price(LIGHT, flat_cluster(4, 1e9), 4, replicas=1, schedule="1f1b")
    first = verdict(plan)[0]
    assert re.search(r": a pipeline gains (little|nothing) here; asynchronous", first)


def test_a_pipeline_that_is_as_fast_as_one_cut_by_hand_is_not_called_useless() -> None:
    plan = planner.price(HEAVY, SLOW, 4, replicas=1, schedule="1f1b-flush")
    baselines = planner.solve(HEAVY, SLOW, schedule="1f1b-flush").baselines
    (equal,) = [way for way in baselines if way.name == "4 equal stages"]
    plan = plan.model_copy(update={"baselines": (equal,)})
    first = verdict(plan)[0]
    assert first.startswith("4 stages, as fast as the best baseline (4 equal stages), ")
    assert "gains" not in first


def test_what_does_not_fit_says_by_how_much() -> None:
    plan = planner.price(HEAVY, flat_cluster(4, 1e7, 10**8), 4, replicas=1, schedule="1f1b-flush")
    assert verdict(plan)[0].startswith("Does not fit: ")


@pytest.mark.parametrize("cluster", [SLOW, SERVERS], ids=["flat", "servers"])
@pytest.mark.parametrize("schedule", [str(each) for each in SCHEDULES])
def test_what_limits_a_plan_is_busy_no_longer_than_a_minibatch_takes(
    cluster: planner.Cluster,
    schedule: str,
) -> None:
    """The cost model's busy times may be longer than the simulated minibatch, which contradicts it
    on one screen.
    """
    plan = planner.solve(HEAVY, cluster, schedule=schedule, time_limit_s=2)
    limits = simulated_limits(plan)
    assert limits is not None
    assert 0 < limits.share <= 1 + 1e-9
    summary = summarize(simulate(plan))
    assert (limits.place, limits.share) == busiest(summary)
    assert limits.share == pytest.approx(summary.busiest_share)
    lines = dict(prediction_lines(plan, limits))
    assert lines["limited by"] == f"{limits.place}, busy {limits.share:.0%} of the time"
    assert "by the cost model" not in plan_report(plan)


def test_explain_names_the_same_limit_as_the_plan() -> None:
    plan = planner.solve(HEAVY, SLOW)
    limits = simulated_limits(plan)
    explained = planner.explain(HEAVY, plan)
    assert limits is not None
    busy = explained.bottleneck.busy_s / explained.seconds_per_minibatch
    assert busy == pytest.approx(limits.share)
    assert str(explained.bottleneck.stage) in limits.place


def test_solver_and_bound_are_shown_on_demand() -> None:
    plan = planner.solve(HEAVY, SLOW)
    assert "\nsolver " not in plan_report(plan)
    assert "\nsolver " in plan_report(plan, verbose=True)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("11", "DP=11"),
        ("1", "1"),
        ("2x4", "DP=2 TP=4"),
        ("1x4", "TP=4"),
        ("7-1", "7-1"),
        ("2x4-1x8", "2x4-1x8"),
    ],
)
def test_a_single_stage_is_named_by_what_its_ranks_do(config: str, words: str) -> None:
    assert config_words(config) == words


def test_a_column_of_changes_has_signs() -> None:
    """ "150% more" stood under "less sent"."""
    plan = planner.solve(HEAVY, SLOW)
    table = comparison_report(planner.compare(HEAVY, plan))
    assert "sent vs DP" in table
    assert re.search(r" -\d+% ", table)
    assert not re.search(r"% (more|less) ", table)


def test_the_answer_of_fit_begins_with_the_verdict() -> None:
    plan = planner.solve(HEAVY, SLOW, schedule="1f1b-flush")
    answer = Fit(model="m", asked=FitRow(gpus=4, plan=plan), others=())
    assert fit_report(answer).splitlines()[0] == verdict(plan)[0]
