"""How long a pipeline takes per minibatch in its steady state: a simulation without a record of its events."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from planner.schedule.streams import PipelineShape
from planner.simulator.engine import Engine
from planner.simulator.steady import Steady, repeating_s, steady_state
from planner.simulator.times import Pipeline, StageTimes

__all__ = ["Outcome", "Pipeline", "StageTimes", "Stop", "simulate", "steady_minibatches", "steady_s"]

Stop = Callable[[int], bool]  # whether to end a simulation after so many instructions

FEWEST_ASYNCHRONOUS, FEWEST_DIVIDED, FEWEST = 48, 12, 4  # minibatches; the last of schedules that drain
MOST_PERIODS = 400  # minibatches, for the sake of whole periods of the round-robin
MOST = 2**17  # minibatches times workers


@dataclass(frozen=True)
class Outcome:
    """A run.

    Attributes:
        deadlocked: the workers came to wait for each other.
        ends_s: when the last stage finished its backwards, in order.
        steady: the part in which the pipeline neither fills nor drains; None where that is too short to tell.
        seconds: of the whole run.
        minibatches: how many.
    """

    deadlocked: bool
    ends_s: tuple[float, ...]
    steady: Steady | None
    seconds: float
    minibatches: int

    @property
    def seconds_per_minibatch(self) -> float:
        """In the steady state where there is one, else of the whole run; infinite for a deadlock."""
        if self.deadlocked:
            return math.inf
        return self.seconds / self.minibatches if self.steady is None else self.steady.seconds_per_minibatch


def simulate(pipeline: Pipeline, minibatches: int) -> Outcome:
    """Run so many minibatches."""
    engine, shape = Engine(pipeline, minibatches), pipeline.shape
    finished = engine.run()
    ends_s = [sorted(ends) for ends in engine.ends_s]
    steady = None
    if finished:
        steady = steady_state(
            ends_s,
            None if not shape.asynchronous else engine.admitted_s,
            shape.ranks,
            shape.microbatches,
            minibatches,
            shape.accumulate,
        )
    return Outcome(not finished, tuple(ends_s[-1]), steady, engine.latest_s, minibatches)


def steady_s(pipeline: Pipeline, stop: Stop | None = None) -> float | None:
    """Seconds per minibatch in the steady state; infinite for a deadlock.

    What `simulate` says of `steady_minibatches`; a pipeline that never drains is watched, and simulated no longer than
    until it repeats itself.

    Args:
        pipeline: what to simulate.
        stop: told of the instructions executed so far whenever the first stage has done a backward, and at the end;
            where it is true before the steady state is known, that is None.
    """
    shape = pipeline.shape
    minibatches = steady_minibatches(shape)
    engine = Engine(pipeline, minibatches)
    watch = _Watch(engine, stop)
    finished = engine.run(watch.ends)
    if watch.seconds_per_unit is not None:
        return watch.seconds_per_unit * shape.microbatches
    if watch.stopped:
        return None
    if stop is not None:
        stop(engine.executed)
    if not finished:
        return math.inf
    ends_s = [sorted(ends) for ends in engine.ends_s]
    admitted_s = engine.admitted_s if shape.asynchronous else None
    steady = steady_state(ends_s, admitted_s, shape.ranks, shape.microbatches, minibatches, shape.accumulate)
    return engine.latest_s / minibatches if steady is None else steady.seconds_per_minibatch


class _Watch:
    """Whether a pipeline that never drains repeats itself: all stages took as long for the last units as before.

    Looked at once in a period of the round-robin, and only when twice as many units as are in flight are through.
    """

    def __init__(self, engine: Engine, stop: Stop | None) -> None:
        shape = engine.shape
        self._engine, self._ends_s, self._stop = engine, engine.ends_s, stop
        self._period = shape.microbatches
        if shape.microbatches == 1:
            self._period = math.lcm(*(len(ranks) for ranks in shape.ranks)) * shape.accumulate
        self._from = 2 * shape.in_flight(0) * len(shape.ranks[0]) if shape.asynchronous else math.inf
        self.seconds_per_unit: float | None = None
        self.stopped = False

    def ends(self) -> bool:
        """Whether there is no need to go on, or no time."""
        if self._stop is not None and self._stop(self._engine.executed):
            self.stopped = True
        return self.stopped or self._repeats()

    def _repeats(self) -> bool:
        through = len(self._ends_s[0])
        if through < self._from or through % self._period:
            return False
        self.seconds_per_unit = repeating_s(self._ends_s, [len(ends) - 1 for ends in self._ends_s], self._period)
        return self.seconds_per_unit is not None


def steady_minibatches(shape: PipelineShape) -> int:
    """As many as show the steady state.

    Four times what is in flight, so that a good part of the run is neither start-up nor drain, and where that is
    possible several periods of the round-robin. A pipeline that drains does the same in every minibatch but the first.
    """
    if not shape.asynchronous:
        if shape.microbatches == 1:
            return FEWEST * max(len(ranks) for ranks in shape.ranks)
        return FEWEST if shape.microbatches < 8 else FEWEST - 1  # the last half of which is more than a minibatch
    first = len(shape.ranks[0])
    flying = 4 * shape.in_flight(0) * first // shape.microbatches
    if shape.microbatches > 1:
        return max(flying, FEWEST_DIVIDED)
    periods = 8 * math.lcm(*(len(ranks) for ranks in shape.ranks)) * shape.accumulate
    workers = len(shape.first_stages)
    return min(max(flying, FEWEST_ASYNCHRONOUS, min(periods, MOST_PERIODS)), MOST // workers + 1)
