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


class StagesAlike:
    """Finds the ways of use.

    Args:
        ways: that rules and memory leave to stages.
        schedule: says how many units are in flight.
        microbatches: of a minibatch.
        parts_s: what stages take.
        most_replicas: of a stage.
        gpus: of all stages.
        unit: in which GPUs are counted.
    """

    def __init__(
        self,
        ways: WaysOf,
        schedule: Schedule,
        microbatches: int,
        parts_s: PartsOf,
        most_replicas: int,
        gpus: int,
        unit: int = 1,
    ) -> None:
        self._ways, self._schedule, self._microbatches, self._parts_s = ways, schedule, microbatches, parts_s
        self._replicas, self._gpus, self._unit = np.arange(unit, most_replicas + 1, unit)[:, None], gpus, unit

    def everywhere(self) -> list[Stages]:
        """Return the stages from each state but the last.

        Raises:
            OutOfTimeError: if the deadline passes before.
        """
        return [self._from(state) for state in range(len(self._ways.space) - 1)]

    def _from(self, state: int) -> Stages:
        self._ways.limits.deadline.check()
        others = self._ways.space.among_later(state, np.arange(state + 1, len(self._ways.space)))
        plainest = self._of_use(self._ways.all(state, others))
        limited = (plainest.after < self._gpus // self._unit).any(axis=0)
        choosing = self._ways.choosing(plainest.ways, limited, len(others))
        return self._of_use(self._ways.all(state, others, choosing)) if choosing.any() else plainest

    def _of_use(self, ways: Ways) -> Stages:
        """Keep the ways that fit, and with some replicas allow more GPUs after them than those recomputing less."""
        limits, schedule, shape = self._ways.limits, self._schedule, (len(self._replicas), len(ways))
        most = np.full(shape, limits.deepest)
        if limits.memory_bytes is not None:
            footprint = ways.footprint_on(self._replicas).divided(self._microbatches)
            fit = footprint.most_in_flight(limits.memory_bytes, schedule.stashes, schedule.weight_versions)
            most = np.minimum(most, fit)
        after = most_after(schedule, self._microbatches, self._replicas, most, self._gpus)
        after = np.where((after >= 0) & ways.allowed(np.broadcast_to(self._replicas, shape)), after // self._unit, -1)
        after = np.where(_more_than_before(ways, after), after, -1)
        rows = np.flatnonzero((after >= 0).any(axis=0))
        ways, after = ways[rows], after[:, rows]
        sum_s, max_s = self._parts_s(ways.work, self._replicas)
        sum_s = np.array(np.broadcast_to(sum_s, (1, len(ways)))[0])
        return Stages(ways, sum_s, np.where(after >= 0, max_s, np.nan), after)


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
