"""The stages of a plan with other cuts, for devices and links that have changed: no worker is left
idle, and each keeps its place.

A steepest descent: of all moves of 1, 2, 4, ... layers over one boundary, and of one over both of a
stage's, the one that makes the simulated plan fastest, until none does. It may miss the best cut.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise, product

from planner.analysis.given_plan import GivenPlan, priced_plan
from planner.cost.candidate import Candidate
from planner.formats.cluster import Cluster
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.solver.clock import Clock
from planner.solver.problem.states import uncut_groups

Group = Sequence[int]  # layers that no cut may part
Cut = Sequence[Sequence[Group]]  # groups of each stage


def recut(profile: Profile, plan: Plan, cluster: Cluster, clock: Clock) -> Plan:
    """Return the fastest plan that was found with the stages and workers of `plan` on a cluster;
    `plan` itself, priced there, where no other cut is faster or the clock has passed.

    Raises:
        PlanError: for another profile.
    """
    given = GivenPlan.of(profile, replace(plan, cluster=cluster), Clock())
    best = priced_plan(given.request, given.stages)
    cut = _cut_of(given)
    while cut is not None:
        found = best
        next_cut = None
        for other in _neighbours(cut):
            if clock.passed:
                return found
            priced = priced_plan(given.request, with_cut(given.stages, other))
            if _seconds(priced) < _seconds(found) and priced.fits:
                found = priced
                next_cut = other

        best = found
        cut = next_cut

    return best


def _seconds(plan: Plan) -> float:
    return plan.predicted.seconds_per_minibatch


def _cut_of(given: GivenPlan) -> Cut | None:
    """Return a plan's cut; None where it follows another order than the profile, or recomputes
    parts of stages.
    """
    groups = list(uncut_groups(given.layer_costs))
    cut: list[list[Group]] = []
    for stage in given.stages:
        if stage.options.recompute:
            return None

        own: list[Group] = []
        while groups and stage.layers.issuperset(groups[0]):
            own.append(groups.pop(0))
        if {layer for group in own for layer in group} != stage.layers:
            return None

        cut.append(own)

    return cut


def with_cut(stages: Sequence[Candidate], cut: Cut) -> list[Candidate]:
    """Return stages with the layers of a cut, one after the other."""
    before: frozenset[int] = frozenset()
    found = []
    for stage, groups in zip(stages, cut, strict=True):
        layers = frozenset(layer for group in groups for layer in group)
        found.append(replace(stage, before=before, layers=layers))
        before |= layers

    return found


def _neighbours(cut: Cut) -> Iterator[Cut]:
    """Yield the cuts that differ in one boundary, and those that differ in both of a stage by one
    group.
    """
    ends = [*accumulate(len(groups) for groups in cut)]
    order = [group for groups in cut for group in groups]
    for place in range(len(cut) - 1):
        count = 1
        while count < max(len(cut[place]), len(cut[place + 1])):
            for step in (-count, count):
                yield from _moved(order, ends, {place: step})
            count *= 2

    for place in range(len(cut) - 2):
        for one, other in product((-1, 1), repeat=2):
            yield from _moved(order, ends, {place: one, place + 1: other})


def _moved(order: Sequence[Group], ends: Sequence[int], steps: Mapping[int, int]) -> Iterator[Cut]:
    """Yield the cut whose boundaries are so many groups further, if all its stages have some."""
    moved = [end + steps.get(place, 0) for place, end in enumerate(ends)]
    edges = [0, *moved]
    if all(first < end for first, end in pairwise(edges)):
        yield [order[first:end] for first, end in pairwise(edges)]
