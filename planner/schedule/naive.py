"""naive: one minibatch at a time passes through the stages and back."""

from __future__ import annotations

from planner.schedule.flush import Flush
from planner.schedule.schedule import Count


class Naive(Flush):
    """Model parallelism without a pipeline, to compare with."""

    name = "naive"
    title = "naive, one minibatch at a time"
    summary = "one minibatch at a time, to compare with"
    updates = "after every minibatch"
    holds = "1: nothing overlaps"
    source = "the baseline of GPipe and PipeDream: one worker computes at a time"
    divides = False
    pipelined = False
    deepens = False
    alternates = False
    torch_name = "ScheduleGPipe"  # of one microbatch

    def in_flight(self, replicas: Count, gpus_after: Count, microbatches: int) -> Count:
        """Return one."""
        return replicas * 0 + 1


NAIVE = Naive()
