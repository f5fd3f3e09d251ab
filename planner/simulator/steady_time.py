"""Compute the time per minibatch of a pipeline in its steady state, without recording events."""

from __future__ import annotations

import math
from collections.abc import Callable

from planner.schedule.schedule import PipelineShape
from planner.simulator.pipeline_costs import PipelineCosts
from planner.simulator.simulation import Simulation
from planner.simulator.steady import repeating_s, steady_state

Stop = Callable[[int], bool]  # whether to end a simulation after this many instructions

FEWEST_ASYNCHRONOUS, FEWEST_DIVIDED, FEWEST = 48, 12, 4  # minibatches; the last for synchronous schedules
MOST_PERIODS = 400  # minibatches, if several periods of the round-robin would take more
MOST = 2**17  # minibatches times workers


def steady_s(costs: PipelineCosts, stop: Stop | None = None) -> float | None:
    """Simulate until the steady state is known, and return its seconds per minibatch; infinite for a deadlock.

    An asynchronous pipeline ends as soon as it repeats itself. Other runs have `steady_minibatches`.

    Args:
        costs: the pipeline.
        stop: told the instructions executed so far after each backward of the first stage, and at the end. If it
            returns True before the steady state is known, the result is None.
    """
    minibatches = steady_minibatches(costs.shape)
    simulation = Simulation(costs, minibatches)
    watch = _Watch(simulation, stop)
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

    def __init__(self, simulation: Simulation, stop: Stop | None) -> None:
        shape, completed = simulation.shape, simulation.completed
        self._simulation, self._completed, self._stop = simulation, completed, stop
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
