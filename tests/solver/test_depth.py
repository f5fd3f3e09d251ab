"""Depths: no deeper than needed, deep enough where it pays, within memory."""

from __future__ import annotations

import pytest

from planner.schedule.streams import PipelineShape
from planner.simulator.pipeline import StageTimes
from planner.solver.depth import PipelineTimes, choose_depths, price_depths, published_depths
from planner.solver.pipelines import wires_s
from tests.schedule.test_streams import make_shape
from tests.simulator.pipelines import TransferTimes, pipeline


def equal_work(replicas: tuple[int, ...], transfer_s: float, deepest: int = 99) -> PipelineTimes:
    """Every worker is busy for one second per minibatch."""
    shape: PipelineShape = make_shape(replicas, "1f1b")
    stages = [StageTimes(r / 3, 2 * r / 3, 0.0) for r in replicas]
    made = pipeline(shape, stages, TransferTimes(transfer_s, transfer_s))
    return PipelineTimes(made, wires_s(made), busiest_s=1.0, deepest=(deepest,) * len(replicas))


@pytest.mark.parametrize("replicas", [(1, 1), (1, 1, 1), (7, 1), (15, 1), (1,) * 8, (4,)])
def test_where_messages_are_free_the_published_depths_stay(replicas: tuple[int, ...]) -> None:
    choice = choose_depths(equal_work(replicas, 0.0))
    assert choice.depths == published_depths(replicas)
    assert choice.counted_s == 1.0


@pytest.mark.parametrize(
    ("replicas", "transfer_s"),
    [((1, 1), 0.4), ((2, 1, 1), 0.0), ((2, 1, 1), 0.1), ((4, 3, 1), 0.1), ((9, 5, 1, 1), 0.1), ((1, 1, 1, 1), 0.4)],
)
def test_deeper_pipelines_reach_their_busiest_resource(replicas: tuple[int, ...], transfer_s: float) -> None:
    times = equal_work(replicas, transfer_s)
    published = price_depths(times, published_depths(replicas))
    choice = choose_depths(times)
    assert published.seconds_per_unit > 1.3
    assert choice.counted_s == 1.0
    assert all(depth >= least for depth, least in zip(choice.depths, published.depths, strict=True))
    assert choice.depths[-1] == 1


def test_a_minibatch_more_in_flight_must_gain_two_percent() -> None:
    """7-1 with transfers of 0.04: 2.3% slower than its busiest worker, not worth another minibatch of delay.

    Of that, one percent is within the tolerance.
    """
    choice = choose_depths(equal_work((7, 1), 0.04))
    assert choice.depths == (2, 1)
    assert choice.counted_s == pytest.approx(1.013, abs=0.0005)
    assert choose_depths(equal_work((7, 1), 0.1)).depths == (3, 1)


def test_memory_bounds_the_depth_and_the_price_says_so() -> None:
    choice = choose_depths(equal_work((1, 1), 0.4, deepest=2))
    assert choice.depths == (2, 1)
    assert choice.seconds_per_unit == pytest.approx(1.4, rel=0.02)
