"""The formulas of 2bw, against numbers worked out by hand and the simulated streams."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.candidate import candidates
from planner.cost.layer_costs import LayerCosts
from planner.cost.models.asynchronous import AsynchronousModel, DoubleBufferedModel
from planner.cost.network.link import Link, ring_all_reduce_s
from planner.cost.pricing import price
from planner.cost.setting import Setting
from planner.cost.work import Work
from planner.formats.cluster import flat_cluster
from planner.schedule.one_stage import TWO_BW
from planner.simulator.pipeline_costs import StageCosts
from planner.solver import search_plan as solve
from tests.cost.works import EXAMPLE, work, works
from tests.samples import layer, profile
from tests.schedule.test_streams import make_shape
from tests.simulator.pipelines import FREE, run


def test_formula() -> None:
    three = DoubleBufferedModel(Link(10.0, 0.5), 7).resources_s(EXAMPLE, 3)
    # Three of the seven microbatches of 2 + 4 s; of the all-reduce of 8 + 2 s, 5/6 of one backward
    # hide.
    assert three["compute"][0] == pytest.approx(3 * 6 + 1 + 10 - 4)
    assert three["receive"][0] == pytest.approx(3 * (3 + 1) + 8)
    assert three["send"][0] == pytest.approx(3 * (2 + 0.5) + 8)
    adding = replace(EXAMPLE, accumulate_s=np.array([2.0]))
    # Two of the three add to gradients; the last one takes 6 s, in which more of the all-reduce
    # hides.
    compute = DoubleBufferedModel(Link(10.0, 0.5), 7).resources_s(adding, 3)["compute"]
    assert compute[0] == pytest.approx(3 * 6 + 2 * 2 + 1 + 10 - 6)


@given(stage=works, replicas=st.integers(1, 9))
def test_with_a_microbatch_per_replica_it_is_a_round_of_1f1b(stage: Work, replicas: int) -> None:
    link = Link(4.0, 0.25)
    round_ = AsynchronousModel(link).resources_s(stage, replicas)
    minibatch = DoubleBufferedModel(link, replicas).resources_s(stage, replicas)
    for name in round_:
        assert float(minibatch[name][0]) == pytest.approx(replicas * float(round_[name][0]))


def test_memory_is_two_versions_however_deep() -> None:
    model = profile(
        *(layer(f"l{i}", output_bytes=1, weight_bytes=100, saved_bytes=10) for i in range(4))
    )
    cost = price(
        LayerCosts(model),
        candidates([[0], [1], [2], [3]], [1] * 4),
        Setting(flat_cluster(4, 1e9), TWO_BW, 8),
    )
    assert cost.in_flight == (4, 3, 2, 1)
    assert [memory.weights_bytes for memory in cost.memory] == [200] * 4
    assert [memory.activations_bytes for memory in cost.memory] == [40, 30, 20, 10]


@pytest.mark.parametrize("replicas", [(1,), (1, 1), (1, 1, 1, 1), (3, 1), (4, 2), (3,)])
@pytest.mark.parametrize("accumulate_s", [0.0, 0.125])
def test_the_streams_take_what_the_formula_says(
    replicas: tuple[int, ...], accumulate_s: float
) -> None:
    """Equal work per worker and free links, where the published depth leaves nobody waiting; m =
    12.
    """
    link, microbatches = Link(10.0), 12
    stages, formula, reduce_s = [], [], []
    for r in replicas:
        stage = work(
            forward_s=1.0 * r,
            backward_s=2.0 * r,
            update_s=0.25 * r,
            trainable_bytes=6.0 * r,
            accumulate_s=accumulate_s * r,
        )
        model = DoubleBufferedModel(link, microbatches)
        formula.append(float(model.stage_s(stage, r)[0]))
        stages.append(StageCosts(1.0 * r, 2.0 * r, 0.25 * r, accumulate_s=accumulate_s * r))
        reduce_s.append(float(ring_all_reduce_s(6.0 * r, r, link)))
    outcome = run(make_shape(replicas, "2bw", microbatches), stages, FREE, 20, reduce_s)
    assert outcome.seconds_per_minibatch == pytest.approx(max(formula), rel=0.03)


def test_a_plan_for_2bw_beats_flushing_at_the_same_minibatch() -> None:
    model = profile(
        *(layer(f"l{i}", output_bytes=1, weight_bytes=1000, saved_bytes=10) for i in range(8))
    )
    cluster = flat_cluster(4, 1e4)
    seconds = {
        schedule: solve(
            model, cluster, schedule=schedule, microbatches=8
        ).predicted.seconds_per_minibatch
        for schedule in ("2bw", "1f1b-flush")
    }
    assert seconds["2bw"] < seconds["1f1b-flush"]


def test_depths_keep_to_two_versions() -> None:
    """Slow links ask for more in flight than two versions allow."""
    model = profile(*(layer(f"l{i}", output_bytes=100) for i in range(4)))
    for microbatches, latency in itertools.product((4, 6), (0.0, 2.0)):
        plan = solve(
            model,
            flat_cluster(4, 50.0, latency_s=latency),
            schedule="2bw",
            microbatches=microbatches,
        )
        depths = [stage.in_flight for stage in plan.stages]
        assert all(
            TWO_BW.versions_suffice(microbatches, *each)
            for each in zip(plan.replicas, depths, strict=True)
        )
