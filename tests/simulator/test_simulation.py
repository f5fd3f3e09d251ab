"""The simulator against pipelines worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from planner.cost.candidate import candidates
from planner.cost.layer_costs import LayerCosts
from planner.cost.pricing import price
from planner.cost.setting import Setting
from planner.formats.cluster import flat_cluster
from planner.formats.timeline import Event
from planner.schedule.one_stage import ONE_F_ONE_B
from planner.schedule.registry import find
from planner.schedule.schedule import PipelineShape
from planner.simulator.pipeline_costs import StageCosts
from planner.simulator.simulation import Simulation
from tests.samples import layer, profile
from tests.schedule.test_streams import make_shape
from tests.simulator.pipelines import FREE, TransferTimes, pipeline, run


def equal_stages(
    shape: PipelineShape, transfer: TransferTimes
) -> tuple[tuple[StageCosts, ...], TransferTimes]:
    """Every worker busy for one second per minibatch: 1 s of forward, 2 s of backward per replica
    and its share.
    """
    stages = tuple(StageCosts(len(ranks) / 3, 2 * len(ranks) / 3, 0.0) for ranks in shape.ranks)
    return stages, transfer


def test_one_stage_takes_its_own_time() -> None:
    outcome = run(make_shape((1,), "1f1b"), (StageCosts(1.0, 2.0, 0.5),), {}, 10)
    assert outcome.ends_s == tuple(3.0 + 3.5 * i for i in range(10))
    assert outcome.seconds_per_minibatch == pytest.approx(3.5)


def test_one_microbatch_adds_everything_up() -> None:
    """F0 1, send 0.25, F1 1, B1 2, send 0.5, B0 2, update 0.125; stage 1's update hides behind
    stage 0's work.
    """
    shape = make_shape((1, 1), "1f1b-flush")
    stage = StageCosts(1.0, 2.0, 0.125)
    outcome = run(shape, (stage, stage), {(0, 1): TransferTimes(0.25, 0.5)}, 20)
    assert outcome.seconds_per_minibatch == pytest.approx(1 + 0.25 + 1 + 2 + 0.5 + 2 + 0.125)


def test_gpipe_takes_the_published_number_of_slots() -> None:
    """(M + K - 1) slots of forward and of backward per minibatch (GPipe, section 2.3)."""
    shape = make_shape((1, 1, 1), "gpipe", 4)
    outcome = run(shape, (StageCosts(1.0, 2.0, 0.0),) * 3, FREE, 10)
    starts = outcome.ends_s[::4]
    assert [later - earlier for earlier, later in pairwise(starts)] == [
        pytest.approx((4 + 3 - 1) * 3.0)
    ] * 9


def test_flush_has_the_same_bubble_as_gpipe() -> None:
    stages = (StageCosts(1.0, 2.0, 0.0),) * 3
    transfers = FREE
    ends = [
        run(make_shape((1, 1, 1), schedule, 6), stages, transfers, 5).ends_s[-1]
        for schedule in ("gpipe", "1f1b-flush")
    ]
    assert ends[0] == pytest.approx(ends[1])


def test_all_backwards_of_a_minibatch_but_the_first_add_to_gradients() -> None:
    outcome = run(
        make_shape((1,), "1f1b-flush", 3), (StageCosts(1.0, 2.0, 0.5, accumulate_s=0.25),), {}, 2
    )
    # With one in flight F B F B F B U: backwards of 2, 2.25 and 2.25 s, and after the update again.
    assert outcome.ends_s == (3.0, 6.25, 9.5, 13.0, 16.25, 19.5)


def test_gradients_are_added_in_the_part_of_a_backward_that_is_for_the_weights() -> None:
    """Two stages with four microbatches: what the first waits for comes as if nothing was added."""
    shape, plain = make_shape((1, 1), "zb-h1", 4), StageCosts(1.0, 2.0, 0.0)
    events: list[Event] = []
    stages = (plain, replace(plain, accumulate_s=0.25))
    assert Simulation(pipeline(shape, stages), 1, events).run() == "done"
    seconds: dict[str, list[float]] = {}
    for event in sorted(events, key=lambda event: event.start_s):
        if event.stage == 1:
            seconds.setdefault(event.kind, []).append(event.end_s - event.start_s)
    assert set(seconds["backward_input"]) == {1.0}
    # Those of 2 s are whole, those of 1 s the second parts; the first to have gradients adds
    # nothing.
    assert sorted(seconds.get("backward", []) + seconds["backward_weight"])[-1] in (1.25, 2.25)
    weights = seconds.get("backward", []) + seconds["backward_weight"]
    assert len(weights) == 4
    assert sum(weights) + sum(seconds["backward_input"]) == pytest.approx(4 * 2.0 + 3 * 0.25)


def test_an_all_reduce_hides_behind_a_backward_that_adds() -> None:
    """Two replicas with three microbatches: the one with two of them ends last, with a backward of
    2.5 s.
    """
    shape = make_shape((2,), "gpipe", 3)
    outcome = run(shape, (StageCosts(1.0, 2.0, 0.0, accumulate_s=0.5),), {}, 4, [1.2])
    assert outcome.seconds_per_minibatch == pytest.approx(2 * 1.0 + 2.0 + 2.5 + 1.2 / 6)


def test_asynchronous_1f1b_with_free_links_keeps_every_worker_busy() -> None:
    for replicas in [(1, 1), (1, 1, 1, 1), (3, 1), (7, 1), (15, 1)]:
        shape = make_shape(replicas, "1f1b")
        outcome = run(shape, *equal_stages(shape, FREE), 200)
        assert outcome.seconds_per_minibatch == pytest.approx(1.0), replicas


def test_with_the_published_depth_a_transfer_is_waited_for() -> None:
    """Two equal stages, two in flight: the loop F0 x F1 B1 x B0 takes 2 + 2x and holds two
    minibatches.
    """
    shape = make_shape((1, 1), "1f1b")
    for x in (0.1, 0.4):
        outcome = run(shape, *equal_stages(shape, TransferTimes(x, x)), 400)
        assert outcome.seconds_per_minibatch == pytest.approx(1 + x, rel=0.01)


def test_a_link_slower_than_the_stages_sets_the_pace() -> None:
    """Activations and gradients leave stage 1's two neighbours by different links; stage 0's
    carries 3 s each way.
    """
    shape = PipelineShape(
        ((0,), (1,)), make_shape((1, 1), "1f1b").channels, ONE_F_ONE_B, depths=(6, 1)
    )
    outcome = run(shape, *equal_stages(shape, TransferTimes(3.0, 3.0)), 200)
    assert outcome.seconds_per_minibatch == pytest.approx(3.0, rel=0.01)


def test_an_all_reduce_hides_behind_its_backward_but_for_the_last_bucket() -> None:
    shape = make_shape((2,), "1f1b")
    for all_reduce_s, expected in ((1.2, 3.2), (6.0, 1 + 2 / 6 + 6.0)):
        outcome = run(shape, (StageCosts(1.0, 2.0, 0.0),), {}, 40, [all_reduce_s])
        assert outcome.seconds_per_minibatch == pytest.approx(expected / 2)


def test_a_deadlock_is_reported_not_timed() -> None:
    shape = PipelineShape(
        ((0,), (1, 2)), make_shape((1, 2), "1f1b").channels, ONE_F_ONE_B, depths=(1, 2)
    )
    outcome = run(shape, *equal_stages(shape, FREE), 10)
    assert outcome.deadlocked
    assert outcome.seconds_per_minibatch == float("inf")


def drained(
    schedule: str, microbatches: int, times: list[tuple[float, float]]
) -> tuple[float, float]:
    """Seconds per minibatch of stages with these forward and backward times and free links: priced
    and simulated.
    """
    layers = [
        layer(f"l{i}", forward_s, backward_s) for i, (forward_s, backward_s) in enumerate(times)
    ]
    stages = candidates([[i] for i in range(len(times))], [1] * len(times))
    priced = price(
        LayerCosts(profile(*layers)),
        stages,
        Setting(flat_cluster(len(times), 1.0), find(schedule), microbatches),
    )
    shape = make_shape((1,) * len(times), schedule, microbatches)
    outcome = run(shape, tuple(StageCosts(f, b, 0.0) for f, b in times), FREE, 3)
    ends = outcome.ends_s[microbatches - 1 :: microbatches]
    return priced.seconds_per_minibatch, (ends[-1] - ends[0]) / 2


def test_the_formula_of_gpipe_is_what_its_streams_take_where_backwards_are_alike() -> None:
    """The sum and the rest of the slowest, if the slowest stage is that both ways; otherwise it is
    too optimistic.
    """
    rng = np.random.default_rng(0)
    for _ in range(100):
        microbatches, forward_s = (
            int(rng.integers(1, 13)),
            rng.uniform(0.5, 1.5, int(rng.integers(1, 5))),
        )
        priced, simulated = drained("gpipe", microbatches, [(f, 2 * f) for f in forward_s.tolist()])
        assert simulated == pytest.approx(priced)
        backward_s = rng.uniform(1, 3, len(forward_s))
        priced, simulated = drained(
            "gpipe", microbatches, list(zip(forward_s.tolist(), backward_s.tolist(), strict=True))
        )
        assert priced * (1 - 1e-9) <= simulated <= 1.25 * priced


def test_the_streams_of_flush_take_no_longer_than_its_formula() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        microbatches, stages = int(rng.integers(1, 13)), int(rng.integers(1, 5))
        times = list(
            zip(
                rng.uniform(0.5, 1.5, stages).tolist(),
                rng.uniform(1, 3, stages).tolist(),
                strict=True,
            )
        )
        priced, simulated = drained("1f1b-flush", microbatches, times)
        assert 0.8 * priced <= simulated <= priced * (1 + 1e-9)
        priced, simulated = drained("1f1b-flush", microbatches, [(1.0, 2.0)] * stages)
        assert simulated == pytest.approx(priced)
