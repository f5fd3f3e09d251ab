"""The fewest replicas with which stages meet a target time and fit the memory, run in any way.

    fewest_replicas(I, J, T) = min r : some way of the stage on r replicas takes no more than T, and
    fits

A stage in its plainest way has a closed form. In another way, sharded or recomputing some of its
layers, it may do with fewer replicas, where memory is limited or the optimizer takes long. Those
counts are tried from a lower bound on, each by the cost model itself, for a stage in the quickest
way that fits (`planner.solver.search.chain.fitting`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.candidate import StageOptions
from planner.cost.work import IMPOSSIBLE, Integers, Work, fewest_to_hold
from planner.formats.files import replace
from planner.options.solving import UNLIMITED
from planner.solver.problem.problem import Limits
from planner.solver.problem.replica_models import ReplicaModel
from planner.solver.problem.states import CutSpace
from planner.solver.search.chain.fitting import FittingVariants
from planner.solver.search.chain.variants import StageVariants, numbered, taken
from planner.units import SLACK

# How a stage meets a target.
MISSED = 0
RECOMPUTING = 1
PLAIN = 2

# Tries stages, by their numbers, on so many replicas each, and returns how they meet the target.
Attempt = Callable[[Integers, Integers], Integers]


class FewestReplicas:
    """Replicas of the stages of one space under one cost model."""

    def __init__(self, space: CutSpace, model: ReplicaModel, limits: Limits) -> None:
        self.space = space
        self.model = model
        self.variants = StageVariants(space, limits)
        self._fitting = FittingVariants(self.variants, model)

        # GPU seconds of the layers before each state, at least.
        prefixes = space.work(0, np.arange(len(space)))
        least = limits.least(prefixes, space.layer_costs.profile)
        self.before_s = model.least_s(least)

    def by_compute(self, state: int, ends: Integers, target_s: float) -> Integers:
        """Return the replicas that stages need for their computation alone."""
        least_s = self.before_s[ends] - self.before_s[state]
        least = np.maximum(np.ceil(least_s / target_s - SLACK), 1)
        return np.asarray(least, dtype=np.int64)

    def whatever_memory(self, state: int, ends: Integers, target_s: float) -> Integers:
        """Return the fewest replicas that meet the target whatever the memory, or fewer."""
        if self.variants.shards:
            return self.by_compute(state, ends, target_s)
        return self.model.fewest_replicas(self.space.work(state, ends), target_s)

    def fewest(
        self,
        state: int,
        ends: Integers,
        target_s: float,
        after: Integers,
        most: Integers,
    ) -> tuple[Integers, NDArray[np.bool_]]:
        """Return the fewest replicas that meet the target and fit the memory, and whether they must
        recompute.

        Args:
            state: where the stages begin.
            others: where each of them ends.
            target_s: seconds per minibatch.
            after: GPUs after each stage.
            most: where a stage needs more replicas than this, the answer is any larger number.
        """
        # 1. In its plainest way a stage has a closed form.
        replicas, tight = self._in_plainest_way(state, ends, target_s, after)
        recomputes = np.full(len(ends), self.variants.recomputes)
        if self.variants.always_shards:
            replicas = np.where(replicas > 1, IMPOSSIBLE, replicas)

        # 2. Fewer may do for a stage that recomputes because its memory is tight, or that shards.
        tight &= self.variants.chooses
        may_differ = tight | self.variants.shards
        if not may_differ.any():
            return replicas, recomputes

        # 3. Without recomputing a stage is faster, and one replica has nothing to shard: so the
        # count without recomputing, or two for a sharded stage, is a lower bound.
        least = self.whatever_memory(state, ends, target_s)
        least = np.where(tight, least, np.maximum(least, 2))
        rows = np.flatnonzero(may_differ & (least < replicas) & (least <= most))
        if not len(rows):
            return replicas, recomputes

        # 4. Try the counts from there on.
        ends = ends[rows]
        work = self.variants.plainest_work(self.space.work(state, ends))
        trial = Trial(self._fitting, state, ends, tight[rows], after[rows], target_s, work)
        one_by_one = 2
        if not self.model.more_is_faster:
            one_by_one = self.variants.limits.tuning.chain.single_replica_counts
        high = np.minimum(replicas - 1, most)[rows]
        fewest, manner = fewest_that_meet(trial, least[rows], high, one_by_one)

        fewer = fewest < replicas[rows]
        replicas[rows[fewer]] = fewest[fewer]
        recomputes[rows[fewer]] = manner[fewer] == RECOMPUTING
        return replicas, recomputes

    def _in_plainest_way(
        self, state: int, ends: Integers, target_s: float, after: Integers
    ) -> tuple[Integers, NDArray[np.bool_]]:
        """Return the fewest replicas where nothing is sharded and what recomputes is the rule's
        alone, and where memory asks for more than one.
        """
        # 1. What is in flight is divided between the replicas, so memory and staleness are lower
        # bounds.
        work = self.space.work(state, ends)
        single, several = self._to_hold(state, ends, work, after)
        least = np.where(single > 1, np.maximum(several, 2), 1)
        deepest = self.variants.limits.deepest
        if deepest < UNLIMITED:
            least = np.maximum(least, fewest_to_hold(deepest, after))

        # 2. From there on, the cost model has a closed form.
        work = self.variants.plainest_work(work)
        replicas = self.model.fewest_replicas(work, target_s, least, after)

        # 3. A stage that fits on one may need several replicas for its time, which hold a buffer
        # more.
        too_few = (replicas > 1) & (replicas < several)
        if too_few.any():
            least = np.where(replicas > 1, np.maximum(least, several), least)
            replicas = self.model.fewest_replicas(work, target_s, least, after)

        return replicas, np.broadcast_to(several > 1, replicas.shape).copy()

    def _to_hold(
        self, state: int, ends: Integers, work: Work, after: Integers
    ) -> tuple[Integers, Integers]:
        """Return the fewest replicas that fit the memory, as if each held what a single one does,
        and one of several.
        """
        memory_bytes = self.variants.limits.memory_bytes
        if memory_bytes is None:
            one = np.ones(1, dtype=np.int64)
            return one, one

        costs = self.space.layer_costs
        footprint = self.variants.plainest_footprint(state, ends, work)

        def to_hold(replicas: int) -> Integers:
            held = costs.replicated(footprint, replicas)
            return fewest_to_hold(self.model.most_in_flight(held, memory_bytes), after)

        single = to_hold(1)
        return single, to_hold(2) if costs.counts_replicas else single

    def quickest(
        self,
        state: int,
        end: int,
        replicas: Integers,
        after: int,
        target_s: float = np.inf,
    ) -> tuple[StageOptions, float] | None:
        """Return the best way to run a stage on any of these numbers of replicas, and its seconds;
        None if none fits.

        Ways that meet the target come first, then ways that recompute no more than they must, then
        the quickest.
        """
        # 1. Every way on every number of replicas is a row.
        ends = np.full(len(replicas), end)
        choosing = np.full(len(replicas), self.variants.chooses)
        variants = self.variants.all(state, ends, choosing)
        r = replicas[variants.stage]

        # 2. Those that may be, and fit.
        allowed, in_flight = self._fitting.allowed(variants.sharded, r, np.full(len(r), after))
        fits = np.flatnonzero(
            allowed & variants.fit(r, in_flight, self.model.schedule, self.model.microbatches)
        )
        if not len(fits):
            return None

        # 3. The best of them.
        all_s = np.broadcast_to(self.model.stage_s(variants.work, r), r.shape)
        seconds = all_s[fits]
        recomputes = variants.again[fits] & self.variants.chooses & np.isfinite(target_s)
        order = np.lexsort((variants.sharded[fits], seconds, recomputes, seconds > target_s))
        row = int(fits[order[0]])
        return variants.options(row, int(r[row])), float(all_s[row])


def fewest_that_meet(
    attempt: Attempt, low: Integers, high: Integers, one_by_one: int
) -> tuple[Integers, Integers]:
    """Return the fewest replicas of each stage, from `low` to `high`, that meet the target, and
    how; `IMPOSSIBLE` where none do.

    The first ones are tried one by one. From there on, more replicas are taken to be faster.
    """
    fewest = np.full(len(low), IMPOSSIBLE, dtype=np.int64)
    manner = np.full(len(low), MISSED, dtype=np.int64)

    def meets(stage: Integers, replicas: Integers) -> NDArray[np.bool_]:
        how = attempt(stage, replicas)
        rows = np.flatnonzero(how)
        settled, first = np.unique(stage[rows], return_index=True)
        fewest[settled] = replicas[rows[first]]
        manner[settled] = how[rows[first]]
        return how > MISSED

    # 1. The first few, one by one.
    stage, number = numbered(np.minimum(high - low + 1, one_by_one))
    meets(stage, low[stage] + number)

    # 2. Where none of them does, the most may.
    below = low + one_by_one - 1
    enough = high.copy()
    stage = np.flatnonzero((fewest >= IMPOSSIBLE) & (below < high))
    stage = stage[meets(stage, high[stage])]

    # 3. Then halve what is between.
    while True:
        stage = stage[enough[stage] - below[stage] > 1]
        if not len(stage):
            return fewest, manner

        middle = (below[stage] + enough[stage]) // 2
        met = meets(stage, middle)
        enough[stage[met]] = middle[met]
        below[stage[~met]] = middle[~met]


@dataclass(frozen=True)
class Trial:
    """Tries stages that begin at one state.

    Attributes:
        fitting: the ways that fit.
        state: where the stages begin.
        others: where each of them ends.
        tight: which of them may recompute.
        after: GPUs after each.
        target_s: seconds per minibatch.
        work: of the stages in their plainest way.
    """

    fitting: FittingVariants
    state: int
    ends: Integers
    tight: NDArray[np.bool_]
    after: Integers
    target_s: float
    work: Work

    def __call__(self, stage: Integers, replicas: Integers) -> Integers:
        how = self._how(stage, replicas, sharded=False)
        if self.fitting.variants.shards:
            how = np.maximum(how, self._how(stage, replicas, sharded=True))
        return how

    def _how(self, stage: Integers, replicas: Integers, *, sharded: bool) -> Integers:
        model = self.fitting.model
        variants = self.fitting.variants

        # 1. A stage that misses the target without recomputing misses it in every way, so most
        # stages need no choice.
        work = taken(self.work, stage).shared_out(sharded)
        allowed, in_flight = self.fitting.allowed(
            np.full(len(stage), sharded),
            replicas,
            self.after[stage],
        )

        meets = allowed & (model.stage_s(work, replicas) <= self.target_s)
        how = np.where(meets, RECOMPUTING if variants.recomputes else PLAIN, MISSED)
        if variants.limits.memory_bytes is None:
            return how

        # 2. For the others it is the quickest that fits.
        rows = np.flatnonzero(meets)
        choice, recompute_s = self.fitting.quickest(
            self.state,
            self.ends[stage[rows]],
            self.tight[stage[rows]],
            sharded,
            replicas[rows],
            in_flight[rows],
        )

        work = replace(taken(work, rows), recompute_s=recompute_s)
        in_time = model.stage_s(work, replicas[rows]) <= self.target_s
        chosen = np.where(choice == 0, how[rows], RECOMPUTING)
        how[rows] = np.where((choice >= 0) & in_time, chosen, MISSED)
        return how
