"""What stands beside a plan: baselines that fit or do not, and the best synchronous plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import planner
from planner.analysis.compare import compare
from planner.api.planning import price
from planner.errors import PlannerError
from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.files import replace
from planner.formats.plan import Plan, load_plan, save_plan
from planner.formats.profile import Profile
from planner.options.solving import SolveOptions
from planner.reporting.tables.plan import plan_report
from planner.schedule.one_stage import FLUSH
from planner.solver import search_plan as solve
from planner.solver.alternatives.schedules import with_synchronous
from planner.solver.alternatives.table import no_slower_than_usual, with_baselines
from planner.solver.clock import Clock
from planner.solver.find_plan import find_plan
from planner.solver.request import Request
from planner.solver.tuning.record import STANDARD
from tests.samples import layer, profile

LAYERS = [
    layer(f"h.{n}", 1, 2, output_bytes=10, weight_bytes=10**8, saved_bytes=100) for n in range(4)
]
MODEL = profile(*LAYERS)


def asked(model: Profile, cluster: Cluster, **options: Any) -> Request:
    return Request(model, cluster, SolveOptions(**options), Clock())


def with_table(model: Profile, plan: Plan) -> Plan:
    return with_baselines(plan, asked(model, plan.cluster))


def test_baselines_are_those_of_compare(tmp_path: Path) -> None:
    cluster = flat_cluster(4, 1e8)
    plan = with_table(MODEL, solve(MODEL, cluster))
    rows = {row.name: row for row in compare(MODEL, plan).rows}
    assert {"data parallel", "one GPU", "ZeRO-1", "ZeRO-3, FSDP", "4 equal stages"} <= {
        b.name for b in plan.baselines
    }
    for baseline in plan.baselines:
        row = rows[baseline.name]
        assert baseline.seconds_per_microbatch == pytest.approx(row.seconds_per_microbatch)
        assert (baseline.config, baseline.memory_bytes) == (row.config, row.memory_bytes)
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    without = solve(MODEL, cluster).model_dump_json()
    assert "baselines" not in without  # as in files of 0.1
    assert "synchronous" not in without


def test_rows_are_the_same_when_the_time_is_over() -> None:
    """A busy machine shows the same table: instructions end its simulations, not seconds."""
    request = asked(MODEL, flat_cluster(4, 1e7), schedule="1f1b-flush", microbatches=32)
    plan = find_plan(request)
    in_time = with_baselines(plan, request).baselines
    late = with_baselines(plan, request.with_clock(Clock.of(0.0))).baselines
    assert late == in_time
    assert len(in_time) > 4


def test_what_instructions_do_not_suffice_for_is_priced_without_waiting() -> None:
    request = asked(MODEL, flat_cluster(4, 1e7), schedule="1f1b-flush", microbatches=32)
    few = replace(STANDARD, answer=replace(STANDARD.answer, table_instructions=200))
    plan = find_plan(request)
    rows = with_baselines(plan, replace(request, tuning=few)).baselines
    whole = with_baselines(plan, request).baselines
    assert [row.name for row in rows] == [row.name for row in whole]
    assert rows[0] == whole[0]
    assert rows[-1].seconds_per_microbatch < whole[-1].seconds_per_microbatch


@pytest.mark.parametrize(
    ("gpus", "counts"), [(1, []), (3, [3]), (4, [2, 4]), (6, [2, 6]), (12, [2, 4])]
)
def test_a_stage_for_each_gpu_is_a_usual_way(gpus: int, counts: list[int]) -> None:
    deep = profile(*(layer(f"h.{n}", 1, 2, output_bytes=10, weight_bytes=100) for n in range(6)))
    plan = with_table(deep, solve(deep, flat_cluster(gpus, 1e8), schedule=FLUSH))
    names = [way.name for way in plan.baselines if way.name.endswith("equal stages")]
    assert names == [f"{count} equal stages" for count in counts]


def test_what_does_not_fit_is_no_measure() -> None:
    plan = with_table(MODEL, solve(MODEL, flat_cluster(4, 1e8, 7 * 10**8)))
    text = plan_report(plan)
    assert "one GPU does not fit (100 MB too much)" in text
    assert "data parallel on 4 GPUs does not fit (100 MB too much)" in text
    assert "as the fastest baseline that fits, " in text
    assert "x over data parallel" not in text


def test_a_stale_plan_says_what_synchronous_ones_would_give() -> None:
    """One has its global batch, which a pipeline that drains is slow with, and one has the usual
    number of parts.
    """
    cluster = flat_cluster(4, 1e8)
    request = asked(MODEL, cluster, schedule="1f1b")
    plan = with_synchronous(find_plan(request), request)
    assert plan.samples_per_update == (4, 4)
    rows = {1: plan.synchronous, 16: plan.synchronous_usual}
    for microbatches, row in rows.items():
        drained = solve(MODEL, cluster, schedule="1f1b-flush", microbatches=microbatches)
        assert row is not None
        assert row.config == drained.config
        assert (
            row.samples_per_update
            == drained.samples_per_update
            == (4 * microbatches, 4 * microbatches)
        )
        seconds = drained.predicted.seconds_per_minibatch / microbatches
        assert row.seconds_per_microbatch == pytest.approx(seconds)
        assert with_synchronous(drained, request) is drained
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


WAITING = profile(
    *(layer(f"h.{n}", 1, 2, output_bytes=10**7, weight_bytes=10**8) for n in range(4))
)


def test_a_plan_with_another_global_batch_never_takes_its_place() -> None:
    """1f1b-flush is as fast with 16 times as many samples per update. That is said, and the answer
    stays.
    """
    request = asked(WAITING, flat_cluster(4, 1e8))
    stale = find_plan(request)
    assert stale.staleness
    answer = with_synchronous(stale, request)
    assert (answer.schedule, answer.samples_per_update) == (stale.schedule, (4, 4))
    assert answer.synchronous is not None
    assert answer.synchronous.samples_per_update == (4, 4)
    larger = answer.synchronous_usual
    assert larger is not None
    assert larger.samples_per_update == (64, 64)
    assert larger.seconds_per_microbatch == pytest.approx(
        stale.predicted.seconds_per_minibatch, rel=0.01
    )


def test_data_parallelism_is_the_answer_where_a_pipeline_gains_less_than_five_percent() -> None:
    """With a microbatch on each GPU, as under 1f1b."""
    light = profile(*(layer(f"h.{n}", 1, 2, output_bytes=10, weight_bytes=10**6) for n in range(4)))
    cluster = flat_cluster(4, 1e8)
    stale = planner.price(light, cluster, 4, replicas=1, schedule="1f1b")
    assert stale.staleness
    answer = with_synchronous(stale, asked(light, cluster))
    assert (answer.config, answer.staleness, answer.samples_per_update) == ("4", 0, (16, 16))
    assert answer.solver.rules is None, "nobody asked for one stage"
    assert "Use data parallelism: no pipeline was found that gains enough" in plan_report(answer)
    (first, *_) = answer.notes
    assert first.startswith("the best pipeline under 1f1b, 1-1-1-1, is ")
    assert "it updates after 4 samples, this plan after 16 samples" in first
    assert first in plan_report(answer)
    named = asked(light, cluster, schedule="1f1b")
    assert with_synchronous(stale, named).config == stale.config


@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_a_global_batch_that_was_given_holds_for_all_plans(microbatches: int) -> None:
    size = microbatches * (MODEL.microbatch_size or 1)
    plan = planner.solve(MODEL, flat_cluster(4, 1e8), minibatch=size)
    assert plan.samples_per_update == (size, size)
    assert plan.synchronous_usual is None
    assert plan.synchronous is None or plan.synchronous.samples_per_update == (size, size)
    assert microbatches == 1 or {way.samples_per_update for way in plan.baselines} == {(size, size)}


def test_replicas_under_1f1b_have_a_global_batch_of_their_own() -> None:
    """Where the schedule was asked for, the answer says so; else the batch that was asked for is
    what holds.
    """
    heavy = profile(
        layer("wide", 6, 12, output_bytes=10),
        layer("deep", 2, 4, output_bytes=10, weight_bytes=10**9),
    )
    cluster, size = flat_cluster(4, 1e8), heavy.microbatch_size or 1
    named = planner.solve(heavy, cluster, schedule="1f1b", minibatch=size)
    assert named.samples_per_update[1] > size
    assert any(note.startswith("the global batch is ") for note in named.notes)
    free = planner.solve(heavy, cluster, minibatch=size)
    assert free.samples_per_update == (size, size)
    assert any(
        note.startswith("this plan is under 1f1b-flush, which updates after") for note in free.notes
    )


def test_late_gradients_have_to_earn_five_percent() -> None:
    cluster = flat_cluster(4, 1e8)
    request = asked(MODEL, cluster)
    late = find_plan(request)
    beside = with_synchronous(late, asked(MODEL, cluster, schedule="1f1b")).synchronous
    assert late.staleness
    assert beside is not None

    def answer(times: float) -> Plan:
        """Return the answer where the late plan is so many times as fast as the synchronous one."""
        seconds = late.microbatches * beside.seconds_per_microbatch / times
        predicted = late.predicted.model_copy(update={"seconds_per_minibatch": seconds})
        changed = late.model_copy(update={"predicted": predicted})
        return with_synchronous(changed, request)

    assert answer(1.06).staleness
    assert not answer(1.04).staleness
    assert "0.96 times as fast as the best under 1f1b" in answer(1.04).notes[0]


def test_what_cannot_stand_beside_a_plan_is_told() -> None:
    """Under 1f1b a minibatch is one microbatch; the synchronous schedules cannot make two of three
    samples.
    """
    cluster = flat_cluster(4, 1e8)
    plan = solve(MODEL, cluster)
    refused = asked(MODEL, cluster, minibatch=3 * (MODEL.microbatch_size or 1) + 1)
    noted = with_synchronous(plan, refused)
    assert noted.synchronous is None
    assert noted.notes[0].startswith("there is no synchronous plan to compare it with: ")
    assert noted.notes[0] in plan_report(noted)


def test_replicas_have_a_microbatch_each() -> None:
    """Under 2bw, a replica without one would never update: data parallelism has a microbatch on
    each of four GPUs.
    """
    plan = with_table(MODEL, solve(MODEL, flat_cluster(8, 1e8), schedule="2bw", microbatches=4))
    made = {way.name: way.microbatches for way in plan.baselines}
    assert (
        made["one GPU"],
        made["data parallel"],
        made["ZeRO-3, FSDP"],
        made["4 equal stages"],
    ) == (4, 4, 4, 4)
    assert {way.samples_per_update for way in plan.baselines} == {plan.samples_per_update}
    ratio = plan.predicted.speedup_over_data_parallel
    parallel = next(way for way in plan.baselines if way.name == "data parallel")
    assert parallel.seconds_per_microbatch / (
        plan.predicted.seconds_per_minibatch / 4
    ) == pytest.approx(ratio)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b-flush", "zb-h1"])
def test_a_row_that_is_faster_than_what_was_found_is_the_answer(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that ends early, here with one stage for each GPU, where data parallelism is
    faster.
    """
    cluster = flat_cluster(4, 1e12)

    def early(request: Request) -> Plan:
        schedule = request.options.schedule
        return price(
            request.profile, request.cluster, 4, replicas=1, schedule=schedule, microbatches=8
        )

    monkeypatch.setattr("planner.solver.solve.find_plan", early)
    monkeypatch.setattr("planner.solver.alternatives.schedules.find_plan", early)
    plan = planner.solve(MODEL, cluster, schedule=schedule, microbatches=8)
    rows = [
        way for way in plan.baselines if not way.over_memory_bytes and way.schedule is plan.schedule
    ]
    assert plan.schedule.name == schedule
    assert plan.config == "4"
    assert {way.samples_per_update for way in rows} == {plan.samples_per_update} == {(32, 32)}
    fastest = min(way.seconds_per_microbatch for way in rows if "ZeRO" not in way.name)
    assert plan.predicted.seconds_per_minibatch / 8 == pytest.approx(fastest)
    # The options decide which rows may be: data parallelism has one stage, and divides no layers.
    kept = planner.solve(MODEL, cluster, schedule=schedule, microbatches=8, recompute="always")
    assert kept.config == "1-1-1-1"


