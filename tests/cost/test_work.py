"""What stages hold, against numbers worked out by hand and against plain loops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.work import IMPOSSIBLE, Footprint, fewest_to_hold, working_bytes
from planner.schedule.schedule import warm_up_depth


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
    footprint = Footprint(
        np.array([weight * 1.0]), np.array([fixed * 1.0]), zero, zero, np.array([saved * 1.0]), zero
    )
    fitting = []
    for replicas in range(1, 20):
        flying = warm_up_depth(replicas, after)
        if footprint.total_bytes(flying, flying)[0] <= memory:
            fitting.append(replicas)
    found = fewest_to_hold(footprint.most_in_flight(memory, stashing=True), np.array([after]))
    assert found == (fitting[0] if fitting else IMPOSSIBLE)


def test_the_peak_is_that_of_the_layer_at_work_when_most_is_there() -> None:
    saved, gradients, workspaces = (
        np.array([10.0, 20.0, 5.0]),
        np.array([1.0, 2.0, 30.0]),
        np.array([50.0, 0.0, 9.0]),
    )
    whole = (np.asarray(n * 1.0) for n in (33, 33, 0, 0, 35, 0, 6))
    footprint = Footprint(
        *whole, *(each[-1] for each in working_bytes(saved, gradients, workspaces))
    )
    # The first layer: its saved 10, its workspace 50, all gradients. The others: 30 + 32, and 35 +
    # 9 + 30.
    peak = max(10 + 50 + 33, 30 + 0 + 32, 35 + 9 + 30)
    assert footprint.total_bytes(1, 1) == 33 + peak
    assert footprint.total_bytes(3, 2) == 2 * 33 + 2 * 35 + peak
    assert footprint.recomputed().total_bytes(3, 2) == 2 * 33 + 3 * 6 + peak
    # Where gradients add up, all are there from the first on, and a layer's twice before they are
    # added.
    peak = max(10 + 50 + 1 + 33, 30 + 0 + 2 + 33, 35 + 9 + 30 + 33)
    assert footprint.divided(4).total_bytes(1, 1) == 33 + peak
    # The last two layers are a stage with another peak, below what is saved and all gradients.
    working, accumulating = (
        each[-1] for each in working_bytes(saved[1:], gradients[1:], np.zeros(2))
    )
    assert (working, accumulating) == (max(20 + 32, 25 + 30) - 25 - 32, 30)
    # A step that works in more than a microbatch takes comes to the gradients, when the microbatch
    # is gone.
    stepping = replace(footprint, updating_bytes=np.array(90.0))
    assert stepping.total_bytes(3, 2) == 2 * 33 + 2 * 35 + 33 + 90
    assert stepping.recomputed().total_bytes(3, 2) == 2 * 33 + 2 * 6 + 33 + max(90, 6 + 60)


def test_in_flight_is_the_published_number() -> None:
    # 7-1: ceil(8 / 7) = 2 and 1; 2-1-1: 2, 2, 1; straight 1-1-1: 3, 2, 1.
    assert [int(warm_up_depth(r, after)) for r, after in [(7, 1), (1, 0)]] == [2, 1]
    assert [int(warm_up_depth(r, after)) for r, after in [(2, 2), (1, 1), (1, 0)]] == [2, 2, 1]
