"""Leave out workers whose stage does hardly anything, such as the loss alone.

Of such a worker no measurement says how fast its device is, and so a run would not notice when it
has recovered. A worker that is left out measures its device (`planner.plan.left_out`).
"""

from collections.abc import Iterator

from planner.analysis.given_plan import GivenPlan, priced_plan
from planner.analysis.recut import with_cut
from planner.cost.kinds import with_kinds
from planner.formats.cluster import Cluster
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.plan.left_out import why_nobody
from planner.solver.clock import Clock


def without_idle_workers(profile: Profile, plan: Plan, cluster: Cluster, least_busy: float) -> Plan:
    """Return a plan whose slower workers compute for a share of the time at least, priced on a
    cluster: the layers of the others join the stage before, or the first one that is left.

    The plan itself, where all do, or where nobody can be left out.

    Raises:
        PlanError: for another profile.
    """
    idle = set(_idle_stages(plan, cluster, least_busy))
    if not idle or plan.schedule.chunked or why_nobody(plan):
        return plan
    given = GivenPlan.of(profile, replace(plan, cluster=cluster), Clock())
    if any(stage.options.recompute for stage in given.stages):
        return plan

    layers: list[frozenset[int]] = []  # of each stage that is left
    waiting: frozenset[int] = frozenset()  # of idle ones before all of these
    for number, stage in enumerate(given.stages):
        if number not in idle:
            layers.append(waiting | stage.layers)
            waiting = frozenset()
        elif layers:
            layers[-1] |= stage.layers
        else:
            waiting |= stage.layers

    left = [number for number in range(len(plan.stages)) if number not in idle]
    kept = [replace(given.stages[number], ranks=plan.stages[number].ranks) for number in left]
    stages = with_cut(kept, [[tuple(own)] for own in layers])
    placed = with_kinds(given.layer_costs, stages, given.request.setting)
    without = priced_plan(given.request, placed)
    return without if without.fits else plan


def _idle_stages(plan: Plan, cluster: Cluster, least_busy: float) -> Iterator[int]:
    """Yield the stages that compute for less than a share of the longest one's time, on devices
    slower than others.
    """
    if not cluster.kinds:
        return
    longest_s = max(stage.forward_s + stage.backward_s for stage in plan.stages)
    fastest = max(kind.speed for kind in cluster.kinds)
    for number, stage in enumerate(plan.stages):
        is_slow = all(cluster.kind_of(rank).speed < fastest for rank in stage.ranks)
        if is_slow and stage.forward_s + stage.backward_s < least_busy * longest_s:
            yield number
