"""How far apart two runs are, worked out by hand."""

from __future__ import annotations

import pytest

from planner.analysis.deviation import Moment, StageSeconds, deviation, mean_seconds
from planner.errors import InputError
from planner.formats.timeline import Event, Events, Timeline
from tests.timelines import EVENTS, by_hand


def changed(*events: Event) -> Timeline:
    """The run by hand with other events."""
    return by_hand().model_copy(update={"source": "measured", "events": Events.of(events)})


def test_distances_are_shares_of_the_measured_run() -> None:
    # The backward of stage 1 takes 1 s more, and all after it is as much later; the run now ends at 7.875 s.
    later = [e if e.start_s < 4.5 else e._replace(start_s=e.start_s + 1, end_s=e.end_s + 1) for e in EVENTS]
    later[4] = later[4]._replace(end_s=5.5)
    apart = deviation(by_hand(), changed(*later))
    assert apart.events == 4
    # Of eight starts and ends five are where they were, and three a second later.
    assert apart.median_share == 0
    assert apart.worst_share == apart.p95_share == pytest.approx(1 / 7.875)
    assert apart.worst is not None
    assert apart.worst.name in ("B0",)
    assert deviation(by_hand(), by_hand()).worst_share == 0


def test_the_worst_is_named() -> None:
    late = EVENTS[3]._replace(start_s=2.0)
    found = deviation(by_hand(), changed(*EVENTS[:3], late, *EVENTS[4:]))
    assert found.worst == Moment(name="F0", at="start", rank=1, stage=1, predicted_s=1.5, measured_s=2.0)
    assert found.worst_share == pytest.approx(0.5 / 6.875)
    nothing = deviation(by_hand(), changed())
    assert (nothing.events, nothing.worst_share, nothing.worst) == (0, 0.0, None)


def test_another_plan_is_refused() -> None:
    with pytest.raises(InputError, match="its config '2-1' is not the plan's '1-1'"):
        deviation(by_hand(), by_hand().model_copy(update={"config": "2-1"}))


def test_a_backward_begins_with_the_forward_that_runs_again() -> None:
    """A worker notes both as one; the simulator draws two."""
    first = EVENTS[8]
    apart_of = [first._replace(kind="recompute", end_s=5.75), first._replace(start_s=5.75)]
    assert deviation(by_hand().model_copy(update={"events": Events.of([*EVENTS[:8], *apart_of])}), by_hand()) == (
        deviation(by_hand(), by_hand())
    )
    means = mean_seconds(changed(*EVENTS[:8], *apart_of, EVENTS[9]))
    assert means == mean_seconds(by_hand())
    assert means[0] == StageSeconds(forward_s=1.0, backward_s=2.0, update_s=0.125)


def test_both_parts_of_a_backward_count_as_one() -> None:
    parts = [
        EVENTS[8]._replace(kind="backward_input", end_s=6.0),
        EVENTS[8]._replace(kind="backward_weight", start_s=6.25),
    ]
    assert mean_seconds(changed(*EVENTS[:8], *parts))[0] == StageSeconds(forward_s=1.0, backward_s=1.75, update_s=0.0)
