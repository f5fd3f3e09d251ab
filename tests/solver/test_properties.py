"""What must hold of every answer: more GPUs never hurt, units do not matter, nor the order of the
file.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import InfeasibleError
from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.plan import Plan
from planner.formats.profile import Layer, Profile
from planner.solver import search_plan as solve
from tests.examples import examples
from tests.solver.strategies import profiles

MODELS = profiles(most_layers=7, linear=True)
BANDWIDTHS = st.sampled_from([0.3, 1.0, 3.0, 10.0, 40.0])
LATENCIES = st.sampled_from([0.0, 0.0, 0.125])
MEMORIES = st.one_of(st.none(), st.integers(20, 250))


def answer(model: Profile, cluster: Cluster) -> Plan | None:
    try:
        return solve(model, cluster)
    except InfeasibleError:
        return None


def seconds(plan: Plan | None) -> float:
    return float("inf") if plan is None else plan.predicted.seconds_per_minibatch


@settings(max_examples=examples(100), deadline=None)
@given(MODELS, st.integers(1, 7), BANDWIDTHS, LATENCIES, MEMORIES)
def test_more_gpus_are_never_worse(
    model: Profile, gpus: int, bandwidth: float, latency_s: float, memory: int | None
) -> None:
    fewer, more = (
        answer(model, flat_cluster(n, bandwidth, memory, latency_s)) for n in (gpus, gpus + 1)
    )
    assert seconds(more) <= seconds(fewer) * (1 + 1e-9)


@settings(max_examples=examples(80), deadline=None)
@given(
    MODELS,
    st.integers(1, 7),
    BANDWIDTHS,
    LATENCIES,
    MEMORIES,
    st.sampled_from([1.1, 1.5, 4.0]),
    st.booleans(),
)
def test_more_bandwidth_or_memory_is_never_worse_where_nobody_waits(
    model: Profile,
    gpus: int,
    bandwidth: float,
    latency_s: float,
    memory: int | None,
    factor: float,
    wider: bool,
) -> None:
    """The bound never rises. Where the larger cluster's plan reaches it, that is all; where its
    workers wait, the choice among finitely many simulated plans may miss one that was found for the
    smaller cluster.
    """
    if memory is None and not wider:
        memory = 100
    small = answer(model, flat_cluster(gpus, bandwidth, memory, latency_s))
    if wider:
        bandwidth *= factor
    elif memory is not None:
        memory = int(memory * factor)
    large = answer(model, flat_cluster(gpus, bandwidth, memory, latency_s))
    if small is None:
        return
    assert large is not None
    assert large.solver.lower_bound_s <= small.solver.lower_bound_s * (1 + 1e-9)
    if large.solver.gap == 0:
        assert seconds(large) <= seconds(small) * (1 + 1e-9)


def scaled(model: Profile, time: int, size: int) -> Profile:
    """All seconds times `time` and all bytes times `size`: powers of two, so that no digit
    changes.
    """

    def layer(one: Layer) -> Layer:
        given = {name: getattr(one, name) for name in Layer.model_fields if name.endswith("_s")}
        fields = {name: seconds * time for name, seconds in given.items() if seconds is not None}
        fields |= {
            name: getattr(one, name) * size
            for name in Layer.model_fields
            if name.endswith("_bytes")
        }
        outputs = [
            value.model_copy(
                update={
                    "output_bytes": value.output_bytes * size,
                    "gradient_bytes": value.gradient_bytes * size,
                }
            )
            for value in one.outputs
        ]
        return one.model_copy(update={**fields, "outputs": tuple(outputs)})

    return model.model_copy(update={"layers": tuple(layer(one) for one in model.layers)})


@settings(max_examples=examples(80), deadline=None)
@given(
    MODELS,
    st.integers(1, 7),
    BANDWIDTHS,
    LATENCIES,
    MEMORIES,
    st.sampled_from([2, 8]),
    st.sampled_from([2, 16]),
)
def test_other_units_give_the_same_plan(
    model: Profile,
    gpus: int,
    bandwidth: float,
    latency_s: float,
    memory: int | None,
    time: int,
    size: int,
) -> None:
    plain = answer(model, flat_cluster(gpus, bandwidth, memory, latency_s))
    more_memory = None if memory is None else memory * size
    other = answer(
        scaled(model, time, size),
        flat_cluster(gpus, bandwidth * size / time, more_memory, latency_s * time),
    )
    if plain is None or other is None:
        assert plain is other
        return
    assert [(stage.layers, stage.ranks, stage.in_flight) for stage in plain.stages] == [
        (stage.layers, stage.ranks, stage.in_flight) for stage in other.stages
    ]
    assert seconds(other) == pytest.approx(time * seconds(plain), rel=1e-9)


@settings(max_examples=examples(80), deadline=None)
@given(profiles(most_layers=6), st.integers(1, 5), BANDWIDTHS, st.integers(0, 99))
def test_the_order_of_edges_and_keys_does_not_matter_and_answers_repeat(
    model: Profile, gpus: int, bandwidth: float, seed: int
) -> None:
    edges = list(model.edges)
    random.Random(seed).shuffle(edges)
    content = model.model_copy(update={"edges": tuple(edges)}).model_dump()
    shuffled = Profile.model_validate(dict(sorted(content.items(), reverse=True)))
    plans = [answer(each, flat_cluster(gpus, bandwidth)) for each in (model, model, shuffled)]
    first, again, other = (None if plan is None else without_seconds(plan) for plan in plans)
    assert first is not None
    assert first == again
    assert other is not None
    assert first.stages == other.stages
    assert first.predicted == other.predicted


def without_seconds(plan: Plan) -> Plan:
    return plan.model_copy(update={"solver": plan.solver.model_copy(update={"seconds": 0.0})})
