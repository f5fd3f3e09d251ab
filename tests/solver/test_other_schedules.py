"""Where nothing fits under a schedule, another one is the answer, or is named."""

from __future__ import annotations

import re

import pytest

import planner
from planner.errors import InfeasibleError
from planner.formats.cluster import flat_cluster
from planner.formats.plan import Plan
from planner.options.solving import SolveOptions
from planner.reporting.tables.answers import fit_report
from planner.reporting.tables.plan import plan_report
from planner.schedule.one_stage import FLUSH, ONE_F_ONE_B
from planner.solver.clock import Clock
from planner.solver.fit import FitRequest, fit
from planner.solver.sizes.microbatches import Profiles
from tests.samples import layer, profile

# Under 1f1b the first stage has two versions of its weights, and under 1f1b-flush one.
MODEL = profile(layer("a", output_bytes=1, weight_bytes=100), layer("b", weight_bytes=100))
TIGHT = flat_cluster(2, 1.0, 210)


def test_the_answer_is_a_plan_under_another_schedule() -> None:
    plan = planner.solve(MODEL, TIGHT)
    assert (plan.schedule, plan.instead_of) == (FLUSH, ONE_F_ONE_B)
    assert plan.config == "1-1"
    assert max(stage.memory.total_bytes for stage in plan.stages) <= 210
    assert plan.baselines
    assert plan_report(plan).startswith(
        "Nothing fits under 1f1b, so this plan is under 1f1b-flush. 2 stages, where no baseline"
    )
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_what_fits_has_no_other_schedule() -> None:
    plan = planner.solve(MODEL, flat_cluster(2, 1.0, 2100))
    assert plan.instead_of is None
    assert "instead_of" not in plan.model_dump_json()  # as in files of older versions


def test_a_schedule_that_was_asked_for_is_kept_and_the_other_one_named() -> None:
    with pytest.raises(InfeasibleError) as caught:
        planner.solve(MODEL, TIGHT, schedule="1f1b")
    assert caught.value.message.startswith("no plan fits 2 GPUs of 210 B: ")
    found = re.match(
        r"use `schedule=(\S+)` `microbatches=(\d+)`, under which 1-1 fits; "
        r"the smallest memory that would do is `memory=\w+B`",
        caught.value.hint,
    )
    assert found is not None
    tried = planner.solve(MODEL, TIGHT, schedule=found[1], microbatches=int(found[2]))
    assert tried.config == "1-1"


def test_a_global_batch_holds_under_the_other_schedule() -> None:
    size = MODEL.microbatch_size or 1
    plan = planner.solve(MODEL, TIGHT, minibatch=size)
    assert plan.instead_of is ONE_F_ONE_B
    assert plan.samples_per_update == (size, size)


def test_where_no_schedule_has_a_plan_the_error_is_that_of_the_first() -> None:
    with pytest.raises(InfeasibleError) as caught:
        planner.solve(MODEL, flat_cluster(2, 1.0, 20))
    assert caught.value.message.startswith("no plan fits 2 GPUs of 20 B: ")
    assert caught.value.hint.startswith("the smallest memory that would do is ")


def fit_request(options: SolveOptions) -> FitRequest:
    profiles = Profiles(lambda size: MODEL, lambda undivided: undivided, (1,))
    return FitRequest(profiles, 2, lambda gpus: flat_cluster(gpus, 1.0, 210), options, Clock())


def test_fit_answers_with_another_schedule_or_names_it() -> None:
    free, _ = fit(fit_request(SolveOptions()))
    assert free.asked.plan is not None
    assert free.asked.plan.instead_of is ONE_F_ONE_B
    assert fit_report(free).startswith(
        "Nothing fits under 1f1b, so this plan is under 1f1b-flush. "
    )

    named, _ = fit(fit_request(SolveOptions(schedule="1f1b")))
    assert named.asked.plan is None
    assert named.asked.hint.startswith("use `schedule=1f1b-flush` ")
    assert "use `schedule=1f1b-flush` " in fit_report(named)
