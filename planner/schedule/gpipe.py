"""gpipe: all forwards of a minibatch, then all its backwards."""

from __future__ import annotations

from planner.schedule.double_buffered import TWO_BW
from planner.schedule.flush import FLUSH, Flush, share
from planner.schedule.schedule import Count, Schedule


class GPipe(Flush):
    """1F1B whose warm-up is the whole minibatch: no backward begins before the last forward."""

    name = "gpipe"
    title = "gpipe, {microbatches} microbatches per minibatch"
    summary = "synchronous, all forwards of a minibatch before its backwards"
    updates = "after all microbatches of a minibatch"
    holds = "all microbatches of the minibatch"
    source = "Huang et al., GPipe, NeurIPS 2019, section 2.3"
    deepens = False
    alternates = False
    torch_name = "ScheduleGPipe"

    @property
    def leaner(self) -> tuple[Schedule, ...]:
        return TWO_BW, FLUSH

    def in_flight(self, replicas: Count, gpus_after: Count, microbatches: int) -> Count:
        """Return the replica's share of the microbatches."""
        return share(microbatches, replicas)


GPIPE = GPipe()
