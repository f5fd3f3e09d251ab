"""Predictions are simulations, and plans are chosen by them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.analysis.compare import compare
from planner.cost.candidate import candidates
from planner.cost.layer_costs import LayerCosts
from planner.cost.network import link as buckets
from planner.cost.network.link import BUCKETS, ring_all_reduce_s
from planner.cost.pricing import busy_resources
from planner.cost.setting import Setting
from planner.formats.cluster import Cluster, flat_cluster, hierarchical_cluster
from planner.formats.profile import Profile
from planner.options.solving import SolveOptions
from planner.reporting.tables.plan import plan_report
from planner.schedule.registry import find
from planner.simulator.simulate_plan import simulate
from planner.simulator.summary import summarize
from planner.solver import search_plan as solve
from planner.solver.alternatives.usual_ways import DATA_PARALLEL
from planner.solver.evaluate.evaluation import evaluate, priced, simulated
from planner.solver.find_plan import find_plan
from planner.solver.problem.budget import Budget
from planner.solver.problem.problem import Problem
from planner.solver.request import Request
from planner.solver.search.pipeline_search import PipelineSearch
from planner.solver.tuning.record import STANDARD
from tests.examples import examples
from tests.samples import layer, profile
from tests.solver.strategies import profiles

SCHEDULES: list[tuple[str, int]] = [
    ("1f1b", 1),
    ("2bw", 4),
    ("1f1b-flush", 4),
    ("gpipe", 4),
    ("zb-h1", 4),
    ("interleaved", 4),
]
CLUSTERS = {
    "flat": flat_cluster(4, 8.0, latency_s=0.01),
    "servers": hierarchical_cluster((2, 2), (32.0, 8.0)),
}
MODEL = profile(
    layer("a", 1, 2, output_bytes=3, weight_bytes=4),
    layer("b", 2, 3, output_bytes=6, weight_bytes=2),
    layer("c", 1, 3, output_bytes=2, weight_bytes=30, update_s=0.1),
    layer("d", 2, 2, output_bytes=2, weight_bytes=8),
)
# Of which the pipeline exchanges much, while the formula counts the busier of all activations and
# all gradients.
WIDE = profile(
    layer("l0", 2, 5, output_bytes=1),
    layer("l1", 1, 4, output_bytes=40),
    layer("l2", 2, 2, output_bytes=1, weight_bytes=10),
    layer("l3", 4, 2),
)
# Two neighbours whose messages meet on the link between them.
CROWDED = profile(
    layer("l0", 3, 8, output_bytes=5, weight_bytes=60),
    layer("l1", 3, 8, output_bytes=5, weight_bytes=10),
    layer("l2", 4, 4, output_bytes=40),
    layer("l3", 3, 7, output_bytes=10, weight_bytes=60),
    layer("l4", 1, 4, weight_bytes=60),
)


@pytest.mark.parametrize(("schedule", "microbatches"), SCHEDULES)
@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_what_is_predicted_is_what_is_simulated(
    cluster: Cluster, schedule: str, microbatches: int
) -> None:
    plan = solve(MODEL, cluster, schedule=schedule, microbatches=microbatches)
    assert plan.predicted.by == "simulation"
    assert plan.solver.simulated > 0
    simulated = summarize(simulate(plan))
    assert plan.predicted.seconds_per_minibatch == pytest.approx(
        simulated.seconds_per_minibatch, rel=1e-6
    )
    assert plan.predicted.samples_per_s == pytest.approx(simulated.samples_per_s, rel=1e-6)
    assert plan.solver.lower_bound_s <= plan.predicted.seconds_per_minibatch
    assert plan.solver.gap == pytest.approx(
        1 - plan.solver.lower_bound_s / plan.predicted.seconds_per_minibatch
    )


@pytest.mark.parametrize(("model", "schedule"), [(WIDE, "gpipe"), (CROWDED, "1f1b")])
def test_the_best_by_the_cost_model_is_not_taken_where_its_links_are_too_busy(
    model: Profile, schedule: str
) -> None:
    cluster, microbatches = flat_cluster(3, 4.0), 4 if schedule == "gpipe" else 1
    problem = Problem(LayerCosts(model), Setting(cluster, find(schedule), microbatches))
    search = PipelineSearch(problem)
    path = search.best()
    assert path is not None
    formula = search.priced(path)
    waiting = simulated(problem, formula)
    plan = solve(model, cluster, schedule=schedule, microbatches=microbatches)
    assert plan.replicas != path.replicas
    assert plan.solver.lower_bound_s == pytest.approx(formula.seconds)
    assert plan.solver.cost_model_s is not None
    assert plan.solver.cost_model_s > formula.seconds
    assert plan.predicted.seconds_per_minibatch < waiting.seconds
    assert plan.solver.status == "feasible"
    assert plan.solver.exhausted


@settings(max_examples=examples(60), deadline=None)
@given(profiles(most_layers=5, linear=True), st.data())
def test_a_simulated_pipeline_is_no_faster_than_its_busiest_resource(
    model: Profile, data: st.DataObject
) -> None:
    """Under 1f1b, on a flat cluster without latency, where the links' work is bytes over bandwidth
    for both.
    """
    count = len(model.layers)
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1), max_size=2))) if count > 1 else []
    ends = [0, *cuts, count]
    replicas = data.draw(
        st.lists(st.integers(1, 3), min_size=len(ends) - 1, max_size=len(ends) - 1)
    )
    groups = [list(range(first, end)) for first, end in pairwise(ends)]
    cluster = flat_cluster(sum(replicas), data.draw(st.sampled_from([0.5, 2.0, 10.0])))
    problem = Problem(LayerCosts(model), Setting(cluster), budget=Budget.unlimited())
    formula = priced(problem, candidates(groups, replicas))
    # The formula takes a sixth of an all-reduce to follow the backward; a stage's last bucket may
    # be less.
    busy = busy_resources(problem.layer_costs, formula.stages, problem.setting)
    tails_s = [
        float(ring_all_reduce_s(problem.layer_costs.work(stage).trainable_bytes, r, problem.link))
        / BUCKETS
        / r
        for stage, r in zip(formula.stages, replicas, strict=True)
    ]
    least_s = max(
        float(seconds) - (tail_s if resource == "compute" else 0.0)
        for resources, tail_s in zip(busy, tails_s, strict=True)
        for resource, seconds in resources.items()
    )
    assert simulated(problem, formula).seconds >= least_s * (1 - 1e-6)


def test_a_small_last_bucket_makes_data_parallelism_faster_than_the_formula(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """AlexNet's weights are at its end: nearly all of its gradients are on their way when the
    backward ends.
    """
    monkeypatch.setattr(buckets, "LEAST_BUCKET_BYTES", 1)
    late = profile(
        layer("convolutions", 4, 8, weight_bytes=1), layer("classifier", 1, 2, weight_bytes=99)
    )
    problem = Problem(LayerCosts(late), Setting(flat_cluster(2, 20.0)))
    formula = priced(problem, candidates([range(2)], [2]))
    assert formula.seconds == pytest.approx((5 + 10 + 5 / 6) / 2)  # the ring takes 100 / 20 = 5 s
    assert simulated(problem, formula).seconds == pytest.approx((5 + 10 + 5 / 100) / 2)


@settings(max_examples=examples(80), deadline=None)
@given(profiles(most_layers=5), st.integers(1, 4), st.sampled_from([0.5, 2.0, 10.0]))
def test_plans_are_no_faster_than_their_bound_and_simulate_alike(
    model: Profile, gpus: int, bandwidth: float
) -> None:
    plan = solve(model, flat_cluster(gpus, bandwidth))
    assert plan.solver.lower_bound_s <= plan.predicted.seconds_per_minibatch
    simulated = summarize(simulate(plan)).seconds_per_minibatch
    assert plan.solver.cost_model_s is not None
    # A run that does not repeat itself, or settles late, may be too short to tell; the busiest
    # resource cannot be.
    most_s = max(simulated, plan.solver.cost_model_s)
    assert simulated * 0.97 <= plan.predicted.seconds_per_minibatch <= most_s * (1 + 1e-6)
    assert plan.predicted.seconds_per_minibatch == pytest.approx(simulated, rel=0.05)


def test_data_parallelism_takes_what_the_formula_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gradients come in equal parts during the backward."""
    monkeypatch.setattr(buckets, "LEAST_BUCKET_BYTES", 1)
    even = profile(*(layer(f"l{n}", 1, 2, output_bytes=3, weight_bytes=8) for n in range(6)))
    for cluster in CLUSTERS.values():
        problem = Problem(LayerCosts(even), Setting(cluster))
        formula = priced(problem, candidates([range(6)], [4]))
        assert simulated(problem, formula).seconds == pytest.approx(formula.seconds, rel=0.01)


