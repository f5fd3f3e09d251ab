"""Plans under all schedules beside the answers for each alone."""

from __future__ import annotations

from typing import Any

import pytest

from planner.api.planning import price, solve
from planner.errors import InfeasibleError
from planner.formats.cluster import flat_cluster
from planner.formats.plan import Plan
from planner.options.solving import SolveOptions
from planner.reporting.tables.plan import plan_report
from planner.schedule.one_stage import FLUSH, ONE_F_ONE_B
from planner.schedule.registry import SCHEDULES
from planner.schedule.schedule import Schedule
from planner.solver.find_plan import find_plan
from planner.solver.request import Request
from tests.samples import layer, profile

MODEL = profile(
    *(
        layer(f"l{n}", 1 + n % 2, 2, output_bytes=4, weight_bytes=20, saved_bytes=5)
        for n in range(8)
    )
)
CLUSTER = flat_cluster(4, 20.0)


def alone(schedule: Schedule, max_staleness: int | None = None) -> Plan:
    microbatches = 8 if schedule.divides else None
    options = SolveOptions(
        schedule=schedule, microbatches=microbatches, max_staleness=max_staleness, time_limit_s=None
    )
    return find_plan(Request.of(MODEL, CLUSTER, options))


@pytest.mark.parametrize("max_staleness", [None, 1])
def test_the_fastest_of_the_single_answers_is_the_answer(max_staleness: int | None) -> None:
    plan = solve(
        MODEL,
        CLUSTER,
        schedule="auto",
        microbatches=8,
        max_staleness=max_staleness,
        time_limit_s=None,
    )
    assert [way.schedule for way in plan.schedules] == list(SCHEDULES)
    for way in plan.schedules:
        single = alone(way.schedule, max_staleness)
        assert (way.config, way.staleness) == (single.config, single.staleness)
        assert (
            way.seconds_per_microbatch
            == single.predicted.seconds_per_minibatch / single.microbatches
        )
    may_be = [
        way for way in plan.schedules if max_staleness is not None or not way.schedule.asynchronous
    ]
    best = min(may_be, key=lambda way: way.seconds_per_microbatch)
    assert (plan.schedule, plan.config) == (best.schedule, best.config)
    assert plan.schedule.asynchronous == (max_staleness is not None)
    assert {way.staleness for way in plan.schedules if way.schedule.asynchronous} != {0}
    shown = [line.split() for line in plan_report(plan).splitlines() if line.endswith("chosen")]
    assert [line[0] for line in shown] == [plan.schedule.name]
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_schedules_without_a_plan_are_noted() -> None:
    plan = solve(
        MODEL,
        CLUSTER,
        schedule="auto",
        minibatch=4 * (MODEL.microbatch_size or 1),
        time_limit_s=None,
    )
    assert "1f1b" not in [way.name for way in plan.schedules]
    assert any(
        note.startswith("there is no plan under 1f1b: under 1f1b a minibatch has")
        for note in plan.notes
    )
    with pytest.raises(InfeasibleError, match="no plan fits 4 GPUs of 10 B"):
        solve(MODEL, flat_cluster(4, 20.0, 10), schedule="auto")


def test_plans_of_one_minibatch_are_compared() -> None:
    """Beside one under 2bw, the synchronous plan has its minibatch, not the usual one."""
    plan = solve(MODEL, CLUSTER, schedule="2bw", microbatches=8, time_limit_s=None)
    assert plan.synchronous is not None
    assert plan.synchronous.samples_per_update == plan.samples_per_update == (32, 32)
    assert plan.synchronous.microbatches == 8
    drained = alone(FLUSH)
    assert plan.synchronous.seconds_per_microbatch == drained.predicted.seconds_per_minibatch / 8


def test_data_parallelism_is_compared_with_as_many_samples() -> None:
    """A single stage under 1f1b updates after a microbatch on each replica; draining more rarely
    would look faster.
    """
    plan = solve(MODEL, CLUSTER, schedule="1f1b", max_stages=1, time_limit_s=None)
    assert plan.config == "4"
    assert plan.synchronous is not None
    assert plan.synchronous.samples_per_update == plan.samples_per_update == (16, 16)
    free = solve(MODEL, CLUSTER, max_stages=1, time_limit_s=None)
    assert free.samples_per_update == (16, 16)


def test_a_number_of_microbatches_that_was_given_is_kept() -> None:
    """1f1b has one microbatch, so that its plan is in the table and not the answer, however fast it
    is.
    """
    given = solve(
        MODEL, CLUSTER, schedule="auto", microbatches=2, max_staleness=9, time_limit_s=None
    )
    assert given.samples_per_update == (8, 8)
    fastest = min(given.schedules, key=lambda way: way.seconds_per_microbatch)
    assert fastest.schedule is ONE_F_ONE_B
    (note,) = [note for note in given.notes if note.startswith("plans under 1f1b update after")]
    assert note.endswith("this one after 8 samples")

    free = solve(MODEL, CLUSTER, schedule="auto", max_staleness=9, time_limit_s=None)
    assert free.schedule.asynchronous
    assert any(
        "update after 64 samples" in note or "this one after 64" in note for note in free.notes
    )


def test_a_row_in_place_of_the_fastest_is_in_the_table_of_schedules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And keeps the notes on schedules without a plan."""

    def early(request: Request) -> Plan:
        order = request.options.order
        if order.asynchronous or order.chunked:
            return find_plan(request)
        return price(
            request.profile, request.cluster, 4, replicas=1, schedule=order, microbatches=8
        )

    monkeypatch.setattr("planner.solver.alternatives.schedules.find_plan", early)
    quick = flat_cluster(4, 1e9)
    plan = solve(MODEL, quick, schedule="auto", minibatch=32, time_limit_s=None)
    assert plan.config == "4"
    chosen = next(way for way in plan.schedules if way.schedule is plan.schedule)
    assert chosen.config == "4"
    assert any(note.startswith("there is no plan under 1f1b") for note in plan.notes)


def test_of_all_schedules_the_answer_has_the_global_batch_that_was_given() -> None:
    light = profile(*(layer(f"h.{n}", 1, 2, output_bytes=10, weight_bytes=10) for n in range(4)))
    quick = flat_cluster(4, 1e9)
    size = light.microbatch_size or 1
    batches: list[dict[str, Any]] = [{"minibatch": size}, {"microbatches": 1}]
    for given in batches:
        plan = solve(light, quick, schedule="auto", max_staleness=0, time_limit_s=None, **given)
        assert plan.samples_per_update == (size, size)
