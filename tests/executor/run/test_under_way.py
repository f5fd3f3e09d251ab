"""What is under way to a worker when it evaluates: sent by then at the sender, taken later here."""

from __future__ import annotations

from planner.executor.run.evaluator import MessagesUnderWay, evaluation_points
from planner.schedule.instructions import ReceiveActivation, Unit
from planner.schedule.one_stage import FLUSH, ONE_F_ONE_B
from planner.schedule.schedule import Channel, PipelineShape

CHAIN = ((0,), (1,), (2,))
CHANNELS = (Channel(0, 1), Channel(1, 2))


def test_a_stage_of_1f1b_is_ahead_by_the_difference_of_depths() -> None:
    """F0 F1 F2 B0 U0 | F3 ..., F0 F1 B0 U0 | F2 ..., F0 B0 U0 | F1 ...: one round on each."""
    shape = PipelineShape(CHAIN, CHANNELS, ONE_F_ONE_B)
    of_last = MessagesUnderWay(shape, 2, 0, 20)
    assert of_last.before(2) == [ReceiveActivation(2, Unit(2), 1, 1)]
    assert of_last.before(7) == [ReceiveActivation(2, Unit(7), 1, 1)]
    assert MessagesUnderWay(shape, 1, 0, 20).before(4) == [ReceiveActivation(1, Unit(5), 0, 0)]
    assert MessagesUnderWay(shape, 0, 0, 20).before(4) == []


def test_units_count_from_the_beginning_of_the_segment() -> None:
    shape = PipelineShape(CHAIN, CHANNELS, ONE_F_ONE_B)
    assert MessagesUnderWay(shape, 2, 10, 20).before(12) == [ReceiveActivation(2, Unit(12), 1, 1)]


def test_nothing_is_under_way_where_the_pipeline_drains_nor_at_the_end() -> None:
    drained = PipelineShape(CHAIN, CHANNELS, FLUSH, microbatches=4)
    asynchronous = PipelineShape(((0, 1), (2,)), (Channel(0, 1),), ONE_F_ONE_B)
    for rank in range(3):
        followed = MessagesUnderWay(drained, rank, 0, 9)
        assert all(followed.before(point) == [] for point in evaluation_points(drained, 0, 9, 2))
        assert MessagesUnderWay(asynchronous, rank, 0, 9).before(9) == []
