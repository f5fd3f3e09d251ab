"""Whether a model fits, and how few GPUs will do: each answer is that of `solve` for that number of GPUs."""

from __future__ import annotations

from dataclasses import replace

from planner.analysis.fit import fit
from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.profile import Profile
from planner.options.solving import SolveOptions
from planner.reporting.tables.answers import fit_report
from planner.schedule.one_stage import FLUSH
from planner.solver.find_plan import find_plan
from tests.samples import layer, profile

MB = 10**6
OPTIONS = SolveOptions(schedule=FLUSH)


def model() -> Profile:
    """Eight layers of 30 MB each with their gradients and optimizer state, and 1 MB of activations."""
    return profile(*(layer(f"l{n}", 100, 200, output_bytes=8, weight_bytes=10 * MB, saved_bytes=MB) for n in range(8)))


def cluster_of(gpus: int) -> Cluster:
    return flat_cluster(gpus, 1e9, 100 * MB)


def test_fewer_gpus_are_tried_down_to_the_first_that_do_not_fit() -> None:
    answer = fit(model(), 8, cluster_of, OPTIONS)
    assert answer.asked.plan is not None
    assert [(row.gpus, row.plan is not None) for row in answer.others] == [(4, True), (2, True), (1, False)]
    minibatch = replace(OPTIONS, microbatches=answer.asked.plan.microbatches)
    for row in (answer.asked, *answer.others[:2]):
        assert row.plan is not None
        alone = find_plan(model(), cluster_of(row.gpus), minibatch)
        assert row.plan.config == alone.config
        assert row.plan.predicted == alone.predicted
    assert answer.asked.plan.baselines
    text = fit_report(answer)
    assert "yes: " in text
    assert "no plan fits" in text


def test_where_it_does_not_fit_more_gpus_are_tried() -> None:
    answer = fit(model(), 1, cluster_of, OPTIONS)
    assert answer.asked.plan is None
    assert [(row.gpus, row.plan is not None) for row in answer.others] == [(2, True)]
    assert "it fits 2 of these GPUs" in fit_report(answer)
