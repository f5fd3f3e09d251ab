"""Compute the time per minibatch of a pipeline in its steady state, without recording events.

    lengths vary       nothing repeats: simulate all microbatches that the plan is made for
    never drains       run until it repeats itself
    drains             one minibatch, if nothing is left of it when the next begins; else several

Within a long minibatch the workers soon do the same every few microbatches. Then a shorter
minibatch tells its time: each of the periods that it lacks takes as long as the last one that it
has.

    T(m)  =  T(n) + (m - n) / p · t        t = seconds of the last p of n < m microbatches
"""

import math
from collections.abc import Callable, Collection

from planner.formats.files import replace
from planner.schedule.schedule import PipelineShape
from planner.simulator.pipeline_costs import PipelineCosts
from planner.simulator.simulation import Completions, Simulation
from planner.simulator.steady_state import LOOKED_AT, repeating_s, repeats, steady_state

Stop = Callable[[int], bool]  # whether to end a simulation after this many instructions

FEWEST_ASYNCHRONOUS = 48  # minibatches
FEWEST_DIVIDED = 12  # likewise, of several microbatches
FEWEST = 4  # of synchronous schedules
MOST_PERIODS = 400  # minibatches, if several periods of the round-robin would take more
MOST = 2**17  # minibatches times workers
SHORTER = 0.6  # share of a minibatch's microbatches, at most, for a shorter one to be tried


def _go_on(_: int) -> bool:
    return False


def steady_s(
    costs: PipelineCosts,
    stop: Stop = _go_on,
    hopeless_s: float = math.inf,
) -> float | None:
    """Simulate until the steady state is known, and return its seconds per minibatch.

    Args:
        costs: of the pipeline.
        stop: told the instructions executed so far after each backward of the first stage, and at
            the end.
        hopeless_s: above these seconds per minibatch a rough answer does.

    Returns:
        Infinity for a deadlock; None if `stop` returned True before the steady state was known.
    """
    shape = costs.shape
    if costs.terms:
        return _drawn_s(costs, stop)
    if shape.asynchronous or shape.microbatches == 1:
        return _run_s(costs, stop, hopeless_s / shape.microbatches)
    return _drained_s(costs, stop)


def _drawn_s(costs: PipelineCosts, stop: Stop) -> float | None:
    """Simulate all drawn microbatches, with others before and after that fill the pipeline."""
    shape = costs.shape
    minibatches = max(FEWEST, math.ceil(len(costs.terms) / shape.microbatches))
    filling = 1
    if shape.asynchronous:
        filling = math.ceil(2 * _units_in_flight(shape) / shape.microbatches)

    simulation = Simulation(costs, minibatches + 2 * filling)
    match simulation.run(lambda: stop(simulation.executed)):
        case "deadlock":
            return math.inf
        case "ended":
            return None

    stop(simulation.executed)

    ends_s = sorted(simulation.completed.ends_s[0])
    first = filling * shape.microbatches - 1
    last = first + minibatches * shape.microbatches
    return (ends_s[last] - ends_s[first]) / minibatches


def _drained_s(costs: PipelineCosts, stop: Stop) -> float | None:
    """Simulate one minibatch, a short one if that is enough; or several if one is not."""
    microbatches = costs.shape.microbatches
    executed = 0

    def stop_all(instructions: int) -> bool:
        return stop(executed + instructions)

    counts, workers = _enough_work(costs)
    for count in counts:
        simulation = _one_minibatch(costs, count, workers, stop_all)
        if simulation is None:
            return None
        executed += simulation.executed
        seconds = _extended_s(simulation, microbatches)
        if seconds is not None:
            return seconds

    return _run_s(costs, stop_all)


def _one_minibatch(
    costs: PipelineCosts, microbatches: int, workers: Collection[int] | None, stop: Stop
) -> Simulation | None:
    """Simulate a minibatch, not the first one of a run, of so many microbatches on some workers;
    None if stopped.
    """
    shape = costs.shape
    depths = tuple(shape.in_flight(stage) for stage in range(len(shape.ranks)))
    shape = replace(shape, microbatches=microbatches, depths=depths)
    simulation = Simulation(replace(costs, shape=shape), 1, workers=workers)
    simulation.communication.posted = True
    if simulation.run(lambda: stop(simulation.executed)) == "ended":
        return None
    return simulation


def _enough_work(costs: PipelineCosts) -> tuple[list[int], Collection[int] | None]:
    """Return the microbatches of the minibatches to try, and the workers that run them, all if
    None.

    Few replicas of a single stage tell what all do; where each runs many microbatches, a shorter
    minibatch of all may be less work.
    """
    counts = _enough_microbatches(costs.shape)
    workers = unlike_replicas(costs)
    if workers is None:
        return counts, None
    most = costs.shape.microbatches
    if most * len(workers) > counts[0] * costs.shape.replicas[0]:
        return counts, None
    return [most], workers


