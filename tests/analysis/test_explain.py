"""Explanations: every number is one that solving or pricing gives by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import planner
from planner.analysis.explain import explain
from planner.analysis.given_plan import GivenPlan
from planner.formats.cluster import flat_cluster, hierarchical_cluster
from planner.formats.plan import Plan
from planner.formats.profile import LossMean, load_profile
from planner.options.solving import SolveOptions
from planner.reporting.tables.answers import explanation_report, sentences
from planner.schedule.one_stage import GPIPE
from planner.simulator.simulate_plan import simulate
from planner.simulator.summary import summarize
from planner.solver import search_plan as solve
from planner.solver.clock import Clock
from planner.solver.evaluate.evaluation import evaluate
from planner.solver.find_plan import find_plan
from planner.solver.request import Request
from tests.samples import layer, profile

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
MODEL = profile(
    layer("a", 1, 2, output_bytes=1, saved_bytes=5),
    layer("b", 1, 2, output_bytes=1, saved_bytes=5),
    layer("c", 1, 2, output_bytes=1, weight_bytes=300, saved_bytes=5),
    layer("d", 1, 2, weight_bytes=300, saved_bytes=5),
    layer("e", 1, 3, weight_bytes=300, saved_bytes=5),
)


def test_by_hand() -> None:
    cluster = flat_cluster(2, 10.0, 9000)
    plan = solve(MODEL, cluster)
    assert plan.config == "1-1"
    explained = explain(MODEL, plan)
    assert [(use.stage, use.resource) for use in explained.uses] == [
        (stage, resource) for stage in (0, 1) for resource in ("compute", "receive", "send")
    ]
    busiest = max(use.busy_s for use in explained.uses)
    assert busiest == plan.predicted.bottleneck.busy_s
    assert explained.waiting_s == pytest.approx(plan.predicted.seconds_per_minibatch - busiest)
    text = explanation_report(explained)
    assert "limited by the computation of stage 0" in text
    assert "the search was exact" in text


@pytest.mark.parametrize("overlap", [True, False])
def test_busy_times_are_those_of_the_simulation(overlap: bool) -> None:
    model = load_profile(PROFILES / "vgg16" / "cpu.json")
    plan = solve(model, flat_cluster(3, 1.25e7, overlap=overlap))
    explained, summary = explain(model, plan), summarize(simulate(plan))
    for use in explained.uses:
        workers = [worker for worker in summary.workers if worker.stages[0] == use.stage]
        assert use.share == max(getattr(worker, f"{use.resource}_share") for worker in workers)
    limit = explained.bottleneck
    assert limit.busy_s in [use.busy_s for use in explained.uses if use.stage == limit.stage]


def test_an_alternative_whose_search_had_no_time_is_no_limit() -> None:
    model = load_profile(PROFILES / "vgg16" / "cpu.json")
    plan = solve(model, flat_cluster(4, 125e6))
    hurried = explain(model, plan, clock=Clock.of(1e-6))
    assert all(each.out_of_time for each in hurried.what_if)
    assert "With 10% more bandwidth no faster plan was found before the time limit." in sentences(
        hurried
    )
    assert "it would not be faster" not in sentences(hurried)


def test_what_if_is_what_solving_again_gives_or_the_plan_itself() -> None:
    model = load_profile(PROFILES / "vgg16" / "cpu.json")
    plan = solve(model, flat_cluster(4, 1.25e7, 2 * 10**9))
    explained = explain(model, plan)
    wider, larger, roomier, *coded = explained.what_if
    for alternative, cluster in [
        (wider, flat_cluster(4, 1.25e7 * 1.1, 2 * 10**9)),
        (larger, flat_cluster(5, 1.25e7, 2 * 10**9)),
        (roomier, flat_cluster(4, 1.25e7, 3 * 10**9)),
    ]:
        again_s = solve(model, cluster).predicted.seconds_per_minibatch
        seconds = alternative.seconds_per_minibatch
        assert seconds is not None
        assert seconds == pytest.approx(
            min(again_s, plan.predicted.seconds_per_minibatch), rel=1e-3
        )
        gain = plan.predicted.seconds_per_minibatch / seconds - 1
        assert alternative.gain == pytest.approx(gain, abs=1e-5)
    assert [alternative.what for alternative in coded] == [
        "activations sent as bfloat16",
        "activations sent as int8",
    ]
    for alternative, codec in zip(coded, ("bfloat16", "int8"), strict=True):
        again = solve(
            model, plan.cluster.model_copy(update={"compress": codec})
        ).predicted.seconds_per_minibatch
        assert alternative.seconds_per_minibatch == pytest.approx(again, rel=0.01)


@pytest.mark.parametrize("name", ["vgg16", "gpt2", "lstm_lm", "resnet50"])
def test_lines_fit_a_terminal(name: str) -> None:
    model = load_profile(PROFILES / name / "cpu.json")
    plan = solve(model, flat_cluster(3, 1.25e8))
    explained = explain(model, plan)
    assert max(map(len, explanation_report(explained).splitlines())) <= 140


def test_what_the_user_asked_of_stages_holds_for_what_if() -> None:
    """Otherwise a gain would be that of a rule left out, and not of the wider links."""
    plan = solve(MODEL, flat_cluster(2, 10.0), max_stages=1)
    rules = load_plan_again(plan).solver.rules
    assert rules is not None
    assert rules.max_stages == 1
    explained = explain(MODEL, plan)
    assert [each.config for each in explained.what_if if "bandwidth" in each.what] == [plan.config]
    assert all("-" not in (each.config or "") for each in explained.what_if)


def test_a_pipeline_that_is_not_worth_its_staleness_is_no_gain() -> None:
    """It was left out on the plan's own cluster, and then named as what 10% more bandwidth gains,
    and as what more memory does.
    """
    model = load_profile(PROFILES / "vgg16" / "cpu.json")
    plan = planner.solve(model, flat_cluster(2, 6.25e8, 16 * 10**9))
    assert (plan.config, plan.staleness) == ("2", 0)
    assert any("the best pipeline under 1f1b, 1-1, is" in note for note in plan.notes)
    wider, _, roomier = explain(model, plan).what_if
    assert wider.config == "2"
    assert wider.gain is not None
    assert 0 < wider.gain < 0.1
    assert (roomier.config, roomier.gain) == ("2", 0.0)


def load_plan_again(plan: Plan) -> Plan:
    return Plan.model_validate_json(plan.model_dump_json())


def test_a_plan_on_one_gpu() -> None:
    explained = explain(MODEL, solve(MODEL, flat_cluster(1, 10.0)))
    assert "With one more GPU the plan would be 1-1" in sentences(explained)


def test_schedules_that_drain_and_levels() -> None:
    options = SolveOptions(schedule=GPIPE, microbatches=4)
    plan = find_plan(Request.of(MODEL, flat_cluster(2, 10.0), options))
    explained = explain(MODEL, plan)
    assert explained.waiting_s == 0
    assert "per minibatch" in explanation_report(explained)
    levels = explain(MODEL, solve(MODEL, hierarchical_cluster((2, 2), (100.0, 10.0))))
    assert levels.what_if[1].what == "one more group of 2 GPUs"


def test_a_plan_of_the_published_depth_is_priced_at_it() -> None:
    cluster = flat_cluster(4, 0.5)  # whose messages a deeper pipeline would hide
    plan = solve(MODEL, cluster, depth="published")
    given = GivenPlan.of(MODEL, Plan.model_validate_json(plan.model_dump_json()), Clock())
    deeper = replace(given, request=given.request.with_options(SolveOptions()))
    assert len(plan.stages) > 1
    assert evaluate(given.problem, given.stages).seconds == pytest.approx(
        plan.predicted.seconds_per_minibatch
    )
    assert (
        evaluate(deeper.problem, given.stages).seconds
        < evaluate(given.problem, given.stages).seconds
    )


def test_a_loss_that_the_user_accepted_is_accepted_here() -> None:
    batched = MODEL.model_copy(update={"loss": LossMean(over="batch")})
    plan = solve(
        batched,
        flat_cluster(2, 10.0),
        schedule="1f1b-flush",
        microbatches=4,
        accept_divided_loss=True,
    )
    assert explain(batched, plan).config == plan.config
