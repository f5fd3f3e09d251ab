"""All stages on GPUs that are alike: the ways to run them, what these take, and how many GPUs may follow them.

The searches that minimise a sum over the stages plus a maximum over them look stages up here. With more replicas a
stage has fewer units in flight, so that more GPUs may follow it. A stage chooses what it recomputes only where its
plainest way does not fit whatever follows.

GPUs may be counted in units: replicas are multiples of one, and so are the GPUs after a stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.cost.work import Floats, Integers, Work
from planner.schedule.schedule import Schedule
from planner.solver.search.chain.ways import Ways, WaysOf, most_after

# Stages' parts of the sum over the stages, and of the maximum over them, on replicas (a column) in given ways (a row).
PartsOf = Callable[[Work, Integers], tuple[Floats, Floats]]


@dataclass(frozen=True)
class Stages:
    """The ways of use to run the stages that begin at one state.

    Attributes:
        ways: of the stages.
        sum_s: their parts of the sum, by way.
        max_s: their parts of the maximum, by units of replicas - 1 and way; not a number where a way is not allowed.
        after: the most units of GPUs that may follow, likewise; -1 where the way is not allowed.
    """

    ways: Ways
    sum_s: Floats
    max_s: Floats
    after: Integers

    @cached_property
    def by_sum(self) -> bool:
        """Whether the ways of each stage stand by their sums."""
        return bool(np.all((np.diff(self.sum_s) >= 0) | (np.diff(self.ways.stage) > 0)))


def stages_alike(
    ways: WaysOf,
    schedule: Schedule,
    microbatches: int,
    parts_s: PartsOf,
    most_replicas: int,
    gpus: int,
    unit: int = 1,
) -> list[Stages]:
    """Return the ways of use to run the stages from each state but the last, on GPUs that are counted in units.

    A way is of use if it fits, and with some replicas allows more GPUs after it than those that recompute less.

    Raises:
        OutOfTimeError: if the deadline passes before.
    """
    limits, space, replicas = ways.limits, ways.space, np.arange(unit, most_replicas + 1, unit)[:, None]

    def of_use(those: Ways) -> Stages:
        shape = len(replicas), len(those)
        most = np.full(shape, limits.deepest)
        if limits.memory_bytes is not None:
            footprint = those.footprint_on(replicas).divided(microbatches)
            fit = footprint.most_in_flight(limits.memory_bytes, schedule.stashes, schedule.weight_versions)
            most = np.minimum(most, fit)
        after = most_after(schedule, microbatches, replicas, most, gpus)
        after = np.where((after >= 0) & those.allowed(np.broadcast_to(replicas, shape)), after // unit, -1)
        after = np.where(_more_than_before(those, after), after, -1)
        rows = np.flatnonzero((after >= 0).any(axis=0))
        those, after = those[rows], after[:, rows]
        sum_s, max_s = parts_s(those.work, replicas)
        sum_s = np.array(np.broadcast_to(sum_s, (1, len(those)))[0])
        return Stages(those, sum_s, np.where(after >= 0, max_s, np.nan), after)

    found = list[Stages]()
    for state in range(len(space) - 1):
        limits.deadline.check()
        others = space.among_later(state, np.arange(state + 1, len(space)))
        plainest = of_use(ways.all(state, others))
        limited = (plainest.after < gpus // unit).any(axis=0)
        choosing = ways.choosing(plainest.ways, limited, len(others))
        found.append(of_use(ways.all(state, others, choosing)) if choosing.any() else plainest)
    return found


def _more_than_before(ways: Ways, after: Integers) -> NDArray[np.bool_]:
    """Return which ways, by replicas, allow more GPUs after the stage than all that recompute less."""
    more = np.ones(after.shape, dtype=bool)
    # Numbers grow from stage to stage, so that the maximum of each begins anew.
    allowed = after + 1 + ways.stage * (int(after.max(initial=0)) + 2)
    for sharded in (False, True):
        rows = np.flatnonzero(ways.sharded == sharded)
        most = np.maximum.accumulate(allowed[:, rows], axis=1)
        more[:, rows[1:]] = most[:, 1:] > most[:, :-1]
    return more
