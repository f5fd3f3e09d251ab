"""Find the steady state of a run, and compute the time per minibatch there without recording events.

Asynchronous pipelines run until they repeat themselves. Under schedules that drain, one minibatch is enough if nothing
is left of it when the next begins. Within a long minibatch the workers soon do the same every few microbatches. Then a
shorter minibatch tells its time: each of the periods that it lacks takes as long as the last one that it has. Where
lengths vary nothing repeats, and all microbatches that the plan is made for are simulated.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from planner.schedule.schedule import PipelineShape
from planner.simulator.pipeline_costs import PipelineCosts
from planner.simulator.simulation import Completions, Simulation

Stop = Callable[[int], bool]  # whether to end a simulation after this many instructions

FEWEST_ASYNCHRONOUS, FEWEST_DIVIDED, FEWEST = 48, 12, 4  # minibatches; the last for synchronous schedules
MOST_PERIODS = 400  # minibatches, if several periods of the round-robin would take more
MOST = 2**17  # minibatches times workers
PERIODS = 4  # of the round-robin over replicas, after which a pipeline may repeat itself
LOOKED_AT = 16  # units that must repeat, at least
REPEATS = 1e-7  # relative difference of times that counts as none
_SAME = 1e-9  # stages whose paces differ by less are equally slow, and the first of them counts
SHORTER = 0.6  # share of a minibatch's microbatches, at most, for a shorter one to be tried in its place


def steady_s(costs: PipelineCosts, stop: Stop | None = None, hopeless_s: float = math.inf) -> float | None:
    """Simulate until the steady state is known, and return its seconds per minibatch; infinite for a deadlock.

    `stop`: told the instructions executed so far after each backward of the first stage, and at the end; if it returns
    True before the steady state is known, the result is None. `hopeless_s`: above it a rough answer does.
    """
    shape, executed = costs.shape, 0
    if costs.terms:
        return _drawn_s(costs, stop)
    if shape.asynchronous or shape.microbatches == 1:
        return _run(costs, steady_minibatches(shape), stop, hopeless_s / shape.microbatches)

    def stop_all(instructions: int) -> bool:
        return stop is not None and stop(executed + instructions)

    depths = tuple(map(shape.in_flight, range(len(shape.ranks))))
    for microbatches in _enough_microbatches(shape):
        # One minibatch, not the first one of a run.
        simulation = Simulation(replace(costs, shape=replace(shape, microbatches=microbatches, depths=depths)), 1)
        simulation.communication.posted = True
        if simulation.run(partial(lambda run: stop_all(run.executed), simulation)) == "ended":
            return None
        executed += simulation.executed
        if (seconds := _extended_s(simulation, shape.microbatches)) is not None:
            return seconds
    return _run(costs, steady_minibatches(shape), stop_all)


def _drawn_s(costs: PipelineCosts, stop: Stop | None) -> float | None:
    """Simulate all drawn microbatches, with others before and after that fill the pipeline."""
    shape = costs.shape
    minibatches = max(FEWEST, math.ceil(len(costs.terms) / shape.microbatches))
    filling = math.ceil(2 * _filling(shape) / shape.microbatches) if shape.asynchronous else 1
    simulation = Simulation(costs, minibatches + 2 * filling)
    end = simulation.run(lambda: stop is not None and stop(simulation.executed))
    if end != "done":
        return math.inf if end == "deadlock" else None
    if stop is not None:
        stop(simulation.executed)
    ends_s, first = sorted(simulation.completed.ends_s[0]), filling * shape.microbatches - 1
    return (ends_s[first + minibatches * shape.microbatches] - ends_s[first]) / minibatches


def _enough_microbatches(shape: PipelineShape) -> list[int]:
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
    return max(filling, period, LOOKED_AT)


def _extended_s(simulation: Simulation, microbatches: int) -> float | None:
    shape = simulation.shape
    if (seconds := simulation.again_s) is None or (more := microbatches - shape.microbatches) == 0:
        return seconds
    filling, period = _filling(shape), math.lcm(*shape.replicas)
    # Forwards repeat themselves to the last; backwards until none of their stage, or of an earlier one, is left.
    forwards = [sorted(ends) for ends in simulation.completed.forwards_s]
    backwards = [sorted(ends)[: shape.microbatches - filling] for ends in simulation.completed.ends_s]
    took_s = forwards[0][-1] - forwards[0][-1 - period]
    for ends in (*forwards, *backwards):
        for at in range(1, _looked_at(filling, period) + 1):
            if abs(ends[-at] - ends[-at - period] - took_s) > REPEATS * took_s:
                return None
    return seconds + more // period * took_s


def _run(costs: PipelineCosts, minibatches: int, stop: Stop | None, hopeless_s: float = math.inf) -> float | None:
    simulation = Simulation(costs, minibatches)
    shape, completed, pace_s = simulation.shape, simulation.completed, list[float]()
    # Looks for repetition once per period, when twice the units in flight have passed, which fill the pipeline.
    filled = 2 * shape.in_flight(0) * shape.replicas[0] if shape.asynchronous else math.inf

    def enough() -> bool:
        stopped, ends_s = stop is not None and stop(simulation.executed), completed.ends_s[0]
        if not stopped and len(ends_s) >= filled and len(ends_s) % completed.period == 0:
            pace_s.extend(() if (found := repeating_s(completed)) is None else (found,))
        if len(ends_s) == 2 * filled and not pace_s:
            seconds = (ends_s[-1] - ends_s[-int(filled)]) / (filled - 1)
            pace_s.extend((seconds,) if seconds > hopeless_s else ())
        return stopped or bool(pace_s)

    end = simulation.run(enough)
    if pace_s:
        return pace_s[0] * shape.microbatches
    if end == "ended":
        return None
    if stop is not None:
        stop(simulation.executed)
    if end == "deadlock":
        return math.inf
    steady = steady_state(completed, minibatches)
    return simulation.latest_s / minibatches if steady is None else steady.seconds_per_minibatch


def steady_minibatches(shape: PipelineShape) -> int:
    if not shape.asynchronous:
        if shape.microbatches == 1:
            return FEWEST * max(len(ranks) for ranks in shape.ranks)
        # With 8 or more microbatches, the last half of fewer minibatches is more than one minibatch already.
        return FEWEST if shape.microbatches < 8 else FEWEST - 1
    # Four times as many as are in flight, and if possible several periods of the round-robin.
    flying = 4 * shape.in_flight(0) * len(shape.ranks[0]) // shape.microbatches
    if shape.microbatches > 1:
        return max(flying, FEWEST_DIVIDED)
    periods = 8 * math.lcm(*(len(ranks) for ranks in shape.ranks))
    return min(max(flying, FEWEST_ASYNCHRONOUS, min(periods, MOST_PERIODS)), MOST // len(shape.first_stages) + 1)


class Steady(NamedTuple):
    """A part of a run between two completions in its middle, whole periods apart."""

    start_s: float
    end_s: float
    seconds_per_minibatch: float


def steady_state(completed: Completions, minibatches: int) -> Steady | None:
    # Replicas finish in turn, but not always in order.
    completed = replace(completed, ends_s=[sorted(ends) for ends in completed.ends_s])
    period = completed.period
    if completed.shape.microbatches == 1 and 8 * period > minibatches:
        # Replicas of different numbers have a long common period. The longest round is a good approximation.
        period = max(completed.shape.replicas)
    slowest: Steady | None = None
    lasts = []
    for stage, ends in enumerate(completed.ends_s):
        count = bisect_right(ends, max(completed.forwards_s[stage])) if completed.shape.asynchronous else len(ends)
        # The first half of the run may still fill the pipeline, and the last eighth may drain it. Completions come in
        # bursts of one period, so the two are whole periods apart.
        first = count // 2
        periods = (count - count // 8 - 1 - first) // period
        lasts.append(first + periods * period if periods > 0 else 0)
        if periods > 0:
            start, end = float(ends[first]), float(ends[lasts[-1]])
            seconds = (end - start) / (lasts[-1] - first) * completed.shape.microbatches
            if slowest is None or seconds > slowest.seconds_per_minibatch * (1 + _SAME):
                slowest = Steady(start, end, seconds)
    if slowest is not None and (exactly := repeating_s(completed, lasts)) is not None:
        return slowest._replace(seconds_per_minibatch=exactly * completed.shape.microbatches)
    return slowest


def repeating_s(completed: Completions, lasts: Sequence[int] | None = None) -> float | None:
    """Return the seconds per unit of a run whose last units all ended as long after those a few periods before.

    `lasts`: per stage, the number of the last unit to look at; by default the last one.
    """
    ends_s = completed.ends_s
    lasts = lasts or [len(ends) - 1 for ends in ends_s]
    for periods in range(1, PERIODS + 1):
        units = periods * completed.period
        looked_at = max(units, LOOKED_AT)
        if min(lasts) < units + looked_at:
            return None
        took_s = ends_s[0][lasts[0]] - ends_s[0][lasts[0] - units]
        if all(
            abs(ends[number] - ends[number - units] - took_s) <= REPEATS * took_s
            for ends, last in zip(ends_s, lasts, strict=True)
            for number in range(last, last - looked_at, -1)
        ):
            return took_s / units
    return None
