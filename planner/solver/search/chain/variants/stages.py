"""Tables of the stages of a space: useful ways to run them, and what each adds to a plan's time.

A plan takes the sum of one part of its stages plus the maximum of another. Searches for synchronous
schedules, for GPUs of several kinds and by integer programs read these tables.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from planner.cost.network.link import Link
from planner.cost.work import Floats, Integers, Work
from planner.formats.files import replace
from planner.options.solving import UNLIMITED
from planner.schedule.schedule import Schedule
from planner.solver.problem.problem import Problem
from planner.solver.problem.states import CutSpace
from planner.solver.search.chain.variants.space import StageVariants, Variants
from planner.stages.replicas import most_replicas

# Stages' parts of the sum over the stages, and of the maximum over them, on replicas (a column) in
# given ways (a row).
PartsOf = Callable[[Work, Integers], tuple[Floats, Floats]]


@dataclass(frozen=True)
class Stages:
    """The useful ways to run the stages that begin at one state, and their parts of the sum and of
    the maximum.
    """

    variants: Variants
    sum_s: Floats
    max_s: Floats  # by units of replicas - 1 and way; not a number where a way is not allowed
    # the most units of GPUs that may follow, likewise; -1 where the way is not allowed
    after: Integers

    def limited(self, gpus: int) -> NDArray[np.bool_]:
        """Return which ways do not allow so many units of GPUs after the stage on some replicas."""
        return np.asarray((self.after < gpus).any(axis=0))

    @cached_property
    def by_sum(self) -> bool:
        """Whether the ways of each stage stand by their sums."""
        ascending = np.diff(self.sum_s) >= 0
        next_stage = np.diff(self.variants.stage) > 0
        return bool(np.all(ascending | next_stage))


def stages_on(
    problem: Problem,
    space: CutSpace,
    memory_bytes: int | None,
    most: int,
    link: Link | None = None,
) -> list[Stages]:
    """Return the stages on up to so many GPUs of a kind, which are priced with a link."""
    tables = StageTables(
        StageVariants(space, replace(problem.limits, memory_bytes=memory_bytes)),
        problem.schedule,
        problem.microbatches,
        partial(problem.parts_s, link=link),
        most_replicas(problem.schedule, problem.microbatches, most),
        problem.cluster.gpus,
    )
    return tables.all()


@dataclass(frozen=True)
class StageTables:
    """The useful ways to run the stages from each state but the last, on GPUs that are counted in
    units.

    A way is of use if it fits, and with some replicas allows more GPUs after it than those that
    recompute less.
    """

    variants: StageVariants
    schedule: Schedule
    microbatches: int
    parts_s: PartsOf
    most_replicas: int
    gpus: int
    unit: int = 1

    def all(self) -> list[Stages]:
        """Return the tables, by state."""
        return [self._from(state) for state in range(len(self.variants.space) - 1)]

    @cached_property
    def _replicas(self) -> Integers:
        return np.arange(self.unit, self.most_replicas + 1, self.unit)[:, None]

    def _from(self, state: int) -> Stages:
        self.variants.limits.clock.check()
        ends = self._may_fit(state, self.variants.space.after(state))
        return self.variants.table(state, ends, self._of_use, self.gpus // self.unit)

    def _may_fit(self, state: int, ends: Integers) -> Integers:
        """Return the first of `ends`, and those whose stages fit if nothing is saved, on one
        replica or the most.
        """
        if self.variants.limits.memory_bytes is None:
            return ends

        variants = self.variants.all(state, ends)
        lean = replace(variants, footprint=variants.footprint.least())
        fit = lean.fit(self._replicas[[0, -1]], 1, self.schedule, self.microbatches)
        on_either = np.broadcast_to(fit, (2, len(variants)))
        stages = variants.stage[np.any(on_either, axis=0)]
        fitting = np.isin(np.arange(len(ends)), stages)
        fitting[0] = True
        return ends[fitting]

    def _of_use(self, variants: Variants) -> Stages:
        """Return those of the ways that are of use."""
        after = self._most_after(variants)
        after = np.where(_more_than_before(variants, after), after, -1)

        useful = (after >= 0).any(axis=0)
        rows = np.flatnonzero(useful)
        variants = variants[rows]
        after = after[:, rows]

        sum_s, max_s = self.parts_s(variants.work, self._replicas)
        one_row = np.broadcast_to(sum_s, (1, len(variants)))[0]
        return Stages(
            variants=variants,
            sum_s=one_row.copy(),
            max_s=np.where(after >= 0, max_s, np.nan),
            after=after,
        )

    def _most_after(self, variants: Variants) -> Integers:
        """Return how many units of the GPUs may follow, by replicas and way; -1 where the way is
        not allowed.
        """
        # 1. The most microbatches in flight: for the gradients' sake, by memory, and by the
        # schedule.
        schedule = self.schedule
        replicas = self._replicas
        most = variants.most_in_flight(replicas, schedule, self.microbatches)
        deepest = [
            schedule.deepest(count, self.microbatches) or UNLIMITED
            for count in replicas.ravel().tolist()
        ]
        most = np.minimum(most, np.array(deepest)[:, None])

        # 2. Between no GPUs after the stage and all, the replicas share what is in flight.
        nothing = np.zeros_like(replicas)
        with_none = schedule.in_flight(replicas, nothing, self.microbatches)
        with_all = schedule.in_flight(replicas, nothing + self.gpus, self.microbatches)
        after = np.where(with_none <= most, (most - 1) * replicas, -1)
        after = np.where(with_all <= most, self.gpus, after)

        allowed = variants.allowed(np.broadcast_to(replicas, after.shape))
        return np.where((after >= 0) & allowed, after // self.unit, -1)


def _more_than_before(variants: Variants, after: Integers) -> NDArray[np.bool_]:
    """Return which ways, by replicas, allow more GPUs after the stage than all that
    recompute less.
    """
    # Numbers grow from stage to stage, so that the maximum of each begins anew.
    step = int(after.max(initial=0)) + 2
    allowed = after + 1 + variants.stage * step

    more = np.ones(after.shape, dtype=bool)
    for sharded in (False, True):
        rows = np.flatnonzero(variants.sharded == sharded)
        most = np.maximum.accumulate(allowed[:, rows], axis=1)
        more[:, rows[1:]] = most[:, 1:] > most[:, :-1]

    return more
