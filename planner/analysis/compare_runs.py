"""A run laid over its simulation: how far apart they are, and whether that is the stages' times or the schedule."""

from __future__ import annotations

from collections.abc import Sequence

from planner.analysis.deviation import Deviation, StageSeconds, deviation, mean_seconds
from planner.formats.files import Record
from planner.formats.plan import Plan
from planner.formats.timeline import Timeline
from planner.simulator.beside import simulate_beside
from planner.simulator.plan import pipeline_of
from planner.simulator.summary import Summary, summarize


class StageBeside(Record):
    """Mean seconds of a stage's computations, simulated and measured."""

    simulated: StageSeconds
    measured: StageSeconds


class Against(Record):
    """A simulation and a run of the same minibatches.

    `as_planned` is how far the simulation lies from the run: the prediction. `as_run` is the same of a simulation whose
    stages take what they took on average in the run: what is left is not the stages' times, but messages, waits and how
    evenly the stages ran.
    """

    simulated: Summary
    measured: Summary
    as_planned: Deviation
    as_run: Deviation
    stages: tuple[StageBeside, ...]


def lay_over(plan: Plan, simulated: Timeline, measured: Timeline) -> Against:
    """Compare a run with the simulation of its minibatches.

    Args:
        plan: that was run.
        simulated: what `simulate_beside` gives for the two others.
        measured: the run.

    Raises:
        InputError: when the run is one of another plan.
    """
    as_planned = deviation(simulated, measured)
    planned, found = mean_seconds(simulated), mean_seconds(measured)
    own = simulate_beside(with_times(plan, found), measured)
    return Against(
        simulated=summarize(simulated),
        measured=summarize(measured),
        as_planned=as_planned,
        as_run=deviation(own, measured),
        stages=tuple(StageBeside(simulated=one, measured=other) for one, other in zip(planned, found, strict=True)),
    )


def with_times(plan: Plan, times: Sequence[StageSeconds]) -> Plan:
    """The plan whose stages compute for so long as was seen, what messages cost the processor included."""
    # What adding up gradients takes is within the mean backward that was seen.
    nothing = {"forward_s": 0.0, "backward_s": 0.0, "update_s": 0.0, "accumulate_s": 0.0}
    idle = plan.model_copy(update={"stages": tuple(stage.model_copy(update=nothing) for stage in plan.stages)})
    stages = []
    for stage, seen, handling in zip(plan.stages, times, pipeline_of(idle).stages, strict=True):
        forward_s = max(0.0, seen.forward_s - handling.forward_s)
        again_s = forward_s if stage.recompute else 0.0  # is within the backward that was seen
        backward_s = max(0.0, seen.backward_s - again_s - handling.backward_s)
        own = {"forward_s": forward_s, "backward_s": backward_s, "update_s": seen.update_s, "accumulate_s": 0.0}
        stages.append(stage.model_copy(update=own))
    return plan.model_copy(update={"stages": tuple(stages)})