def unlike_replicas(costs: PipelineCosts) -> Collection[int] | None:
    """Return one replica for each number of microbatches that those of a single stage run; None
    where replicas differ in more.

    Replicas of a single stage wait for nobody before their all-reduce.
    """
    shape = costs.shape
    if len(shape.ranks) > 1 or costs.stages[0].exchanged is not None:
        return None
    units = shape.numbers_of_units(0, 0)
    return dict(zip(units, shape.ranks[0], strict=True)).values()


def _enough_microbatches(shape: PipelineShape) -> list[int]:
    """Return the microbatches of the minibatches to try, the last of which is whole."""
    most = shape.microbatches
    if not shape.schedule.alternates or shape.schedule.chunked:
        return [most]

    filling = _units_in_flight(shape)
    period = math.lcm(*shape.replicas)
    enough = 2 * filling + period + _looked_at(filling, period)
    fewer = enough + (most - enough) % period
    if fewer > SHORTER * most:
        return [most]
    return [fewer, most]


def _units_in_flight(shape: PipelineShape) -> int:
    """Return the most units in flight of a stage, on all its replicas."""
    return max(shape.in_flight(stage) * len(ranks) for stage, ranks in enumerate(shape.ranks))


def _looked_at(filling: int, period: int) -> int:
    return max(filling, period, LOOKED_AT)


def _extended_s(simulation: Simulation, microbatches: int) -> float | None:
    """Return the seconds of a minibatch of so many microbatches, from those of a shorter one.

    None if the workers are not where they began, or do not repeat themselves before the end.
    """
    shape = simulation.shape
    seconds = simulation.again_s
    more = microbatches - shape.microbatches
    if seconds is None or more == 0:
        return seconds

    # 1. Forwards repeat themselves to the last; backwards until none of their stage, or of an
    # earlier one, is left.
    filling = _units_in_flight(shape)
    forwards_s = [sorted(ends) for ends in simulation.completed.forwards_s]
    steady = shape.microbatches - filling
    backwards_s = [sorted(ends)[:steady] for ends in simulation.completed.ends_s]

    # 2. All of them must, by the period of the first stage.
    period = math.lcm(*shape.replicas)
    took_s = forwards_s[0][-1] - forwards_s[0][-1 - period]
    ends_s = [*forwards_s, *backwards_s]
    lasts = [len(ends) - 1 for ends in ends_s]
    if not repeats(ends_s, lasts, period, _looked_at(filling, period), took_s):
        return None
    return seconds + more // period * took_s


def _run_s(costs: PipelineCosts, stop: Stop, hopeless_s: float = math.inf) -> float | None:
    """Simulate minibatches until they repeat themselves, or as many as tell the steady state.

    Above `hopeless_s`, per unit, a rough answer does.
    """
    shape = costs.shape
    minibatches = steady_minibatches(shape)
    simulation = Simulation(costs, minibatches)
    completed = simulation.completed
    # Twice the units in flight fill the pipeline; one that drains repeats itself minibatch by
    # minibatch.
    filling = math.inf
    if shape.asynchronous:
        filling = 2 * shape.in_flight(0) * shape.replicas[0]
    unit_s: float | None = None

    def enough() -> bool:
        nonlocal unit_s
        stopped = stop(simulation.executed)
        if not stopped:
            unit_s = _repeated_s(completed, filling)
        if unit_s is None:
            unit_s = _hopeless_s(completed, filling, hopeless_s)
        return stopped or unit_s is not None

    end = simulation.run(enough)
    if unit_s is not None:
        return unit_s * shape.microbatches
    if end == "ended":
        return None

    stop(simulation.executed)
    if end == "deadlock":
        return math.inf
    steady = steady_state(completed, minibatches)
    if steady is None:
        return simulation.latest_s / minibatches
    return steady.seconds_per_minibatch


def _repeated_s(completed: Completions, filling: float) -> float | None:
    """Return the seconds per unit if the filled pipeline repeats itself; looks once per period."""
    units = len(completed.ends_s[0])
    if units < filling or units % completed.period:
        return None
    return repeating_s(completed)


def _hopeless_s(completed: Completions, filling: float, hopeless_s: float) -> float | None:
    """Return the rough seconds per unit of a pipeline just filled, if above `hopeless_s`."""
    ends_s = completed.ends_s[0]
    if len(ends_s) != 2 * filling:
        return None
    unit_s = (ends_s[-1] - ends_s[-int(filling)]) / (filling - 1)
    return unit_s if unit_s > hopeless_s else None


def steady_minibatches(shape: PipelineShape) -> int:
    """Return how many minibatches tell the steady state."""
    replicas = shape.replicas
    if not shape.asynchronous:
        if shape.microbatches == 1:
            return FEWEST * max(replicas)
        # With 8 or more microbatches, the last half of fewer minibatches is more than one already.
        if shape.microbatches < 8:
            return FEWEST
        return FEWEST - 1

    # Four times as many as are in flight, and if possible several periods of the round-robin.
    flying = 4 * shape.in_flight(0) * replicas[0] // shape.microbatches
    if shape.microbatches > 1:
        return max(flying, FEWEST_DIVIDED)
    periods = min(8 * math.lcm(*replicas), MOST_PERIODS)
    most = MOST // len(shape.first_stages) + 1
    return min(max(flying, FEWEST_ASYNCHRONOUS, periods), most)
