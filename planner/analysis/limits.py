"""What limits a plan: the busiest resource of its simulation, and how long its workers are idle.

The cost model's bottleneck leaves waiting out, and may be busy for longer than the simulated
minibatch takes: it is for the search. People are shown what the simulation that predicted the time
says.
"""

from contextlib import suppress
from dataclasses import dataclass

from planner.errors import PlannerError
from planner.formats.plan import Plan
from planner.simulator.simulate_plan import default_minibatches, simulate
from planner.simulator.summary import Summary, summarize
from planner.solver.tuning.answers import ExplanationTuning
from planner.solver.tuning.record import STANDARD


@dataclass(frozen=True)
class Limits:
    """What a simulation says of a plan.

    Attributes:
        place: the busiest resource, such as "the computation of stage 1".
        share: of the time that it is busy.
        bubble: share of the workers' time without computation.
    """

    place: str
    share: float
    bubble: float


def simulated_limits(
    plan: Plan,
    tuning: ExplanationTuning = STANDARD.explanation,
) -> Limits | None:
    """Return what a plan's simulation says; None where its time is not simulated, or that would
    take too long.
    """
    units = default_minibatches(plan) * plan.microbatches * len(plan.stages)
    if plan.predicted.by != "simulation" or units > tuning.most_units:
        return None

    # a plan that was edited may not run to its end; its tables are shown all the same
    with suppress(PlannerError):
        summary = summarize(simulate(plan))
        place, share = busiest(summary)
        return Limits(place, share, summary.bubble_share)

    return None


def busiest(summary: Summary) -> tuple[str, float]:
    """Return the resource with the largest share of the time, named by its stage, and that
    share.
    """
    uses = list[tuple[str, float]]()
    for worker in summary.workers:
        stages = stages_words(worker.stages)
        uses.append((f"the computation of {stages}", worker.compute_share))

    for worker in summary.workers:
        stages = stages_words(worker.stages)
        uses.append((f"the link of {stages}, sending", worker.send_share))
        uses.append((f"the link of {stages}, receiving", worker.receive_share))

    uses += [(f"the link that {link.name}", link.busy_share) for link in summary.shared_links]
    return max(uses, key=lambda use: round(use[1], 6))  # of equal ones the first


def stages_words(stages: tuple[int, ...]) -> str:
    """Write the stages of a worker: "stage 1", "stages 0 and 4"."""
    if len(stages) == 1:
        return f"stage {stages[0]}"
    *first, last = map(str, stages)
    return f"stages {', '.join(first)} and {last}"
