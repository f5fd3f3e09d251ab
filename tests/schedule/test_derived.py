"""Segments of a run: the schedule anew, with later numbers."""

from __future__ import annotations

import pytest

from planner.schedule.derived import segment_stream, segments
from planner.schedule.instructions import AddShared, AllReduce, Forward, Unit, Update
from planner.schedule.schedule import stream
from tests.schedule.test_streams import make_shape


def test_cuts_are_at_multiples_counted_from_the_beginning() -> None:
    assert list(segments(0, 25, 10)) == [(0, 10), (10, 20), (20, 25)]
    assert list(segments(12, 25, 10)) == [(12, 20), (20, 25)]
    assert list(segments(0, 13, 4, 6, None)) == [(0, 4), (4, 6), (6, 8), (8, 12), (12, 13)]
    assert list(segments(3, 7, None)) == [(3, 7)]
    assert list(segments(7, 7, 2)) == []


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "gpipe", "1f1b-flush", "zb-h1"])
def test_a_segment_is_a_run_of_its_own_with_later_numbers(schedule: str) -> None:
    """Also where the replicas do not divide its first minibatch: the first replica begins each
    segment.
    """
    shape = make_shape((2, 1), schedule, 1 if schedule == "1f1b" else 4)
    for stage, ranks in enumerate(shape.ranks):
        for rank in ranks:
            whole = list(stream(shape, stage, rank, 5))
            later = list(segment_stream(shape, stage, rank, 7, 12))
            assert list(segment_stream(shape, stage, rank, 0, 5)) == whole
            assert [type(one) for one in later] == [type(one) for one in whole]
            for one, other in zip(whole, later, strict=True):
                if isinstance(one, (AllReduce, AddShared, Update)):
                    assert isinstance(other, (AllReduce, AddShared, Update))
                    assert other.round == one.round + 7
                else:
                    assert not isinstance(other, (AllReduce, AddShared, Update))
                    assert other.unit == Unit(one.unit.minibatch + 7, one.unit.microbatch)


def test_versions_of_the_weights_are_counted_anew() -> None:
    later = segment_stream(make_shape((1, 1), "2bw", 4), 0, 0, 8, 12)
    assert next(i.version for i in later if isinstance(i, Forward)) == 0
