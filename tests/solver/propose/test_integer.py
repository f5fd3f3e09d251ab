"""The integer programs: the optimum of the search and of brute force, and what only they can
express.
"""

from __future__ import annotations

import math

import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.layer_costs import LayerCosts
from planner.cost.models.synchronous import SynchronousModel
from planner.cost.network.link import link_of
from planner.cost.setting import Setting
from planner.errors import InputError
from planner.formats.cluster import Cluster, DeviceKind, Level, flat_cluster
from planner.formats.profile import Profile
from planner.options.solving import RecomputeRule, StageRules
from planner.schedule.registry import find
from planner.solver.problem.problem import Limits, Problem
from planner.solver.problem.replica_models import replica_model
from planner.solver.problem.result import Evaluation
from planner.solver.problem.states import Chain
from planner.solver.propose.integer import solve_ilp
from planner.solver.search.chain.search import Search
from planner.solver.search.chain.synchronous import SynchronousSearch
from planner.solver.search.integer.cbc import run
from tests.examples import examples
from tests.samples import layer, profile
from tests.solver.brute import plans
from tests.solver.oracle import brute_force
from tests.solver.strategies import profiles

memories = st.one_of(st.none(), st.integers(1, 200))
bandwidths = st.sampled_from([0.5, 1.0, 2.0, 8.0, 1e4])
latencies = st.sampled_from([0.0, 0.0, 0.25, 3.0])


def flow_equals_search_and_brute_force(
    model: Profile, cluster: Cluster, schedule: str, microbatches: int
) -> None:
    layer_costs = LayerCosts(model)
    problem = Problem(layer_costs, Setting(cluster, find(schedule), microbatches))
    answer = solve_ilp(problem)
    expected = brute_force(layer_costs, cluster, schedule=find(schedule), microbatches=microbatches)
    if expected is None:
        assert answer is None
        return
    assert answer is not None
    assert answer.optimal
    assert answer.seconds == pytest.approx(expected.price.seconds_per_minibatch, rel=1e-9)
    cost = problem.price(answer.stages)
    assert cost.seconds_per_minibatch == pytest.approx(answer.seconds, rel=1e-9)
    assert cluster.memory_bytes is None or all(
        m.total_bytes <= cluster.memory_bytes for m in cost.memory
    )
    gpus = sum(stage.replicas for stage in answer.stages)
    if schedule in ("1f1b", "2bw"):
        assert (gpus, len(answer.stages)) == (expected.gpus, len(expected.stages))
    link = link_of(cluster)
    if schedule == "1f1b":
        path = Search(
            Chain(layer_costs), replica_model(link), Limits(cluster.gpus, cluster.memory_bytes)
        ).best()
    elif schedule == "2bw":
        return
    else:
        drained = SynchronousModel(link, find(schedule), microbatches)
        path = SynchronousSearch(
            Chain(layer_costs), drained, Limits(cluster.gpus, cluster.memory_bytes)
        ).best()
    assert path is not None
    assert path.seconds == pytest.approx(answer.seconds, rel=1e-9)


instances = st.tuples(
    profiles(most_layers=5), st.integers(1, 4), bandwidths, latencies, memories, st.integers(1, 6)
)
Instance = tuple[Profile, int, float, float, int | None, int]
SCHEDULES = ("1f1b", "gpipe", "1f1b-flush", "2bw")


def _ask(instance: Instance, schedule: str) -> None:
    model, gpus, bandwidth, latency, memory, microbatches = instance
    microbatches = microbatches if schedule in ("gpipe", "1f1b-flush", "2bw") else 1
    cluster = flat_cluster(gpus, bandwidth, memory, latency)
    flow_equals_search_and_brute_force(model, cluster, schedule, microbatches)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=examples(60), deadline=None)
@given(instance=instances)
def test_flow_finds_what_search_and_brute_force_find(schedule: str, instance: Instance) -> None:
    _ask(instance, schedule)


@pytest.mark.parametrize("rule", ["auto", "blocks"])
@pytest.mark.parametrize(("schedule", "microbatches"), [("1f1b", 1), ("2bw", 4), ("1f1b-flush", 4)])
@settings(max_examples=examples(20), deadline=None)
@given(
    model=profiles(most_layers=4, linear=True),
    gpus=st.integers(1, 3),
    share=st.sampled_from([0.4, 0.6, 0.8, 1.0]),
)
def test_any_blocks_of_a_stage_may_recompute(
    schedule: str, microbatches: int, rule: RecomputeRule, model: Profile, gpus: int, share: float
) -> None:
    numbered = [
        each.model_copy(update={"name": f"blocks.{n}"}) for n, each in enumerate(model.layers)
    ]
    names = {each.name: new.name for each, new in zip(model.layers, numbered, strict=True)}
    edges = [
        each.model_copy(update={"source": names[each.source], "target": names[each.target]})
        for each in model.edges
    ]
    model = model.model_copy(
        update={"layers": tuple(numbered), "edges": tuple(edges), "no_cut_after": ()}
    )
    held = sum(each.weight_bytes + each.optimizer_bytes + 2 * each.saved_bytes for each in numbered)
    costs, cluster = LayerCosts(model), flat_cluster(gpus, 8.0, max(1, round(share * held)))
    answer = solve_ilp(
        Problem(costs, Setting(cluster, find(schedule), microbatches), StageRules(rule)),
    )
    best = brute_force(
        costs, cluster, schedule=find(schedule), microbatches=microbatches, recompute=rule
    )
    assert (answer is None) == (best is None)
    if answer is not None and best is not None:
        assert answer.optimal
        assert answer.seconds == pytest.approx(best.seconds, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=examples(300), deadline=None)
