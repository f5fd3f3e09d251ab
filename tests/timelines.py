"""A run of two workers, worked out by hand."""

from __future__ import annotations

from planner.formats.timeline import Event, Events, LinkUse, MemoryCurve, Timeline
from planner.schedule.one_stage import GPIPE, ONE_F_ONE_B

# F0 1 s, A0 0.5 s, F0 1 s, B0 2 s, G0 0.25 s, B0 2 s, updates of 0.125 s.
EVENTS = (
    Event(0, "forward", 0, 0, 0, 0.0, 1.0),
    Event(0, "send_activation", 0, 0, 0, 1.0, 1.5, 1, 1),
    Event(1, "receive_activation", 1, 0, 0, 1.0, 1.5, 0, 0),
    Event(1, "forward", 1, 0, 0, 1.5, 2.5),
    Event(1, "backward", 1, 0, 0, 2.5, 4.5),
    Event(1, "update", 1, 0, 0, 4.5, 4.625),
    Event(1, "send_gradient", 1, 0, 0, 4.5, 4.75, 0, 0),
    Event(0, "receive_gradient", 0, 0, 0, 4.5, 4.75, 1, 1),
    Event(0, "backward", 0, 0, 0, 4.75, 6.75),
    Event(0, "update", 0, 0, 0, 6.75, 6.875),
)


def by_hand(*more: Event, microbatches: int = 1) -> Timeline:
    """The run, with more events where a test needs them."""
    return Timeline(
        source="simulated",
        model='a "model" <b>&amp;</b> é',
        config="1-1",
        schedule=ONE_F_ONE_B if microbatches == 1 else GPIPE,
        ranks=((0,), (1,)),
        minibatches=1,
        microbatches=microbatches,
        microbatch_size=4,
        events=Events.of((*EVENTS, *more)),
        memory=(MemoryCurve(rank=0, time_s=(0.0, 6.75), held_bytes=(300, 100), limit_bytes=1000),),
        links=(
            LinkUse(
                name="worker 0 sends",
                rank=0,
                bandwidth_bytes_per_s=8.0,
                start_s=(1.0,),
                end_s=(1.5,),
            ),
        ),
    )