@pytest.mark.parametrize("least_bytes", [1, 10**6])
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_speed_up_over_data_parallelism_is_over_its_simulation(
    cluster: str, least_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "LEAST_BUCKET_BYTES", least_bytes)
    plan = solve(MODEL, CLUSTERS[cluster])
    parallel = evaluate(
        Problem(LayerCosts(MODEL), Setting(CLUSTERS[cluster])), candidates([range(4)], [4])
    )
    times = parallel.seconds / plan.predicted.seconds_per_minibatch
    assert plan.predicted.speedup_over_data_parallel == pytest.approx(times, rel=0.01)


@pytest.mark.parametrize("schedule", ["1f1b-flush", "gpipe", "2bw", "interleaved", "zb-h1"])
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_divided_minibatches_are_compared_with_data_parallelism_on_the_same(
    cluster: str, schedule: str
) -> None:
    """Data parallelism may add gradients up, too: both answers say the same of it."""
    options = SolveOptions(schedule=find(schedule), microbatches=8)
    plan = find_plan(Request.of(MODEL, CLUSTERS[cluster], options))
    chosen, parallel = compare(MODEL, plan).rows[:2]
    assert parallel.name == DATA_PARALLEL
    predicted = plan.predicted
    assert predicted.speedup_over_data_parallel == pytest.approx(chosen.speedup, rel=1e-6)
    assert predicted.data_parallel_communication_bytes_per_sample == pytest.approx(
        parallel.communication_bytes_per_sample, rel=1e-9
    )


