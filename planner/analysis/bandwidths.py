"""A plan's cluster at other bandwidths."""

from __future__ import annotations

from planner.analysis.question import question_of
from planner.analysis.sweep import Sweep, spread, sweep
from planner.formats.cluster import Cluster
from planner.formats.plan import Plan
from planner.formats.profile import Profile


def bandwidth_sweep(profile: Profile, plan: Plan, points: int, factor: float) -> Sweep:
    """The fastest plans from a `factor`-th of the bandwidth of the plan's cluster to `factor` times as much.

    It is that of the outermost level that joins anything.

    Args:
        profile: that the plan was made from.
        plan: with its cluster and schedule.
        points: how many bandwidths.
        factor: above 1.

    Raises:
        InputError: for a number of points that makes no sense.
    """
    cluster = plan.cluster
    outermost = max((n for n, level in enumerate(cluster.levels) if level.size > 1), default=0)
    now = cluster.levels[outermost].bandwidth_bytes_per_s

    def at(bandwidth_bytes_per_s: float) -> Cluster:
        level = cluster.levels[outermost]
        ring = level.all_reduce_bandwidth_bytes_per_s
        changed = level.model_copy(
            update={
                "bandwidth_bytes_per_s": bandwidth_bytes_per_s,
                # Measured all-reduces keep their ratio to messages.
                "all_reduce_bandwidth_bytes_per_s": None if ring is None else ring * bandwidth_bytes_per_s / now,
            }
        )
        levels = (*cluster.levels[:outermost], changed, *cluster.levels[outermost + 1 :])
        return cluster.model_copy(update={"levels": levels})

    values = spread(now / factor, now * factor, points, whole=False)
    return sweep(profile, "bandwidth", values, at, question=question_of(plan))