def test_a_minibatch_of_one_microbatch_is_divided_over_no_replicas() -> None:
    plan = planner.solve(MODEL, flat_cluster(4, 1e8), schedule="gpipe", microbatches=1)
    rows = {way.name: way.config for way in plan.baselines}
    assert rows["data parallel"] == rows["one GPU"] == "1"
    assert not any("ZeRO" in name for name in rows)
    assert (
        {way.samples_per_update for way in plan.baselines} == {plan.samples_per_update} == {(4, 4)}
    )
    assert "over data parallel on 1 GPU" in plan_report(plan)


def test_where_a_search_has_no_time_a_row_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> Plan:
        raise PlannerError("the time limit passed before any plan was found")

    monkeypatch.setattr("planner.solver.solve.find_plan", none)
    plan = planner.solve(MODEL, flat_cluster(4, 1e12), schedule="1f1b-flush", microbatches=8)
    assert plan.config == "4"
    assert plan.solver.name == "usual ways"
    assert 0 < plan.solver.lower_bound_s <= plan.predicted.seconds_per_minibatch
    assert plan.baselines
    assert "feasible, usual ways in" in plan_report(plan, verbose=True)
    with pytest.raises(PlannerError, match="the time limit passed"):  # no row fits either
        planner.solve(MODEL, flat_cluster(4, 1e12, 10), schedule="1f1b-flush")


def test_a_row_that_only_seems_faster_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without time, rows are priced by the cost model, which knows no waiting."""
    model = profile(
        *(layer(f"h.{n}", 1, 2, output_bytes=10**7, weight_bytes=10**8) for n in range(4))
    )
    request = asked(model, flat_cluster(4, 1e8), schedule="1f1b-flush", microbatches=4)
    plan = find_plan(request)
    answer = no_slower_than_usual(plan, request.with_clock(Clock.of(0.0)))
    full = no_slower_than_usual(plan, request)
    assert answer.config == full.config
    assert answer.predicted == full.predicted