@given(
    instance=st.tuples(
        profiles(most_layers=5),
        st.integers(1, 5),
        bandwidths,
        latencies,
        memories,
        st.integers(1, 8),
    )
)
def test_flow_finds_what_search_and_brute_force_find_many_times(
    schedule: str, instance: Instance
) -> None:
    _ask(instance, schedule)


# What only integer programs express, against every plan there is.


def fastest(problem: Problem) -> float:
    """Seconds of the best plan that fits; infinite when there is none."""
    priced = (
        Evaluation(stages, problem.price(stages)) for stages in plans(problem, problem.cluster.gpus)
    )
    return min((plan.seconds for plan in priced if plan.fits(problem.cluster)), default=math.inf)


@st.composite
def unlike(draw: st.DrawFn) -> tuple[Profile, Cluster]:
    model = draw(profiles(most_layers=4))
    gpus = draw(st.integers(1, 4))
    kinds: tuple[DeviceKind, ...] = ()
    if gpus > 1 and draw(st.booleans()):
        first = draw(st.integers(1, gpus - 1))
        speeds = st.sampled_from([0.5, 1.0, 3.0])
        kinds = tuple(
            DeviceKind(count=count, speed=draw(speeds), memory_bytes=draw(memories))
            for count in (first, gpus - first)
        )
    cluster = Cluster(
        levels=(
            Level(size=gpus, bandwidth_bytes_per_s=draw(bandwidths), latency_s=draw(latencies)),
        ),
        memory_bytes=draw(memories),
        kinds=kinds,
    )
    return model, cluster


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-flush"])
@settings(max_examples=examples(60), deadline=None)
@given(instance=unlike(), microbatches=st.integers(1, 5))
def test_kinds_against_every_plan(
    schedule: str, instance: tuple[Profile, Cluster], microbatches: int
) -> None:
    model, cluster = instance
    microbatches = 1 if schedule == "1f1b" else microbatches
    layer_costs = LayerCosts(model)
    setting = Setting(cluster, find(schedule), microbatches)
    problem = Problem(layer_costs, setting, StageRules("never", "never"))
    answer = solve_ilp(problem)
    expected = fastest(problem)
    if answer is None:
        assert expected == math.inf
        return
    assert answer.seconds == pytest.approx(expected, rel=1e-9)
    assert problem.price(answer.stages).seconds_per_minibatch == pytest.approx(
        answer.seconds, rel=1e-9
    )
    ranks = [rank for stage in answer.stages for rank in stage.ranks]
    assert len(set(ranks)) == len(ranks)
    for stage in answer.stages:
        kind = stage.options.kind
        assert (
            kind is None or min(cluster.kind_of(rank).speed for rank in stage.ranks) == kind.speed
        )


def test_what_is_not_expressible_is_refused_in_one_sentence() -> None:
    layer_costs = LayerCosts(profile(layer("a", output_bytes=1), layer("b")))
    levels = (Level(size=2, bandwidth_bytes_per_s=2.0), Level(size=2, bandwidth_bytes_per_s=1.0))
    with pytest.raises(InputError, match="clusters of one level"):
        solve_ilp(Problem(layer_costs, Setting(Cluster(levels=levels))))


def test_what_solvers_say_is_taken_at_its_word_only_where_it_holds() -> None:
    """Infeasible programs have values, and programs out of time a status called Optimal."""
    problem = pulp.LpProblem("impossible", pulp.LpMinimize)
    half = problem.add_variable("x", cat=pulp.LpBinary)
    problem.setObjective(pulp.lpSum([half]))
    problem += 2 * half == 1
    assert run(problem) == "infeasible"
    problem = pulp.LpProblem("long", pulp.LpMinimize)
    longest = problem.add_variable("T", 0)
    problem.setObjective(pulp.lpSum([longest]))
    sizes = [(n * 7919) % 997 / 7 + 10 for n in range(80)]
    chosen = [
        [problem.add_variable(f"x{n}_{d}", cat=pulp.LpBinary) for d in range(9)] for n in range(80)
    ]
    for row in chosen:
        problem += pulp.lpSum(row) == 1
    for d in range(9):
        problem += (
            pulp.lpSum(size * row[d] for size, row in zip(sizes, chosen, strict=True)) <= longest
        )
    assert run(problem, 1.0) in ("feasible", "unknown")
