"""Simulate a plan: every event of a run, worker by worker and link by link."""

import math
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import cycle
from typing import Any

from planner.arguments import checked
from planner.errors import InputError
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.formats.plan_parts import Shared, Stage
from planner.formats.timeline import Event, Events, Timeline
from planner.plan.lengths import planned_terms
from planner.plan.rank_groups import of_groups
from planner.plan.shape import deadlock, shape_of
from planner.simulator.excerpt import ROUNDS, only_minibatches
from planner.simulator.memory_curves import memory_curves
from planner.simulator.pipeline_costs import PipelineCosts, StageCosts
from planner.simulator.simulation import Simulation
from planner.simulator.steady_time import steady_minibatches, steady_s
from planner.units import counted

_DEEPEST = 2**12  # units in flight: a stage that may have more waits for none of them
FEWEST = 16  # minibatches of a synchronous schedule, by default
_ENOUGH_UNITS = 16_000  # of work, a microbatch at a stage each, that are enough to look at
MOST_UNITS = 2**20  # of work that are simulated: a minute or so, and a gigabyte of events


@checked
def simulate(
    plan: Plan,
    minibatches: int | None = None,
    *,
    time_limit_s: float | None = None,
) -> Timeline:
    """Simulate the instruction streams of training with `plan`, at the plan's times.

    A group of ranks is one worker.

    Args:
        plan: from `solve` or `load_plan`.
        minibatches: to simulate; None for enough to reach a steady state.
        time_limit_s: seconds that it may take; None for as long as it takes.

    Raises:
        InputError: for a number of minibatches below 1, for more work than is simulated, or past
            the time limit.
        PlanError: for a plan whose depths let its workers wait for each other for ever.

    Example:
        >>> profile = planner.load_profile("profiles/vgg16/cpu.json")
        >>> plan = planner.solve(profile, planner.flat_cluster(gpus=4, bandwidth_bytes_per_s=125e6))
        >>> timeline = planner.simulate(plan, minibatches=8)
        >>> timeline.name_of(next(timeline.events.rows()))
        'F0'
    """
    costs = costs_of(plan)
    plan = of_groups(plan)
    count = default_minibatches(plan) if minibatches is None else minibatches
    if count < 1:
        raise InputError(
            f"`minibatches` must be at least 1, got {count}", hint="give `minibatches=1`"
        )

    _check_amount(plan, count)

    events: list[Event] = []
    late = None
    if time_limit_s is not None:
        late = partial(_is_past, time.monotonic() + time_limit_s)
    simulation = Simulation(costs, count, events, late)
    match simulation.run():
        case "deadlock":
            raise deadlock(plan)
        case "late":
            amount = _amount(plan, count)
            raise InputError(
                f"the simulation of {amount} took longer than `time_limit_s={time_limit_s:.3g}`",
                hint="give a longer `time_limit_s`, or simulate fewer minibatches",
            )

    rows = Events.of(events)
    ranks = [rank for stage in plan.stages for rank in stage.ranks]
    return Timeline.of_plan(
        plan,
        "simulated",
        count,
        rows,
        memory=memory_curves(plan, rows.rows()),
        links=tuple(simulation.communication.links.uses(ranks)),
        **_drawn_lengths(plan, count),
    )


def _is_past(ends_at_s: float) -> bool:
    return time.monotonic() > ends_at_s


def _drawn_lengths(plan: Plan, minibatches: int) -> dict[str, Any]:
    """Return the timeline's fields about the lengths of each microbatch, where lengths vary."""
    if plan.lengths is None:
        return {}
    drawn = cycle(plan.lengths.microbatches)
    rows = [
        (minibatch, microbatch, *next(drawn))
        for minibatch in range(minibatches)
        for microbatch in range(plan.microbatches)
    ]
    return {"lengths": tuple(rows), "length_names": plan.lengths.names}


def _amount(plan: Plan, minibatches: int) -> str:
    plural = "es" * (minibatches > 1)
    each = f"{plan.microbatches:,} microbatches at {counted(len(plan.stages), 'stage')}"
    return f"{minibatches:,} minibatch{plural} of {each}"


def _check_amount(plan: Plan, minibatches: int) -> None:
    """Raise InputError for more work than can be simulated, and looked at."""
    units = plan.microbatches * len(plan.stages)  # of each minibatch
    if minibatches * units <= MOST_UNITS:
        return
    hint = f"give `minibatches={MOST_UNITS // units}` or fewer"
    if units > MOST_UNITS:  # a single minibatch is too much
        most = MOST_UNITS // len(plan.stages)
        hint = f"solve with at most `microbatches={most}`, and simulate that plan"

    raise InputError(
        f"{_amount(plan, minibatches)}: {minibatches * units:,} units of work, "
        f"and at most {MOST_UNITS:,} are simulated",
        hint=hint,
    )


