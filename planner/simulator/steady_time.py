"""Compute the time per minibatch of a pipeline in its steady state, without recording events.

Asynchronous pipelines run until they repeat themselves. Under schedules that drain, every minibatch is like the first
one if nothing is left of one when the next begins, so that one is enough. Within a long minibatch the workers soon do
the same every few microbatches, until no forwards are left. Then a shorter minibatch tells the time of the longer one:
each of the periods that it lacks takes as long as the last one that it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from planner.schedule.schedule import PipelineShape
from planner.simulator.pipeline_costs import PipelineCosts
from planner.simulator.simulation import Simulation
from planner.simulator.steady import LOOKED_AT, REPEATS, repeating_s, steady_state

Stop = Callable[[int], bool]  # whether to end a simulation after this many instructions

FEWEST_ASYNCHRONOUS, FEWEST_DIVIDED, FEWEST = 48, 12, 4  # minibatches; the last for synchronous schedules
MOST_PERIODS = 400  # minibatches, if several periods of the round-robin would take more
MOST = 2**17  # minibatches times workers
SHORTER = 0.6  # share of a minibatch's microbatches, at most, for a shorter one to be tried in its place


def steady_s(costs: PipelineCosts, stop: Stop | None = None, hopeless_s: float = math.inf) -> float | None:
    """Simulate until the steady state is known, and return its seconds per minibatch; infinite for a deadlock.

    Args:
        costs: the pipeline.
        stop: told the instructions executed so far after each backward of the first stage, and at the end. If it
            returns True before the steady state is known, the result is None.
        hopeless_s: seconds per minibatch above which a rough answer does: the pace of an asynchronous pipeline right
            after it has filled.
    """
    if costs.shape.asynchronous or costs.shape.microbatches == 1:
        return _run(costs, steady_minibatches(costs.shape), stop, hopeless_s / costs.shape.microbatches)
    executed = 0

    def stop_all(instructions: int) -> bool:
        return stop is not None and stop(executed + instructions)

    shape = costs.shape
    depths = tuple(map(shape.in_flight, range(len(shape.ranks))))
    for microbatches in _enough_microbatches(shape):
        # One minibatch, not the first one of a run.
        fewer = replace(costs, shape=replace(shape, microbatches=microbatches, depths=depths))
        simulation = Simulation(fewer, 1)
        simulation.communication.posted = True
        watch = _Watch(simulation, stop_all)
        simulation.run(watch.may_end)
        if watch.stopped:
            return None
        executed += simulation.executed
        if (seconds := _extended_s(simulation, shape.microbatches)) is not None:
            return seconds
    return _run(costs, steady_minibatches(shape), stop_all)


def _enough_microbatches(shape: PipelineShape) -> list[int]:
    """Return how many microbatches to simulate in place of all of a minibatch, the fewest first."""
    most, period = shape.microbatches, math.lcm(*shape.replicas)
    if not shape.schedule.alternates or shape.schedule.chunked:
        return [most]
    filling = _filling(shape)
    enough = 2 * filling + period + _looked_at(filling, period)
    fewer = enough + (most - enough) % period
    return [fewer, most] if fewer <= SHORTER * most else [most]


def _filling(shape: PipelineShape) -> int:
    return max(shape.in_flight(stage) * len(ranks) for stage, ranks in enumerate(shape.ranks))


def _looked_at(filling: int, period: int) -> int:
    """Return how many microbatches must repeat the period before them, of a pipeline that so many fill."""
    return max(filling, period, LOOKED_AT)


def _extended_s(simulation: Simulation, microbatches: int) -> float | None:
    """Return the seconds of a minibatch of so many microbatches, of which one of fewer was run; None if not known."""
    shape = simulation.shape
    if (seconds := simulation.again_s) is None or (more := microbatches - shape.microbatches) == 0:
        return seconds
    filling, period = _filling(shape), math.lcm(*shape.replicas)
    # Forwards repeat themselves to the last; backwards until none of their stage, or of an earlier one, is left.
    forwards = [sorted(ends) for ends in simulation.forwards_s]
    backwards = [sorted(ends)[: shape.microbatches - filling] for ends in simulation.completed.ends_s]
    took_s = forwards[0][-1] - forwards[0][-1 - period]
    for ends in (*forwards, *backwards):
        for at in range(1, _looked_at(filling, period) + 1):
            if abs(ends[-at] - ends[-at - period] - took_s) > REPEATS * took_s:
                return None
    return seconds + more // period * took_s


def _run(costs: PipelineCosts, minibatches: int, stop: Stop | None, hopeless_s: float = math.inf) -> float | None:
    """Simulate so many minibatches, or fewer if the run repeats itself."""
    simulation = Simulation(costs, minibatches)
    watch = _Watch(simulation, stop, hopeless_s)
    finished = simulation.run(watch.may_end)
    if watch.seconds_per_unit is not None:
        return watch.seconds_per_unit * costs.shape.microbatches
    if watch.stopped:
        return None
    if stop is not None:
        stop(simulation.executed)
    if not finished:
        return math.inf
    steady = steady_state(simulation.completed, minibatches)
    return simulation.latest_s / minibatches if steady is None else steady.seconds_per_minibatch


class _Watch:
    """Ends a simulation that is stopped, or that repeats itself.

    Looks for repetition once per period, and not before twice the units in flight have passed, which fill the pipeline.
    """

    def __init__(self, simulation: Simulation, stop: Stop | None, hopeless_s: float = math.inf) -> None:
        shape, completed = simulation.shape, simulation.completed
        self._simulation, self._completed, self._stop, self._hopeless_s = simulation, completed, stop, hopeless_s
        self._from = 2 * shape.in_flight(0) * completed.replicas[0] if shape.asynchronous else math.inf
        self.seconds_per_unit: float | None = None
        self.stopped = False

    def may_end(self) -> bool:
        """Return whether the simulation may end."""
        if self._stop is not None and self._stop(self._simulation.executed):
            self.stopped = True
        through = len(self._completed.ends_s[0])
        if not self.stopped and through >= self._from and through % self._completed.period == 0:
            self.seconds_per_unit = repeating_s(self._completed)
        if through == 2 * self._from and self.seconds_per_unit is None:
            ends_s, window = self._completed.ends_s[0], int(self._from)
            pace_s = (ends_s[-1] - ends_s[-window]) / (window - 1)
            self.seconds_per_unit = pace_s if pace_s > self._hopeless_s else None
        return self.stopped or self.seconds_per_unit is not None


def steady_minibatches(shape: PipelineShape) -> int:
    """Return how many minibatches show the steady state.

    Four times as many as are in flight, so that a good part of the run is neither start-up nor drain, and if possible
    several periods of the round-robin. A synchronous pipeline does the same in every minibatch but the first.
    """
    if not shape.asynchronous:
        if shape.microbatches == 1:
            return FEWEST * max(len(ranks) for ranks in shape.ranks)
        # With 8 or more microbatches, the last half of fewer minibatches is more than one minibatch already.
        return FEWEST if shape.microbatches < 8 else FEWEST - 1
    flying = 4 * shape.in_flight(0) * len(shape.ranks[0]) // shape.microbatches
    if shape.microbatches > 1:
        return max(flying, FEWEST_DIVIDED)
    periods = 8 * math.lcm(*(len(ranks) for ranks in shape.ranks)) * shape.accumulate
    return min(max(flying, FEWEST_ASYNCHRONOUS, min(periods, MOST_PERIODS)), MOST // len(shape.first_stages) + 1)
