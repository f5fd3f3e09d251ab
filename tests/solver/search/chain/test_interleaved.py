"""Interleaved plans: the formula against the simulated streams, the search against brute force,
whole plans.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.candidate import candidates
from planner.cost.layer_costs import LayerCosts
from planner.cost.models.interleaved import InterleavedShape
from planner.cost.network.link import Link
from planner.cost.overheads import Price
from planner.cost.pricing import price
from planner.cost.setting import Setting
from planner.errors import InfeasibleError, InputError
from planner.formats.cluster import flat_cluster
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.options.solving import RecomputeRule, ShardRule, StageRules
from planner.schedule.chunked import INTERLEAVED
from planner.simulator.pipeline_costs import StageCosts
from planner.solver import search_plan as solve
from planner.solver.problem.problem import Limits
from planner.solver.problem.states import Chain
from planner.solver.search.chain.interleaved import InterleavedSearch
from tests.examples import examples
from tests.samples import layer, profile
from tests.schedule.test_streams import make_interleaved
from tests.simulator.pipelines import FREE, run
from tests.solver.oracle import brute_force
from tests.solver.strategies import profiles
from tests.solver.test_against_brute_force import bandwidths, latencies, memories, rules


def simulated_s(
    workers: int, chunks: int, microbatches: int, forward_s: list[float], accumulate_s: float = 0.0
) -> float:
    """Seconds per minibatch with free links and backwards of twice the forward."""
    stages = tuple(
        StageCosts(seconds, 2 * seconds, 0.0, accumulate_s=accumulate_s) for seconds in forward_s
    )
    shape = make_interleaved(workers, chunks, microbatches)
    outcome = run(shape, stages, FREE, 3)
    ends = outcome.ends_s[microbatches - 1 :: microbatches]
    return (ends[-1] - ends[0]) / 2


def priced(
    workers: int, chunks: int, microbatches: int, forward_s: list[float], accumulate_s: float = 0.0
) -> Price:
    layers = [layer(f"l{i}", each, 2 * each, saved_bytes=1) for i, each in enumerate(forward_s)]
    model = profile(*(each.model_copy(update={"accumulate_s": accumulate_s}) for each in layers))
    stages = candidates([[i] for i in range(len(forward_s))], [1] * len(forward_s))
    return price(
        LayerCosts(model),
        stages,
        Setting(flat_cluster(workers, 1.0), INTERLEAVED, microbatches, chunks),
    )


@pytest.mark.parametrize(
    ("workers", "chunks", "microbatches"),
    [(2, 2, 4), (4, 2, 8), (4, 3, 16), (3, 2, 7), (4, 2, 10), (4, 2, 6)],
)
def test_equal_chunks_take_the_published_time(workers: int, chunks: int, microbatches: int) -> None:
    expected = (microbatches * chunks + workers - 1) * 3.0
    forward_s = [1.0] * workers * chunks
    assert priced(workers, chunks, microbatches, forward_s).seconds_per_minibatch == pytest.approx(
        expected
    )
    assert simulated_s(workers, chunks, microbatches, forward_s) == pytest.approx(expected)
    adding = priced(workers, chunks, microbatches, forward_s, 0.25).seconds_per_minibatch
    assert adding == pytest.approx(expected + (microbatches - 1) * chunks * 0.25)
    # Where the pipeline drains, the last microbatch's gradients are added on all workers, one after
    # the other.
    simulated = simulated_s(workers, chunks, microbatches, forward_s, 0.25)
    assert adding <= simulated <= adding + (workers - 1) * chunks * 0.25


def test_unequal_chunks_take_no_less_than_the_formula_and_little_more() -> None:
    rng = np.random.default_rng(0)
    over = []
    for _ in range(60):
        workers, chunks = int(rng.integers(2, 5)), int(rng.integers(2, 4))
        microbatches = workers * int(rng.integers(1, 5))
        forward_s = rng.uniform(1, 1.2, workers * chunks).tolist()
        bound = priced(workers, chunks, microbatches, forward_s).seconds_per_minibatch
        over.append(simulated_s(workers, chunks, microbatches, forward_s) / bound - 1)
    assert min(over) >= -1e-9
    assert np.mean(over) < 0.03
    assert max(over) < 0.10


def test_in_flight_are_the_published_counts() -> None:
    """Worker 0 of 4 with 2 chunks runs 4 + 2·3 = 10 forwards ahead, of which 4 go to its second
    chunk.
    """
    model = InterleavedShape(INTERLEAVED, Link(1.0), 4, 2, 1, 16)
    assert [
        model.in_flight()[0] + model.in_flight()[4],
        model.in_flight()[3] + model.in_flight()[7],
    ] == [11 + 1, 5 + 1]
    counts = priced(2, 2, 4, [1.0] * 4)
    assert [memory.activations_bytes for memory in counts.memory] == list(counts.in_flight)
    assert counts.gpu_bytes[0] == counts.gpu_bytes[2] == counts.in_flight[0] + counts.in_flight[2]


@settings(max_examples=examples(250), deadline=None)
@given(
    model=profiles(most_layers=6),
    gpus=st.integers(2, 5),
    microbatches=st.integers(2, 8),
    chunks=st.integers(1, 3),
    bandwidth=bandwidths,
    latency=latencies,
    memory=memories,
    recompute=rules,
    # brute force takes 2^stages times as long where stages may shard
    shard=st.sampled_from(["never"] * 7 + ["auto"]),
)
def test_the_search_finds_what_brute_force_finds(
    model: Profile,
    gpus: int,
    microbatches: int,
    chunks: int,
    bandwidth: float,
    latency: float,
    memory: int | None,
    recompute: RecomputeRule,
    shard: ShardRule,
) -> None:
    cluster = flat_cluster(gpus, bandwidth, memory, latency)
    layer_costs = LayerCosts(model)
    setting = Setting(cluster, INTERLEAVED, microbatches, chunks)
    search = InterleavedSearch(
        Chain(layer_costs), setting, Limits(gpus, memory, StageRules(recompute, shard))
    )
    paths, bound_s = search.best()
    expected = brute_force(
        layer_costs,
        cluster,
        schedule=INTERLEAVED,
        microbatches=microbatches,
        chunks=chunks,
        recompute=recompute,
        shard=shard,
    )
    if expected is None:
        assert not paths
        return
    assert paths
    assert bound_s <= expected.price.seconds_per_minibatch * (1 + 1e-9)
    if bound_s >= paths[0].seconds * (1 - 1e-9):  # said to be optimal
        assert paths[0].seconds == pytest.approx(expected.price.seconds_per_minibatch, rel=1e-9)
    else:
        assert paths[0].seconds >= expected.price.seconds_per_minibatch * (1 - 1e-9)


@settings(max_examples=examples(100), deadline=None)
@given(
    model=profiles(most_layers=6),
    gpus=st.integers(2, 4),
    microbatches=st.integers(2, 8),
    bandwidth=bandwidths,
)
def test_with_memory_enough_the_answer_is_exact_and_nothing_recomputes(
    model: Profile, gpus: int, microbatches: int, bandwidth: float
) -> None:
    cluster, layer_costs = flat_cluster(gpus, bandwidth), LayerCosts(model)
    setting = Setting(cluster, INTERLEAVED, microbatches, 2)
    rules = StageRules(shard_optimizer="never")
    paths, bound_s = InterleavedSearch(
        Chain(layer_costs), setting, Limits(gpus, rules=rules)
    ).best()
    expected = brute_force(
        layer_costs,
        cluster,
        schedule=INTERLEAVED,
        microbatches=microbatches,
        chunks=2,
        shard="never",
    )
    assert (expected is None) == (not paths)
    if expected is not None:
        assert paths[0].seconds == pytest.approx(expected.price.seconds_per_minibatch, rel=1e-9)
        assert bound_s == pytest.approx(paths[0].seconds)
        assert not any(each.recompute for each in paths[0].options)


def deep(
    layers: int = 64, output_bytes: int = 0, weight_bytes: int = 0, saved_bytes: int = 0
) -> Profile:
    rng = np.random.default_rng(1)
    return profile(
        *(
            layer(
                f"l{i}",
                f,
                2 * f,
                output_bytes=output_bytes,
                weight_bytes=weight_bytes,
                saved_bytes=saved_bytes,
            )
            for i, f in enumerate(rng.uniform(0.5, 2, layers).tolist())
        )
    )


def test_a_deep_model_is_cut_evenly_enough() -> None:
    plan = solve(
        deep(output_bytes=1), flat_cluster(4, 1e6), schedule="interleaved", microbatches=16
    )
    assert plan.solver.status == "feasible"
    assert plan.solver.gap < 0.15, "with a bubble of 3/32"
    assert plan.workers == 4
    assert plan.chunks == 2
    assert plan.stages[0].ranks == plan.stages[len(plan.stages) // 2].ranks
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_long_models_are_cut_at_some_places() -> None:
    plan = solve(
        deep(600, output_bytes=1), flat_cluster(4, 1e6), schedule="interleaved", microbatches=16
    )
    assert plan.solver.gap < 0.15


def test_memory_makes_chunks_recompute_and_then_ends() -> None:
    model = deep(16, output_bytes=10, weight_bytes=10, saved_bytes=1000)
    roomy = solve(model, flat_cluster(4, 1e6), schedule="interleaved", microbatches=8)
    most = max(roomy.memory_bytes(stage) for stage in range(len(roomy.stages)))
    tight = solve(model, flat_cluster(4, 1e6, most // 2), schedule="interleaved", microbatches=8)
    assert any(stage.recompute for stage in tight.stages)
    assert max(tight.memory_bytes(stage) for stage in range(len(tight.stages))) <= most // 2
    with pytest.raises(InfeasibleError, match="too much"):
        solve(model, flat_cluster(4, 1e6, 3000), schedule="interleaved", microbatches=8)


def test_too_little_to_interleave_is_said() -> None:
    with pytest.raises(InputError, match="nothing can be interleaved with 1 GPU"):
        solve(deep(), flat_cluster(1, 1.0), schedule="interleaved", microbatches=8)
    with pytest.raises(InputError, match="0 chunks"):
        solve(deep(), flat_cluster(2, 1.0), schedule="interleaved", microbatches=8, chunks=0)


def test_plans_whose_ranks_do_not_repeat_are_refused() -> None:
    plan = solve(deep(8), flat_cluster(2, 1.0), schedule="interleaved", microbatches=8)
    content = plan.model_dump()
    content["stages"][-1]["ranks"] = (0,)
    with pytest.raises(ValueError, match="do not repeat"):
        Plan.model_validate(content)
    assert [one.ranks < other.ranks for one, other in pairwise(plan.stages[:2])] == [True]
