"""Which usual ways are simpler than an estimated plan, and as fast as estimates can tell.

Measured runs of a kind of estimate lie in an interval around the predicted speed. Where the
intervals of two plans overlap by most, who runs both cannot expect the first to be the faster one,
and the simpler one is the better answer: it has none of a pipeline, divided layers, sharding and
recomputation that the other has not, and lacks one of them.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from planner.formats.plan import Plan
from planner.plan.confidence import Interval
from planner.solver.alternatives.usual_ways import Way
from planner.solver.tuning.record import Tuning


class StageTraits(Protocol):
    """What makes a stage less simple than a replica of the model on each GPU."""

    @property
    def divides_layers(self) -> bool: ...
    @property
    def shards_optimizer(self) -> bool: ...
    @property
    def shards_gradients(self) -> bool: ...
    @property
    def recomputes(self) -> bool: ...


def indistinct_share(plan: Plan, tuning: Tuning) -> float:
    """Return the share of its speed by which another plan may be slower and not be told apart; 0
    where the plan is measured.
    """
    interval = plan.predicted.speed_interval
    if interval is None:
        return 0.0

    share = 1 - Interval(*interval).equal_speed(tuning.answer.equal_overlap)
    return min(share, tuning.answer.most_for_simplicity)


def simplest_equal_ways(plan: Plan, ways: Iterable[Way], tuning: Tuning) -> list[Way]:
    """Return the simplest of the ways that are simpler than the plan, and are not told apart from
    it by their speed; none where the plan is measured.
    """
    predicted = plan.predicted
    if predicted.speed_interval is None or predicted.by != "simulation":
        return []
    microbatch_s = predicted.seconds_per_minibatch / plan.microbatches
    longest_s = microbatch_s / (1 - indistinct_share(plan, tuning))
    plan_traits = _traits(plan.stages)

    # By the number of their traits.
    equal: dict[int, list[Way]] = {}
    for way in ways:
        if way.problem.schedule is not plan.schedule or not way.plan.simulated:
            continue
        traits = _traits([stage.options for stage in way.plan.stages])
        if way.seconds_per_microbatch <= longest_s and traits < plan_traits:
            equal.setdefault(len(traits), []).append(way)

    if not equal:
        return []
    return equal[min(equal)]


def _traits(stages: Sequence[StageTraits]) -> frozenset[str]:
    found = {
        "pipeline": len(stages) > 1,
        "sharded layers": any(stage.divides_layers for stage in stages),
        "sharded optimizer": any(stage.shards_optimizer for stage in stages),
        "sharded gradients": any(stage.shards_gradients for stage in stages),
        "recomputation": any(stage.recomputes for stage in stages),
    }
    return frozenset(name for name, present in found.items() if present)