def test_compared_plans_are_simulated() -> None:
    plan = solve(WIDE, flat_cluster(3, 4.0))
    rows = {row.name: row for row in compare(WIDE, plan).rows}
    chosen, parallel = rows["chosen plan"], rows[DATA_PARALLEL]
    assert chosen.seconds_per_microbatch == pytest.approx(
        summarize(simulate(plan)).seconds_per_minibatch, rel=1e-6
    )
    assert chosen.seconds_per_microbatch <= parallel.seconds_per_microbatch


def test_where_the_work_allowed_is_done_the_plan_says_so() -> None:
    least = replace(STANDARD, budget=replace(STANDARD.budget, most_instructions=1))
    plan = find_plan(Request.of(CROWDED, flat_cluster(3, 4.0), SolveOptions(), least))
    assert not plan.solver.exhausted
    assert plan.solver.simulated == 1  # the answer, which would not be known otherwise
    assert "other plans could be faster" in plan_report(plan)


def test_what_is_too_large_to_simulate_is_predicted_by_the_cost_model() -> None:
    model = profile(*(layer(f"l{i}", 0.5, 1, output_bytes=1) for i in range(70)))
    plan = solve(model, flat_cluster(70, 100.0))
    assert plan.workers > 64
    assert plan.predicted.by == "cost model"
    verdict, bound = plan_report(plan).splitlines()[:2]
    assert "bubble" not in verdict
    assert bound.startswith("at least ")
    assert "a lower bound (too large to simulate)" in bound
