"""The formulas, against numbers worked out by hand and against plain loops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.link import Link, ring_all_reduce_s
from planner.cost.models.synchronous import SynchronousModel
from planner.cost.work import IMPOSSIBLE, Footprint, Work, fewest_to_hold, working_bytes
from planner.schedule.flush import FLUSH
from planner.schedule.gpipe import GPIPE
from planner.schedule.naive import NAIVE
from planner.schedule.schedule import warm_up_depth
from planner.solver.bounds.asynchronous import AsynchronousBounds
from planner.solver.bounds.bounds import Bounds
from planner.solver.bounds.published import PaperBounds, PipedreamBounds


def work(**given: float) -> Work:
    names = ("forward_s", "backward_s", "update_s", "trainable_bytes", "received_bytes", "sent_bytes")
    more = ("received_messages", "sent_messages", "cut_before_bytes", "cut_after_bytes", "accumulate_s")
    values = {name: np.array([float(given.get(name, 0.0))]) for name in names + more}
    return Work(**values, is_first=np.array([bool(given.get("is_first", False))]))


EXAMPLE = work(
    forward_s=2,
    backward_s=4,
    update_s=1,
    trainable_bytes=60,
    received_bytes=30,
    sent_bytes=20,
    received_messages=2,
    sent_messages=1,
    cut_before_bytes=40,
    cut_after_bytes=50,
)


def test_ring_all_reduce() -> None:
    # 3 workers, 60 bytes: each sends 2·2/3 of them in 4 steps.
    assert ring_all_reduce_s(60, 3, Link(10.0, 0.5)) == pytest.approx(8 + 2)
    assert ring_all_reduce_s(60, 1, Link(10.0, 0.5)) == 0
    assert ring_all_reduce_s(0, 3, Link(10.0, 0.5)) == 0


def test_resource_model() -> None:
    one = AsynchronousBounds(Link(10.0, 0.5)).resources_s(EXAMPLE, 1)
    assert {name: float(value[0]) for name, value in one.items()} == {"compute": 7, "receive": 3 + 1, "send": 2 + 0.5}
    three = AsynchronousBounds(Link(10.0, 0.5)).resources_s(EXAMPLE, 3)
    assert three["compute"][0] == pytest.approx((2 + 1 + 10) / 3)  # behind which all of the backward hides
    assert three["receive"][0] == pytest.approx((3 + 1) / 3 + 2 * 2 / 9 * 6)
    assert three["send"][0] == pytest.approx((2 + 0.5) / 3 + 2 * 2 / 9 * 6)


def test_published_models() -> None:
    published = PipedreamBounds(Link(10.0)).resources_s(EXAMPLE, 2)
    assert published["compute"][0] == pytest.approx((7 + 4 * 60 / (10 * 2)) / 2)
    assert published["cut_before"][0] == pytest.approx(2 * 40 / (10 * 2))
    assert published["cut_after"][0] == pytest.approx(2 * 50 / (10 * 2))
    first = work(cut_after_bytes=50, is_first=True)
    assert PipedreamBounds(Link(10.0)).resources_s(first, 2)["cut_after"][0] == 0
    paper = PaperBounds(Link(10.0)).resources_s(EXAMPLE, 2)
    assert paper["compute"][0] == pytest.approx(max(7, 2 * 60 / 10) / 2)
    assert paper["cut_before"][0] == pytest.approx(2 * 40 / 10)


def test_synchronous_models() -> None:
    gpipe = SynchronousModel(Link(10.0, 0.5), GPIPE, 7)
    assert gpipe.sum_s(EXAMPLE)[0] == pytest.approx(2 + 4 + (30 + 20) / 10 / 2 + 3 * 0.5 / 2)
    # Three replicas take 3, 2 and 2 microbatches; five sixths of the backward of 4 s hide in the all-reduce of 10 s.
    assert gpipe.resources_s(EXAMPLE, 3)["compute"][0] == pytest.approx(2 * 6 + (10 - 4) + 1)
    assert gpipe.resources_s(EXAMPLE, 3)["receive"][0] == pytest.approx(2 * 4 + (10 - 4) + 1)
    assert list(gpipe.in_flight(np.array([1, 3, 7]), 0)) == [7, 3, 1]
    flush = SynchronousModel(Link(10.0, 0.5), FLUSH, 7)
    assert list(flush.in_flight(np.array([1, 3, 7]), 4)) == [5, 3, 1]  # as 1f1b, but no more than there are
    adding = replace(EXAMPLE, accumulate_s=np.array([2.0]))
    # All but the first of three add to gradients, and the all-reduce hides behind the last of them.
    assert gpipe.resources_s(adding, 3)["compute"][0] == pytest.approx(2 * (6 + 2) + (10 - 6) + 1)
    assert gpipe.resources_s(adding, 7)["compute"] == gpipe.resources_s(EXAMPLE, 7)["compute"]
    assert gpipe.sum_s(adding) == gpipe.sum_s(EXAMPLE)
    naive = SynchronousModel(Link(10.0, 0.5), NAIVE, 1)
    assert naive.sum_s(EXAMPLE)[0] == pytest.approx(2 + 4 + 1 + 2.5 + 0.75)
    assert naive.max_s(EXAMPLE, 1) == 0


amounts = st.integers(0, 60).map(float)
works = st.builds(
    work,
    forward_s=amounts,
    backward_s=amounts,
    update_s=amounts,
    trainable_bytes=amounts,
    received_bytes=amounts,
    sent_bytes=amounts,
    received_messages=st.integers(0, 4),
    sent_messages=st.integers(0, 4),
    cut_before_bytes=amounts,
    cut_after_bytes=amounts,
    accumulate_s=amounts,
    is_first=st.booleans(),
)


@pytest.mark.parametrize("model", [AsynchronousBounds, PipedreamBounds, PaperBounds])
@settings(max_examples=500, deadline=None)
@given(
    stage=works,
    bandwidth=st.sampled_from([0.5, 1.0, 4.0, 100.0]),
    latency=st.sampled_from([0.0, 0.25, 2.0]),
    target=st.floats(0.5, 100.0),
    at_least=st.integers(1, 6),
)
def test_closed_form_of_the_fewest_replicas_is_the_first_that_counting_finds(
    model: type[Bounds], stage: Work, bandwidth: float, latency: float, target: float, at_least: int
) -> None:
    priced = model(Link(bandwidth, latency))
    most = 2000
    meets = np.flatnonzero(priced.stage_s(stage, np.arange(at_least, most)) <= target)
    found = int(priced.fewest_replicas(stage, target, at_least)[0])
    assert found == (at_least + meets[0] if len(meets) else IMPOSSIBLE) or (not len(meets) and found >= most)


@given(
    weight=st.integers(0, 9),
    saved=st.integers(0, 9),
    fixed=st.integers(0, 9),
    after=st.integers(0, 9),
    memory=st.integers(1, 60),
)
def test_fewest_replicas_for_memory_is_the_first_that_counting_finds(
    weight: int, saved: int, fixed: int, after: int, memory: int
) -> None:
    zero = np.zeros(1)
    footprint = Footprint(np.array([weight * 1.0]), np.array([fixed * 1.0]), zero, zero, np.array([saved * 1.0]), zero)
    fitting = []
    for replicas in range(1, 20):
        flying = warm_up_depth(replicas, after)
        if footprint.total_bytes(flying, flying)[0] <= memory:
            fitting.append(replicas)
    found = fewest_to_hold(footprint.most_in_flight(memory, stashing=True), np.array([after]))
    assert found == (fitting[0] if fitting else IMPOSSIBLE)


def test_the_peak_is_that_of_the_layer_at_work_when_most_is_there() -> None:
    saved, gradients, workspaces = np.array([10.0, 20.0, 5.0]), np.array([1.0, 2.0, 30.0]), np.array([50.0, 0.0, 9.0])
    whole = (np.asarray(n * 1.0) for n in (33, 33, 0, 0, 35, 0, 6))
    footprint = Footprint(*whole, *(each[-1] for each in working_bytes(saved, gradients, workspaces, np.zeros(3))))
    # The first layer: its saved 10, its workspace 50, all gradients. The others: 30 + 32, and 35 + 9 + 30.
    peak = max(10 + 50 + 33, 30 + 0 + 32, 35 + 9 + 30)
    assert footprint.total_bytes(1, 1) == 33 + peak
    assert footprint.total_bytes(3, 2) == 2 * 33 + 2 * 35 + peak
    assert footprint.recomputed().total_bytes(3, 2) == 2 * 33 + 3 * 6 + peak
    # Where gradients add up, all are there from the first on, and a layer's twice before they are added.
    peak = max(10 + 50 + 1 + 33, 30 + 0 + 2 + 33, 35 + 9 + 30 + 33)
    assert footprint.divided(4).total_bytes(1, 1) == 33 + peak
    # The last two layers are a stage with another peak, below what is saved and all gradients.
    working, accumulating = (each[-1] for each in working_bytes(saved[1:], gradients[1:], np.zeros(2), np.zeros(2)))
    assert (working, accumulating) == (max(20 + 32, 25 + 30) - 25 - 32, 30)
    # A step that works in more than a microbatch takes comes to the gradients, when the microbatch is gone.
    working, accumulating = (each[-1] for each in working_bytes(saved, gradients, workspaces, np.array([0, 90, 0])))
    assert (working, accumulating) == (90 - 35, 90 - 35)


def test_in_flight_is_the_published_number() -> None:
    # 7-1: ceil(8 / 7) = 2 and 1; 2-1-1: 2, 2, 1; straight 1-1-1: 3, 2, 1.
    assert [int(warm_up_depth(r, after)) for r, after in [(7, 1), (1, 0)]] == [2, 1]
    assert [int(warm_up_depth(r, after)) for r, after in [(2, 2), (1, 1), (1, 0)]] == [2, 2, 1]
