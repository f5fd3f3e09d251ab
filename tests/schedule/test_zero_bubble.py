"""zb-h1: its order, its bubble, and what is in flight."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from planner.formats.cluster import flat_cluster
from planner.plan.shape import shape_of
from planner.schedule.instructions import BackwardWeight, Instruction
from planner.schedule.one_stage import ZB_H1
from planner.schedule.schedule import Channel, PipelineShape, stream
from planner.simulator.pipeline_costs import StageCosts
from planner.solver import search_plan as solve
from tests.samples import layer, profile
from tests.schedule.check import ScheduleError, check_streams
from tests.schedule.draw import draw_order
from tests.schedule.test_streams import make_shape
from tests.simulator.pipelines import FREE, run


def test_gradients_of_weights_come_the_later_the_later_the_stage() -> None:
    """As in figure 2 of the paper, but in one part where no worker waits: microbatches 1 and 2 of
    the second stage.

    The first stage has nothing to send and does all at once.
    """
    assert draw_order(make_shape((1, 1, 1), "zb-h1", 5), 1) == [
        "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 F0.4 B0.2 B0.3 B0.4 U0",
        "F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 F0.4 B0.3 W0.0 B0.4 W0.3 W0.4 U0",
        "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3 W0.0 F0.4 B0.4 W0.1 W0.3 W0.4 U0",
    ]


@pytest.mark.parametrize(
    ("workers", "microbatches"), [(2, 4), (2, 16), (4, 8), (4, 12), (4, 32), (8, 16)]
)
def test_the_bubble_is_the_published_one(workers: int, microbatches: int) -> None:
    """(K - 1)(F + B - W) idle per minibatch with free links, where 1f1b-flush has (K - 1)(F + B +
    W).
    """
    seconds = {}
    for schedule in ("zb-h1", "1f1b-flush"):
        shape = make_shape((1,) * workers, schedule, microbatches)
        times = (StageCosts(1.0, 2.0, 0.0),) * workers  # B and W take 1 each
        ends_s = run(shape, times, FREE, 4).ends_s
        seconds[schedule] = (ends_s[-1] - ends_s[microbatches - 1]) / 3
    assert seconds["zb-h1"] == pytest.approx(3 * microbatches + (workers - 1))
    assert seconds["1f1b-flush"] == pytest.approx(3 * microbatches + 3 * (workers - 1))


def test_no_stage_holds_more_than_the_first() -> None:
    shape = make_shape((1,) * 4, "zb-h1", 8)
    assert [shape.in_flight(stage) for stage in range(4)] == [4] * 4
    assert [make_shape((1,) * 4, "zb-h1", 3).in_flight(stage) for stage in range(4)] == [3] * 4


@pytest.mark.parametrize("microbatches", [1, 2, 5, 8])
def test_any_replicas_skips_and_depths_complete(microbatches: int) -> None:
    skips = (Channel(0, 2), Channel(0, 3, gradient=False))
    for replicas in itertools.product(range(1, 4), repeat=4):
        shape = make_shape(replicas, "zb-h1", microbatches, skips)
        check_streams(shape, 3)
        # Memory may leave room for less.
        least = make_shape(replicas, "1f1b-flush", microbatches, skips)
        depths = tuple(least.in_flight(stage) for stage in range(4))
        check_streams(PipelineShape(shape.ranks, shape.channels, ZB_H1, microbatches, depths), 3)


def test_a_stage_that_no_gradient_leaves_has_whole_backwards() -> None:
    shape = PipelineShape(((0,), (1,)), (Channel(0, 1, gradient=False),), ZB_H1, 2)
    assert not any(isinstance(i, BackwardWeight) for i in stream(shape, 1, 1, 2))
    check_streams(shape, 2)


def test_the_checker_finds_a_second_part_without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(
        shape: PipelineShape, stage: int, rank: int, minibatches: int
    ) -> Iterator[Instruction]:
        for instruction in stream(shape, stage, rank, minibatches):
            yield from [instruction] * (2 if isinstance(instruction, BackwardWeight) else 1)

    monkeypatch.setattr("tests.schedule.check.stream", doubled)
    with pytest.raises(ScheduleError, match="without the first part"):
        check_streams(make_shape((1, 1), "zb-h1", 2), 1)


def test_plans_state_their_own_pace_and_memory() -> None:
    """Equal layers and free links: the published time; later stages hold more, as far as memory
    allows.
    """
    model = profile(
        *(
            layer(f"l{i}", 1, 2, output_bytes=1, weight_bytes=10**6, saved_bytes=100, update_s=0)
            for i in range(4)
        )
    )
    cluster = flat_cluster(4, 1e4)
    plan = solve(model, cluster, schedule="zb-h1", microbatches=8)
    assert plan.config == "1-1-1-1"
    assert plan.predicted.seconds_per_minibatch == pytest.approx(3 * 8 + 3, rel=1e-3)
    assert plan.predicted.seconds_per_minibatch >= plan.solver.lower_bound_s
    assert [stage.in_flight for stage in plan.stages] == [4, 4, 4, 4]
    assert [stage.memory.activations_bytes for stage in plan.stages] == [400, 500, 600, 700]
    limit = max(stage.memory.total_bytes for stage in plan.stages) - 150
    tight = solve(model, flat_cluster(4, 1e4, limit), schedule="zb-h1", microbatches=8)
    assert all(stage.memory.total_bytes <= limit for stage in tight.stages)
    assert [stage.in_flight for stage in tight.stages] == [4, 4, 3, 3]
    check_streams(shape_of(tight), 3)
