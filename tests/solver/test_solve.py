"""`solve` as a user calls it: published answers, infeasible clusters, transfers, honesty about
optimality.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.candidate import Candidate
from planner.cost.layer_costs import LayerCosts
from planner.cost.network.link import Link
from planner.errors import InfeasibleError, InputError, ProfileError
from planner.formats.cluster import flat_cluster
from planner.formats.plan_parts import ALONG_ORDER
from planner.formats.profile import Profile
from planner.options.solving import SolveOptions
from planner.schedule.registry import find
from planner.solver import search_plan as solve
from planner.solver.evaluate.pipelines import transfers
from planner.solver.find_plan import find_plan
from planner.solver.problem import cut_space
from planner.solver.problem.infeasible import round_up
from planner.solver.problem.problem import Limits
from planner.solver.problem.replica_models import replica_model
from planner.solver.problem.states import Chain
from planner.solver.request import Request
from planner.solver.search.chain.search import Search
from planner.solver.tuning.record import STANDARD
from planner.units import parse_bytes
from tests.examples import examples
from tests.samples import layer, profile
from tests.solver.oracle import brute_force
from tests.solver.strategies import profiles


def test_ranks_are_consecutive_and_predictions_per_sample() -> None:
    model = profile(layer("a", 2, 4, output_bytes=1), layer("b", 1, 2, weight_bytes=1000))
    plan = solve(model, flat_cluster(3, 10.0))
    assert [stage.ranks for stage in plan.stages] == [(0, 1), (2,)]
    predicted = plan.predicted
    seconds = predicted.seconds_per_minibatch
    assert predicted.bottleneck.busy_s == 3
    assert seconds == pytest.approx(3, rel=0.03), "messages leave workers waiting a little"
    assert predicted.samples_per_s == pytest.approx(4 / seconds)
    assert predicted.speedup_over_one_gpu == pytest.approx(9 / seconds)
    # Three replicas of everything would spend 2·2/3·1000/10 on every all-reduce, from the end of
    # the backward of b on.
    assert predicted.speedup_over_data_parallel == pytest.approx((3 + 2 + 400 / 3) / 3 / seconds)
    assert predicted.communication_bytes_per_sample == pytest.approx(2 / 4)
    assert predicted.data_parallel_communication_bytes_per_sample == pytest.approx(
        2 * 2 / 3 * 1000 / 4
    )
    assert predicted.communication_cut == pytest.approx(1 - 2 / (4000 / 3))


def test_equal_times_use_fewer_gpus() -> None:
    model = profile(layer("a", 1, 2, output_bytes=1), layer("b", 1, 2))
    plan = solve(model, flat_cluster(2, 0.1))  # any cut or all-reduce would cost more than it gives
    assert plan.config == "2"  # no weights, nothing to reduce
    single = solve(profile(layer("a", 1, 2, weight_bytes=10**6)), flat_cluster(8, 1.0))
    assert single.config == "1"
    assert single.cluster.gpus == 8


def test_the_order_of_the_file_does_not_matter_and_answers_repeat() -> None:
    model = profile(
        layer("a", 2, 4, output_bytes=1), layer("b", 1, 2, output_bytes=2), layer("c", 3, 3)
    )
    shuffled = model.model_copy(update={"edges": model.edges[::-1]})
    first, second = (solve(each, flat_cluster(4, 10.0)) for each in (model, shuffled))
    assert first.stages == second.stages
    assert first.predicted == second.predicted


def test_forbidden_cuts_are_not_made() -> None:
    model = profile(
        layer("a", output_bytes=1), layer("b", output_bytes=1), layer("c"), no_cut_after=("b",)
    )
    plan = solve(model, flat_cluster(2, 1e9), schedule="gpipe", microbatches=1)
    assert all("b" not in stage.layers or "c" in stage.layers for stage in plan.stages)


def test_transfers_follow_the_users_of_a_value() -> None:
    model = profile(
        layer("a", output_bytes=10),
        layer("b", output_bytes=20),
        layer("c", output_bytes=30),
        layer("d"),
        edges=[("a", "b"), ("a", "d"), ("b", "c"), ("c", "d")],
    )
    groups = [(0, 0), (1, 1), (2, 2), (3, 3)]
    stages = [Candidate(frozenset(range(i)), frozenset({j})) for i, j in groups]
    sent = {
        (t.source, t.target): (t.values, t.output_bytes)
        for t in transfers(LayerCosts(model), stages)
    }
    assert sent == {
        (0, 1): (("a",), 10),
        (1, 2): (("b",), 20),
        (1, 3): (("a",), 10),
        (2, 3): (("c",), 30),
    }


@settings(max_examples=examples(200), deadline=None)
@given(model=profiles(most_layers=6))
def test_vectorised_work_is_the_work_of_the_definition(model: Profile) -> None:
    layer_costs = LayerCosts(model)
    space = Chain(layer_costs)
    for state in range(len(space) - 1):
        others = np.arange(state + 1, len(space))
        fast = space.work(state, others)
        for column, other in enumerate(others):
            stage = Candidate(
                frozenset(space.layers(0, state)), frozenset(space.layers(state, int(other)))
            )
            plain = layer_costs.work(stage)
            for name in vars(plain):
                got = np.broadcast_to(getattr(fast, name), others.shape)[column]
                assert got == pytest.approx(getattr(plain, name)), name


MEMORY_MODEL = profile(
    layer("a", output_bytes=10, weight_bytes=100, saved_bytes=50),
    layer("b", output_bytes=10, weight_bytes=300, saved_bytes=50),
    layer("c", weight_bytes=200, saved_bytes=50),
)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_infeasible_names_the_stage_and_the_smallest_memory(schedule: str) -> None:
    microbatches = 2 if schedule == "gpipe" else 1
    with pytest.raises(InfeasibleError) as caught:
        solve(MEMORY_MODEL, flat_cluster(2, 1e9, 400), schedule=schedule, microbatches=microbatches)
    message, hint = caught.value.message, caught.value.hint
    assert "no plan fits 2 GPUs of 400 B" in message
    assert "too much" in message
    assert "`memory=" in hint
    smallest = parse_bytes(hint.split("memory=")[1].split("`")[0])
    expected = [
        memory
        for memory in (smallest, smallest - 1)
        if brute_force(
            LayerCosts(MEMORY_MODEL),
            flat_cluster(2, 1e9, memory),
            schedule=find(schedule),
            microbatches=microbatches,
        )
    ]
    assert expected == [smallest]


def test_infeasible_says_when_more_gpus_would_do() -> None:
    with pytest.raises(InfeasibleError) as caught:
        solve(MEMORY_MODEL, flat_cluster(1, 1e9, 1250), schedule="1f1b-flush", microbatches=1)
    assert "`gpus=2`" in caught.value.hint
    assert (
        solve(
            MEMORY_MODEL, flat_cluster(2, 1e9, 1250), schedule="1f1b-flush", microbatches=1
        ).workers
        == 2
    )


@given(st.integers(1, 10**13))
def test_rounding_up_keeps_what_fits(count: int) -> None:
    assert count <= parse_bytes(round_up(count)) <= count * 1.011 + 1


TOWERS = profile(
    layer("a1", 1, 1, output_bytes=4),
    layer("b1", 3, 3, output_bytes=400, weight_bytes=1000),
    layer("a2", 5, 5, output_bytes=4),
    layer("b2", 2, 2, output_bytes=4),
    layer("head", 1, 1),
    edges=[("a1", "a2"), ("b1", "b2"), ("a2", "head"), ("b2", "head")],
)


def test_a_cut_is_behind_one_tower_and_before_the_other() -> None:
    """The order alternates between the towers, and along it the work is divided less evenly."""
    for graph_hash in ("known", None):
        model = TOWERS.model_copy(update={"graph_hash": graph_hash})
        plan = solve(model, flat_cluster(2, 4.0), depth="published")
        assert [stage.layers for stage in plan.stages] == [("a1", "a2"), ("b1", "b2", "head")]
        assert plan.solver.lower_bound_s == plan.solver.cost_model_s == 12
        assert plan.solver.cuts == "all 10 sets of layers that a cut may leave before it"
        assert plan.solver.bound_of == ""


def test_where_cuts_are_too_many_those_along_the_order_are_improved() -> None:
    tuning = replace(STANDARD, branches=replace(STANDARD.branches, most_downsets=0))
    options = SolveOptions(depth="published")
    plan = find_plan(Request.of(TOWERS, flat_cluster(2, 4.0), options, tuning))
    assert [stage.layers for stage in plan.stages] == [("a1", "a2"), ("b1", "b2", "head")]
    assert plan.solver.cuts == cut_space.IMPROVED
    # The bound is of all plans, not of those along the order, which are slower than this one.
    assert plan.solver.lower_bound_s <= 12
    assert plan.solver.bound_of == ""

    alone = find_plan(Request.of(TOWERS, flat_cluster(1, 4.0), options, tuning))
    assert alone.solver.cuts == cut_space.IMPROVED
    assert alone.solver.bound_of == ALONG_ORDER


def test_searches_that_know_no_other_cuts_say_so() -> None:
    plan = solve(TOWERS, flat_cluster(2, 4.0), solver="ilp", depth="published")
    assert [name for stage in plan.stages for name in stage.layers] == [
        "a1",
        "b1",
        "a2",
        "b2",
        "head",
    ]
    assert plan.solver.cuts == plan.solver.bound_of == ALONG_ORDER


def test_wrong_questions_are_refused() -> None:
    with pytest.raises(ProfileError, match="take no time"):
        solve(profile(layer("a", 0, 0)), flat_cluster(1, 1.0))
    with pytest.raises(InputError, match="does not apply"):
        solve(MEMORY_MODEL, flat_cluster(1, 1.0), microbatches=3)


def test_more_gpus_bandwidth_or_memory_are_never_worse() -> None:
    rng = np.random.default_rng(0)
    layers = [
        layer(
            f"l{i}",
            float(f),
            float(2 * f),
            output_bytes=int(o),
            weight_bytes=int(w),
            saved_bytes=int(o),
        )
        for i, (f, o, w) in enumerate(rng.integers(1, 50, (30, 3)))
    ]
    model = profile(*layers)

    def seconds(gpus: int, bandwidth: float, memory: int) -> float:
        return solve(model, flat_cluster(gpus, bandwidth, memory)).predicted.seconds_per_minibatch

    for low, high in [
        ((4, 5.0, 9000), (6, 5.0, 9000)),
        ((6, 5.0, 9000), (6, 7.0, 9000)),
        ((6, 5.0, 2000), (6, 5.0, 9000)),
    ]:
        # A plan that is nearly as fast may be less late.
        speedup = STANDARD.evaluate.min_speedup_per_stale_update
        assert seconds(*high) <= seconds(*low) * speedup


def test_thousands_of_gpus_do_not_cost_more_than_a_few() -> None:
    model = profile(*(layer(f"l{i}", 1, 2, output_bytes=1, weight_bytes=1) for i in range(200)))
    plan = solve(model, flat_cluster(16384, 1e6))
    assert plan.predicted.speedup_over_one_gpu == pytest.approx(16384, rel=0.3)
    assert plan.workers <= 16384


def test_a_rough_start_does_not_change_the_answer() -> None:
    rng = np.random.default_rng(3)
    layers = [
        layer(
            f"l{i}",
            float(f),
            float(f),
            output_bytes=int(o),
            weight_bytes=int(w),
            saved_bytes=int(w),
        )
        for i, (f, o, w) in enumerate(rng.integers(1, 30, (60, 3)))
    ]
    edges = [
        (f"l{i}", f"l{j}")
        for i in range(59)
        for j in (i + 1, i + 1 + int(rng.integers(0, 5)))
        if j < 60
    ]
    layer_costs = LayerCosts(profile(*layers, edges=sorted(set(edges))))
    for memory in (None, 900):
        answers = []
        for rough in (5, 300):
            tuning = replace(STANDARD, chain=replace(STANDARD.chain, rough_states=rough))
            limits = Limits(40, memory, tuning=tuning)
            answers.append(
                Search(Chain(layer_costs), replica_model(Link(20.0, 0.1)), limits).best()
            )
        assert answers[0] is not None
        assert answers[0] == answers[1]


def test_memory_may_force_replicas_however_slow_their_all_reduce() -> None:
    """No two layers fit one GPU, and the first fits only with two minibatches in flight: 2-1-1 is
    all there is.
    """
    model = profile(
        *(
            layer(name, output_bytes=size, weight_bytes=100, saved_bytes=50)
            for name, size in [("a", 1), ("b", 1), ("c", 0)]
        )
    )
    cluster = flat_cluster(4, 1e9, 450, all_reduce_bandwidth_bytes_per_s=1e-6)
    plan = solve(model, cluster, depth="published")
    assert plan.config == "2-1-1"
    assert max(stage.memory.total_bytes for stage in plan.stages) <= 450


@pytest.mark.parametrize("time_limit_s", [60, None])
def test_a_faster_plan_that_is_staler_is_told(time_limit_s: float | None) -> None:
    """Three stages take 6.02 s, data parallelism 6.27 s; the answer is that at any time limit."""
    even = profile(*(layer(f"l{i}", 1, 2, output_bytes=1, weight_bytes=5) for i in range(6)))
    plan = solve(even, flat_cluster(3, 50.0), time_limit_s=time_limit_s)
    assert plan.config == "3"
    (told,) = (note for note in plan.notes if note.startswith("1-1-1 "))
    assert "4.1% faster than this plan" in told
    assert "3 updates stale in place of 0" in told
