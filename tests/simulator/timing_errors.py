"""How far the events of a run are from the simulated ones, and the plan whose stages take their
mean times in a run.

A simulation at the plan's stage times shows the error of the prediction. With a second one, at the
run's own mean stage times, what remains is due to messages, waits and jitter.
"""

from collections.abc import Sequence
from statistics import median
from typing import Literal

from planner.analysis.compare_runs import MeanStageTimes
from planner.formats.files import Record
from planner.formats.plan import Plan
from planner.formats.plan_parts import Stage
from planner.formats.timeline import Event, Timeline
from planner.simulator.measured_ratios import computations
from planner.simulator.simulate_plan import costs_of
from planner.simulator.simulation import Simulation

COMPARED = ("forward", "backward", "backward_input", "backward_weight")


class Moment(Record):
    """Start or end of a computation, in both runs."""

    name: str  # as timelines are drawn: "B3.1"
    at: Literal["start", "end"]
    rank: int
    stage: int
    predicted_s: float
    measured_s: float

    @property
    def error_s(self) -> float:
        """Distance between the two."""
        return abs(self.predicted_s - self.measured_s)


class TimingError(Record):
    """Distances between simulated and measured starts and ends, as shares of the measured run's
    length.
    """

    events: int  # forwards and backwards that both runs have
    median_share: float
    p95_share: float  # 95% of the distances are no larger
    worst_share: float
    worst: Moment | None  # None if the runs have no event in common


def timing_error(predicted: Timeline, measured: Timeline) -> TimingError:
    """Compare starts and ends of every forward and backward in two runs of a plan."""
    ours, theirs = _compared(predicted), _compared(measured)
    length = measured.span_s
    moments = [
        Moment(
            name=measured.name_of(found),
            at=at,
            rank=found.rank,
            stage=found.stage,
            predicted_s=getattr(ours[key], f"{at}_s"),
            measured_s=getattr(found, f"{at}_s"),
        )
        for key, found in theirs.items()
        if key in ours and length > 0
        for at in ("start", "end")
    ]
    if not moments:
        return TimingError(events=0, median_share=0.0, p95_share=0.0, worst_share=0.0, worst=None)
    shares = sorted(moment.error_s / length for moment in moments)
    return TimingError(
        events=len(moments) // 2,
        median_share=median(shares),
        p95_share=shares[int(0.95 * (len(shares) - 1))],
        worst_share=shares[-1],
        worst=max(moments, key=lambda moment: moment.error_s),
    )


def with_stage_times(plan: Plan, times: Sequence[MeanStageTimes]) -> Plan:
    """Return the plan with stages that take `times` when simulated."""
    # On a cluster without overlap the simulator adds the processor's time for messages to each
    # stage. Measured times contain it already, and gradient accumulation in the backward, but not
    # the codecs' time.
    nothing = {"forward_s": 0.0, "backward_s": 0.0, "update_s": 0.0, "accumulate_s": 0.0}
    stages = tuple(stage.model_copy(update=nothing) for stage in plan.stages)
    idle = plan.model_copy(
        update={"stages": stages, "cluster": plan.cluster.model_copy(update={"codec_times": ()})}
    )
    timed: list[Stage] = []
    costs = costs_of(idle)
    gather_s = Simulation(costs, 1).communication.gather_s
    for number, (stage, seen, handling) in enumerate(
        zip(plan.stages, times, costs.stages, strict=True)
    ):
        forward_s = max(0.0, seen.forward_s - handling.forward_s)
        share = stage.again_s / stage.forward_s if stage.again_s else 0.0
        recompute_s = share * forward_s  # part of the measured backward
        backward_s = max(0.0, seen.backward_s - recompute_s - handling.backward_s)
        # A worker notes its update and the all-gather after it as one.
        update_s = max(0.0, seen.update_s - gather_s(number))
        own: dict[str, float | tuple[float, ...]]
        own = {
            "forward_s": forward_s,
            "backward_s": backward_s,
            "update_s": update_s,
            "accumulate_s": 0.0,
        }
        if stage.recompute_s is not None:
            own |= {"recompute_s": recompute_s}
            if planned_s := stage.backward_s + stage.late_s:
                # When gradients are ready in a backward, and a recomputation partly within it, of
                # these lengths.
                late_s = recompute_s * stage.late_s / stage.again_s if stage.again_s else 0.0
                own["ready_s"] = tuple(
                    seconds * (backward_s + late_s) / planned_s for seconds in stage.ready_s
                )
        timed.append(stage.model_copy(update=own))
    return plan.model_copy(update={"stages": tuple(timed)})


def _compared(timeline: Timeline) -> dict[tuple[object, ...], Event]:
    return {
        (event.rank, event.kind, event.stage, event.minibatch, event.microbatch): event
        for event in computations(timeline.events.rows())
        if event.kind in COMPARED
    }