def check_runs_to_end(plan: Plan) -> None:
    """Raise PlanError when the plan's streams do not run to their end, as edited ones may not.

    A run that is longer than is simulated is checked by a shorter one, which fills the pipeline and
    drains it likewise.
    """
    costs = costs_of(plan)
    shape = costs.shape
    depth = max(min(stage.in_flight, _DEEPEST) for stage in plan.stages)
    most_replicas = max(shape.replicas)
    period = math.lcm(*shape.replicas, len(shape.first_stages))
    few = shape.shortened(3 * depth * most_replicas + 2 * period)
    minibatches = max(2, 4 * most_replicas * depth // few.microbatches)
    if Simulation(replace(costs, shape=few), minibatches).run() == "deadlock":
        raise deadlock(plan)


def simulated_s(plan: Plan) -> float:
    """Compute the seconds per minibatch of `plan` in the steady state, without events."""
    seconds = steady_s(costs_of(plan))
    assert seconds is not None
    if math.isinf(seconds):
        raise deadlock(plan)
    return seconds


def default_minibatches(plan: Plan) -> int:
    """Return enough minibatches for a steady state, and to see how the run starts and ends."""
    count = steady_minibatches(shape_of(plan))
    if plan.lengths is not None:
        # Each of its microbatches once, while the pipeline is full: see `summarize`.
        filling = plan.microbatches
        if plan.schedule.asynchronous:
            filling = 2 * plan.stages[0].in_flight * plan.stages[0].replicas
        drawn = len(plan.lengths.microbatches)
        count = max(count, math.ceil((drawn + filling) / plan.microbatches))

    units = plan.microbatches * len(plan.stages)  # of each minibatch
    if not plan.schedule.asynchronous:
        count = max(count, min(FEWEST, _ENOUGH_UNITS // units))
    return min(count, max(1, MOST_UNITS // units))


def costs_of(plan: Plan) -> PipelineCosts:
    """Return the plan's pipeline and its costs, as a simulation takes them."""
    groups = of_groups(plan)
    received_bytes = _received_bytes(groups.shared)
    return PipelineCosts.of(
        shape_of(groups),
        groups.cluster,
        [_stage_costs(each, received_bytes[number]) for number, each in enumerate(groups.stages)],
        groups.transfers,
        groups.shared,
        plan.degrees,
        planned_terms(groups.lengths),
    )


def _received_bytes(pairs: Sequence[Shared]) -> Counter[int]:
    """Return the bytes of gradients of weights that each stage shares with earlier ones.

    They are in the stage's memory, but not in its all-reduce.
    """
    received_bytes: Counter[int] = Counter()
    counted_weights: set[tuple[int, str]] = set()
    for shared in pairs:
        stage = shared.stages[1]
        weights = {(stage, name) for name in shared.weights}
        if not weights <= counted_weights:
            received_bytes[stage] += shared.gradient_bytes
        counted_weights |= weights

    return received_bytes


def _stage_costs(stage: Stage, received_bytes: int) -> StageCosts:
    """Return the costs of a stage, without the gradients that it receives from others."""
    gradient_bytes = stage.memory.gradients_bytes - received_bytes
    if stage.shards_gradients:
        gradient_bytes = 0  # all exchanges are in the seconds
    return StageCosts(
        forward_s=stage.forward_s,
        backward_s=stage.backward_s,
        update_s=stage.update_s,
        recompute_s=stage.again_s,
        accumulate_s=stage.accumulate_s,
        weights_s=stage.weights_s,
        ready_s=stage.ready_s,
        ready_shares=stage.ready_shares,
        late_s=stage.late_s,
        gradient_bytes=gradient_bytes,
        sharded=stage.shards_optimizer_alone,
        exchanged=stage.exchanged,
        forward_shares=stage.forward_shares,
        backward_shares=stage.backward_shares,
    )


def simulate_recorded(
    plan: Plan,
    measured: Timeline,
    *,
    time_limit_s: float | None = None,
) -> Timeline:
    """Simulate the minibatches that `measured` has, and as many around as fill the pipeline.

    Minibatches keep their numbers in the run, and time counts from the start of the first of them.

    Raises:
        InputError: for a run without computations.
    """
    recorded = {event.minibatch for event in measured.events.rows() if event.kind == "forward"}
    if not recorded:
        raise InputError(
            "the run has no computations to compare with the simulation",
            hint="record one with `trace`",
        )

    first = min(recorded)
    end = max(recorded) + 1
    filling = default_minibatches(plan)

    # 1. Whole rounds of the round-robin are skipped, so that each minibatch is on the replica that
    # ran it.
    period = math.lcm(*plan.replicas)
    skipped = max(0, first - filling) // period * period
    after = min(max(measured.minibatches - end, 0), filling)
    plan = _with_lengths_of(plan, measured, skipped)
    simulated = simulate(plan, end - skipped + after, time_limit_s=time_limit_s)

    # 2. The minibatches that were recorded, with their numbers in the run.
    part = only_minibatches(simulated, range(first - skipped, end - skipped))
    rows = [_renumbered(event, plan, skipped) for event in part.events.rows()]
    return replace(part, events=Events.of(rows), lengths=measured.lengths)


def _renumbered(event: Event, plan: Plan, skipped: int) -> Event:
    """Return an event with its number in a run, of which so many minibatches were skipped."""
    if event.kind in ROUNDS and plan.microbatches == 1:
        skipped //= plan.stages[event.stage].replicas  # a round under 1f1b has several minibatches
    return event._replace(minibatch=event.minibatch + skipped)


def _with_lengths_of(plan: Plan, run: Timeline, skipped: int) -> Plan:
    """Return the plan for the lengths of a run's microbatches, after the minibatches `skipped`."""
    if plan.lengths is None or not run.lengths:
        return plan
    columns = [run.length_names.index(name) for name in plan.lengths.names]
    lengths_of: dict[int, tuple[int, ...]] = {}
    for minibatch, microbatch, *lengths in run.lengths:
        number = (minibatch - skipped) * plan.microbatches + microbatch
        lengths_of[number] = tuple(lengths[column] for column in columns)

    # Those that the run does not tell are as the plan has them.
    drawn = plan.lengths.microbatches
    rows: list[tuple[int, ...]] = []
    for number in range(max(lengths_of) + 1):
        usual = drawn[number % len(drawn)]
        rows.append(lengths_of.get(number, usual))

    changed = replace(plan.lengths, microbatches=tuple(rows))
    return replace(plan, lengths=changed)
