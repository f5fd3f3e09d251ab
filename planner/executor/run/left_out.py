"""A worker that its plan leaves out measures its device, and all else it does is to wait.

Its process stays. It has no stage, so it trains nothing and writes no part of a checkpoint; it
meets the others where all workers meet. Once in half a window it tells worker 0

    ratio = median seconds of a microbatch in a stage / those that the plan expects of its device

so that the run sees when the device has recovered. The stage is the cheapest of the plan, forward
and backward on an example batch. Its weights are those of the start of the run, and nobody sees
what it computes.
"""

import time
from statistics import median

from planner.executor.run.context import PipelineContext
from planner.model.stage.stage import warm_up
from planner.plan.left_out import expected_s
from planner.runtime import runtime_of

_TIMES = 5
_MOST_S = 0.5  # of a measurement, for which a move may have to wait; once it is made at least


class IdleDevice:
    """Measures the device of a worker that has no stage."""

    def __init__(self, context: PipelineContext) -> None:
        assert context.measured is not None
        self._module = context.measured
        self._expected_s = expected_s(context.plan, context.rank)
        self._compute = context.place.compute
        self._heartbeat = context.heartbeat
        self._batch = context.spec.example_batch(context.microbatch_size).to(self._compute)
        self._once_s()  # takes memory, and may compile

    def ratio(self) -> float:
        """Measure the seconds of a microbatch, relative to what the plan expects."""
        self._heartbeat.enter("measuring its device")
        measured_s = [self._once_s()]
        while len(measured_s) < _TIMES and sum(measured_s) < _MOST_S:
            measured_s.append(self._once_s())
        return median(measured_s) / self._expected_s

    def _once_s(self) -> float:
        runtime = runtime_of(self._compute)
        with runtime.random_state_kept(self._compute):
            began_s = time.perf_counter()
            warm_up(self._module, self._batch)
            runtime.synchronize(self._compute)
            return time.perf_counter() - began_s
