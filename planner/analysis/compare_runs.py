"""Compare a measured run with the simulation of its minibatches: paces, bubbles, and the mean times
of stages.

Where the stages' times agree and the paces do not, the difference is in messages, in waits, or in
an uneven run.
"""

from collections import defaultdict

from planner.errors import InputError
from planner.formats.files import Record
from planner.formats.timeline import Timeline
from planner.simulator.measured_ratios import computations
from planner.simulator.summary import Summary, summarize


class MeanStageTimes(Record):
    """Mean seconds of one stage's computations, 0 for none; a backward includes the recomputation
    before it.
    """

    forward_s: float
    backward_s: float
    update_s: float


class StageComparison(Record):
    """Mean stage times, simulated and measured."""

    simulated: MeanStageTimes
    measured: MeanStageTimes


class RunComparison(Record):
    """A simulation and a measured run of the same minibatches."""

    simulated: Summary
    measured: Summary
    stages: tuple[StageComparison, ...]


def compare_runs(simulated: Timeline, measured: Timeline) -> RunComparison:
    """Compare a run with what `simulate_recorded` returns for it; raise InputError if it is of
    another plan.
    """
    check_same_run(simulated, measured)
    times = zip(mean_stage_times(simulated), mean_stage_times(measured), strict=True)
    return RunComparison(
        simulated=summarize(simulated),
        measured=summarize(measured),
        stages=tuple(StageComparison(simulated=one, measured=other) for one, other in times),
    )


def check_same_run(simulated: Timeline, measured: Timeline) -> None:
    """Raise InputError if a run is of another plan than the simulated one."""
    for field in ("config", "schedule", "ranks", "microbatches"):
        expected = getattr(simulated, field)
        found = getattr(measured, field)
        if expected != found:
            raise InputError(
                f"the run is of another plan: its {field} '{found}' is not the plan's '{expected}'",
                hint="give the `plan` that was run",
            )


def mean_stage_times(timeline: Timeline) -> list[MeanStageTimes]:
    """Average each stage's forwards, backwards and updates over a run."""
    seconds: defaultdict[tuple[int, str], float] = defaultdict(float)
    counts: defaultdict[tuple[int, str], int] = defaultdict(int)
    for event in computations(timeline.events.rows()):
        # The two parts of a split backward count as one backward, so only the first part is
        # counted.
        kind = event.kind.partition("_")[0]
        seconds[event.stage, kind] += event.end_s - event.start_s
        counts[event.stage, kind] += event.kind != "backward_weight"

    def mean_s(stage: int, kind: str) -> float:
        return seconds[stage, kind] / max(1, counts[stage, kind])

    return [
        MeanStageTimes(
            forward_s=mean_s(stage, "forward"),
            backward_s=mean_s(stage, "backward"),
            update_s=mean_s(stage, "update"),
        )
        for stage in range(len(timeline.ranks))
    ]
