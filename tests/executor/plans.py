"""Plans with a given cut, as no solver would choose them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from planner.cluster import flat_cluster
from planner.plan_file import Plan, ScheduleName, SolverReport
from planner.pricing import Ledger, candidates, price
from planner.profile_file import Profile
from planner.solver.assemble import assemble


def make_plan(
    profile: Profile,
    replicas: Sequence[int],
    schedule: ScheduleName = "1f1b",
    microbatches: int = 1,
    cuts: Sequence[int] | None = None,
) -> Plan:
    """The plan with `replicas` per stage, cut before the layers at `cuts`, or else into equally many layers."""
    layers = len(profile.layers)
    if cuts is None:
        cuts = [layers * stage // len(replicas) for stage in range(1, len(replicas))]
    groups = [list(range(start, end)) for start, end in pairwise([0, *cuts, layers])]
    ledger = Ledger(profile)
    cluster = flat_cluster(sum(replicas), 1e9)
    stages = candidates(groups, replicas)
    cost = price(ledger, stages, cluster, schedule=schedule, microbatches=microbatches)
    report = SolverReport(
        name="given", cost_model="resource", status="feasible", lower_bound_s=0.0, gap=1.0, seconds=0.0
    )
    return assemble(ledger, cluster, stages, cost, schedule, microbatches, report)
