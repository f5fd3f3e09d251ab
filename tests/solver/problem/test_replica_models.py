"""The fewest replicas within a target, against counting."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.network.link import Link
from planner.cost.work import IMPOSSIBLE, Work
from planner.schedule.one_stage import TWO_BW
from planner.schedule.schedule import warm_up_depth
from planner.solver.problem.replica_models import (
    AsynchronousReplicaModel,
    DoubleBufferedReplicaModel,
)
from tests.cost.works import works
from tests.examples import examples


@settings(max_examples=examples(1000), deadline=None)
@given(
    stage=works,
    bandwidth=st.sampled_from([0.5, 1.0, 4.0, 100.0]),
    latency=st.sampled_from([0.0, 0.25, 2.0]),
    target=st.floats(0.5, 600.0),
    at_least=st.integers(1, 6),
    after=st.integers(0, 12),
    microbatches=st.integers(1, 30),
)
def test_fewest_replicas_of_2bw_are_the_first_that_counting_finds(
    stage: Work,
    bandwidth: float,
    latency: float,
    target: float,
    at_least: int,
    after: int,
    microbatches: int,
) -> None:
    model = DoubleBufferedReplicaModel(Link(bandwidth, latency), microbatches)
    meets = [
        replicas
        for replicas in range(at_least, microbatches + 1)
        if float(model.stage_s(stage, replicas)[0]) <= target
        and TWO_BW.versions_suffice(microbatches, replicas, warm_up_depth(replicas, after))
    ]
    assert int(model.fewest_replicas(stage, target, at_least, np.array([after]))[0]) == min(
        meets, default=IMPOSSIBLE
    )


@settings(max_examples=examples(500), deadline=None)
@given(
    stage=works,
    bandwidth=st.sampled_from([0.5, 1.0, 4.0, 100.0]),
    latency=st.sampled_from([0.0, 0.25, 2.0]),
    target=st.floats(0.5, 100.0),
    at_least=st.integers(1, 6),
)
def test_closed_form_of_the_fewest_replicas_is_the_first_that_counting_finds(
    stage: Work, bandwidth: float, latency: float, target: float, at_least: int
) -> None:
    priced = AsynchronousReplicaModel(Link(bandwidth, latency))
    most = 2000
    meets = np.flatnonzero(priced.stage_s(stage, np.arange(at_least, most)) <= target)
    found = int(priced.fewest_replicas(stage, target, at_least)[0])
    assert found == (at_least + meets[0] if len(meets) else IMPOSSIBLE) or (
        not len(meets) and found >= most
    )
