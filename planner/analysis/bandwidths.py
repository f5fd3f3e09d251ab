"""Sweep the bandwidth around that of a plan's cluster."""

from __future__ import annotations

from planner.analysis.given_plan import options_of
from planner.analysis.sweep import Sweep, spread, sweep
from planner.formats.cluster import Cluster, Level
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.solver.problem.budget import Patience


def bandwidth_sweep(
    profile: Profile, plan: Plan, points: int, factor: float, patience: Patience | None = None
) -> Sweep:
    """Solve for bandwidths from a `factor`-th of the plan's to `factor` times as much.

    Only the outermost level that joins more than one member changes.

    Args:
        profile: the plan's profile.
        plan: with its cluster and schedule.
        points: number of bandwidths.
        factor: above 1.
        patience: how long all searches for plans may take together.

    Raises:
        InputError: for a number of points that makes no sense.
    """
    levels = plan.cluster.levels
    outermost = max((n for n, level in enumerate(levels) if level.size > 1), default=0)
    now = levels[outermost].bandwidth_bytes_per_s

    def at(bandwidth_bytes_per_s: float) -> Cluster:
        changed = at_bandwidth(levels[outermost], bandwidth_bytes_per_s)
        return plan.cluster.model_copy(update={"levels": (*levels[:outermost], changed, *levels[outermost + 1 :])})

    values = spread(now / factor, now * factor, points, whole=False)
    return sweep(profile, "bandwidth", values, at, options=options_of(plan, patience))


def at_bandwidth(level: Level, bandwidth_bytes_per_s: float) -> Level:
    """Return the level with another bandwidth; those measured of all-reduces keep their ratios to it."""
    factor = bandwidth_bytes_per_s / level.bandwidth_bytes_per_s
    names = ("all_reduce_bandwidth_bytes_per_s", "sum_bandwidth_bytes_per_s")
    scaled = {name: rate * factor for name in names if (rate := getattr(level, name)) is not None}
    return level.model_copy(update={"bandwidth_bytes_per_s": bandwidth_bytes_per_s, **scaled})
