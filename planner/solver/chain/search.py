"""Exact search for the asynchronous pipeline: the fewest GPUs that meet a time, and a binary search over the time.

Fix a target T. The fewest replicas with which a stage meets T have a closed form, so walking from the last state to the
first,

    gpus(I) = min over J of  gpus(J) + fewest_replicas(I, J, T)

is the fewest GPUs that run everything after the downset I in time T. Memory fits in the same walk: what a stage has in
flight depends only on the GPUs at and after it, and fewer GPUs after it are never worse. The number of GPUs in the
cluster is a bound, not a dimension: O(states²) per target, whatever the cluster (the published dynamic programme is
O(states²·GPUs²)). Where memory is limited, a stage that recomputes may need fewer replicas than the same stage without
recomputation. Only then it takes its place in the walk, because recomputing costs time.

Pruning: the layers before I need at least compute / T GPUs. A state whose suffix leaves fewer is on no plan that meets
T.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.cost.rounding import SLACK
from planner.cost.stage_options import StageOptions, whole_stage
from planner.cost.work import IMPOSSIBLE, Floats, Footprint, Integers, Work
from planner.solver.bounds.bounds import Bounds
from planner.solver.chain.states import Coarse, StateSpace
from planner.solver.chain.tables import StageTables
from planner.solver.problem import Limits
from planner.solver.result import CutPath

# The answer is proven optimal up to this relative difference in time: rounding, not search.
RESOLUTION = 1e-12
_ROUGH_STATES = 300  # at most this many states in the search for a start; twice as many have such a search
_FEW_STATES = 300  # up to which the replicas of all stages are tabulated
_NEAR = 2e-3  # how far the best time may be below that of the start, as a first guess
_MOST_PATIENCE = 4  # halvings between two questions for anything better
_CLOSE = 0.02  # relative distance of the bounds from which on each walk should be cheap


class Search:
    """Finds the fastest pipeline over a space of states, for GPUs that are alike and equally far apart."""

    def __init__(self, space: StateSpace, model: Bounds, limits: Limits) -> None:
        self.space, self.model, self.limits = space, model, limits
        self.gpus, self.memory_bytes, self.recompute = limits.gpus, limits.memory_bytes, limits.recompute
        self.interrupted = False  # by the deadline: there may be faster plans
        self._before_s = model.least_s(space.work(0, np.arange(len(space))))  # of the layers before each state
        self._room = np.full(len(space), self.gpus, dtype=np.int64)  # most GPUs that may come after each state
        self._suffix = np.zeros(len(space), dtype=np.int64)  # fewest that must, from the last walk
        self._tables = StageTables(space, model, limits) if len(space) <= _FEW_STATES else None

    def best(self, below_s: float | None = None, precision: float = RESOLUTION) -> CutPath | None:
        """Return the fastest plan, and of equally fast ones the one with fewest GPUs, stages, and recomputing stages.

        Args:
            below_s: only look for plans faster than this.
            precision: how much faster, relatively, other plans may be.

        Returns:
            A plan that is optimal over the space, up to `precision`; None if no plan fits the memory, or none is fast
            enough.
        """
        start_s = self.any_time_s() if below_s is None else below_s * (1 - RESOLUTION)
        if (rough := self._rough(below_s)) is not None:
            start_s = rough.seconds
        best = self.within(start_s)
        if best is None:
            return None
        if rough is not None:
            self._tighten(start_s)
        # This is a start, not an answer, so a few replica counts are enough.
        # A single stage has a closed form, and is often near the optimum.
        alone = self._data_parallel(
            np.unique(np.geomspace(1, min(self.gpus, self.model.most_replicas), num=32).astype(np.int64))
        )
        if alone is not None and alone.seconds < best.seconds:
            best = alone
        low_s = float(self._before_s[-1]) / self.gpus * (1 - RESOLUTION)
        tighten_at_s = _CLOSE * best.seconds
        strict, halvings, patience = False, 0, 1
        least_s = 0.0
        if rough is not None:  # its time is near the best one's, so the bound should come near first
            least_s, patience = best.seconds * (1 - _NEAR), _MOST_PATIENCE
        while low_s < (goal_s := best.seconds * (1 - precision)):
            if self.limits.deadline.passed:
                self.interrupted = True
                break
            # Halving finds good plans, and asking for anything strictly better ends the search: take turns once close.
            target_s = goal_s if strict else min(max((low_s + best.seconds) / 2, least_s), goal_s)
            least_s = 0.0
            better = self.within(target_s)
            if better is None:
                low_s = target_s
            else:
                best = better
                if best.seconds - low_s < tighten_at_s:
                    self._tighten(target_s)
                    tighten_at_s = (best.seconds - low_s) / 4  # each time costs a walk, so only when it pays
            if strict:
                # There may be more that is better, so halve more often before the next such question.
                strict, halvings, patience = False, 0, min(2 * patience, _MOST_PATIENCE)
            elif best.seconds - low_s < _CLOSE * best.seconds:
                halvings += 1
                strict = halvings >= patience
        # Among equally fast plans, this walk takes the one with fewest GPUs.
        tidy = self.within(best.seconds * (1 + RESOLUTION))
        assert tidy is not None
        return tidy

    def _rough(self, below_s: float | None) -> CutPath | None:
        """Return the best plan that cuts at a few of many states only: the time to beat from the start."""
        if len(self.space) <= 2 * _ROUGH_STATES:
            return None
        states = np.unique(np.linspace(0, len(self.space) - 1, _ROUGH_STATES).astype(np.int64))
        coarse = Coarse(self.space, states)
        return Search(coarse, self.model, self.limits).best(below_s)

    def any_time_s(self) -> float:
        """Return a time that every stage on any number of these GPUs meets."""
        everything = self.space.work(0, np.array([len(self.space) - 1])).recomputed()
        link = self.model.link
        front_bytes, front_messages = self.space.largest_front()
        bytes_ = 4 * (float(everything.trainable_bytes[0]) + front_bytes)
        messages = 4 * (self.gpus + front_messages)
        # Generous factors: no model charges more than 4·W for an all-reduce, or more than 2(r - 1) latencies.
        slower_bytes_per_s = min(link.bandwidth_bytes_per_s, link.ring_bytes_per_s)
        seconds = (
            float(everything.compute_s[0] + everything.accumulate_s[0])
            + bytes_ / slower_bytes_per_s
            + messages * link.latency_s
        )
        return max(seconds * self.model.microbatches, np.finfo(float).tiny)

    def within(self, target_s: float) -> CutPath | None:
        """Return a plan with the fewest GPUs that meets the (positive) target, or None if there are too few GPUs."""
        space, last = self.space, len(self.space) - 1
        before_s = self._before_s
        room = np.minimum(np.floor(self.gpus - before_s / target_s + SLACK).astype(np.int64), self._room)
        gpus = np.full(last + 1, IMPOSSIBLE, dtype=np.int64)
        stages = np.zeros(last + 1, dtype=np.int64)
        follow = np.zeros(last + 1, dtype=np.int64)
        replicas = np.zeros(last + 1, dtype=np.int64)
        recomputing = np.zeros(last + 1, dtype=bool)  # the stage that begins here
        recomputed = np.zeros(last + 1, dtype=np.int64)  # stages of the suffix that do
        gpus[last] = 0
        reached = np.empty(last + 1, dtype=np.int64)  # states with a suffix that meets the target, filled from the end
        reached[last] = last
        start = last
        for state in range(last - 1, -1, -1):
            # The layers before this state need all GPUs, so no plan that meets the target has a cut here.
            if room[state] < 1:
                continue
            others = reached[start:]
            least_s = before_s[others] - before_s[state]
            least = np.maximum(np.ceil(least_s / target_s - SLACK), 1.0)
            # A stage needs at least its compute time over the target, however its all-reduce overlaps.
            others = others[gpus[others] + least <= room[state]]
            others = space.among_later(state, others)
            if not len(others):
                continue
            total, r, again = self.suffixes(state, others, target_s, gpus[others])
            # One number orders by GPUs, then stages, then recomputing stages. Taking the first of equals makes the
            # choice deterministic.
            order = np.minimum(total, self.gpus + 1) * (last + 2) + stages[others]
            choice = int(np.argmin(order * (last + 2) + recomputed[others] + again))
            # Not even the best suffix leaves enough GPUs for the layers before the state.
            if total[choice] > room[state]:
                continue
            gpus[state], replicas[state] = total[choice], r[choice]
            follow[state], stages[state] = others[choice], stages[others[choice]] + 1
            recomputing[state], recomputed[state] = again[choice], recomputed[others[choice]] + again[choice]
            start -= 1
            reached[start] = state
        if gpus[0] > self.gpus:
            return None
        self._suffix = gpus
        return self._trace(follow, replicas, recomputing)

    def _tighten(self, target_s: float) -> None:
        """Bound the GPUs before each state by a walk forward, after a walk back that met the target.

        Faster plans need at least as many GPUs before each state, so the bound holds for all smaller targets, and keeps
        their walks to the few states that could still be on a plan. Leaving memory out only loosens the bound.
        """
        # States that the last walk did not reach stay out of reach for all smaller targets.
        prefix = np.where(self._suffix < IMPOSSIBLE, self.gpus + 1, IMPOSSIBLE)
        prefix[0] = 0
        useful = np.flatnonzero(self._suffix <= self.gpus)
        target_s *= 1 + 4 * RESOLUTION  # the last walk asks for a little more than the best time
        for number, state in enumerate(useful):
            others = useful[number + 1 :]
            least = np.maximum(np.ceil((self._before_s[others] - self._before_s[state]) / target_s - SLACK), 1)
            others = others[prefix[state] + least + self._suffix[others] <= self.gpus]
            others = self.space.among_later(int(state), others)
            if len(others):
                if self._tables is not None:
                    r = self._tables.fewest_alone(target_s, self.recompute == "always")[state, others]
                else:
                    r = self.model.fewest_replicas(self.space.work(int(state), others), target_s)
                prefix[others] = np.minimum(prefix[others], prefix[state] + r)
        self._room = np.minimum(self._room, self.gpus - prefix)

    def suffixes(
        self, state: int, others: Integers, target_s: float, after: Integers
    ) -> tuple[Integers, Integers, NDArray[np.bool_]]:
        """Return the GPUs of the suffixes that begin with each stage, its replicas, and whether it recomputes."""
        plain = np.zeros(len(others), dtype=bool)
        if self._tables is not None:
            return self._suffixes_by_table(self._tables, state, others, target_s, after)
        work = self.space.work(state, others)
        if self.memory_bytes is None:
            work = work.recomputed() if self.recompute == "always" else work
            r = self.model.fewest_replicas(work, target_s, after=after)
            return after + r, r, plain | (self.recompute == "always")
        footprint = self.space.footprint(state, others, work)
        if self.recompute == "always":
            r = self._fewest(work.recomputed(), footprint.recomputed(), target_s, after)
            return after + r, r, ~plain
        at_least = self.model.fewest_for_memory(footprint, after, self.memory_bytes)
        r = self.model.fewest_replicas(work, target_s, at_least, after)
        if self.recompute == "never" or not np.any(np.asarray(at_least) > 1):
            return after + r, r, plain
        again = self._fewest(work.recomputed(), footprint.recomputed(), target_s, after)
        return after + np.minimum(r, again), np.minimum(r, again), again < r

    def _suffixes_by_table(
        self, tables: StageTables, state: int, others: Integers, target_s: float, after: Integers
    ) -> tuple[Integers, Integers, NDArray[np.bool_]]:
        always = self.recompute == "always"
        r = tables.fewest(state, others, target_s, after, always)
        alike = np.full(len(others), always)
        if self.recompute != "auto" or np.all(tables.fewest_to_hold(state, others, after, False) <= 1):
            return after + r, r, alike
        again = tables.fewest(state, others, target_s, after, True)
        return after + np.minimum(r, again), np.minimum(r, again), again < r

    def _fewest(self, work: Work, footprint: Footprint, target_s: float, after: Integers) -> Integers:
        at_least = self.model.fewest_for_memory(footprint, after, self.memory_bytes)
        return self.model.fewest_replicas(work, target_s, at_least, after)

    def _trace(self, follow: Integers, replicas: Integers, recomputing: NDArray[np.bool_]) -> CutPath:
        states = [0]
        while states[-1] < len(self.space) - 1:
            states.append(int(follow[states[-1]]))
        options = tuple(
            StageOptions(int(replicas[i]), recompute=whole_stage(self.space.layers(i, j), bool(recomputing[i])))
            for i, j in pairwise(states)
        )
        seconds = max(
            float(self.model.stage_s(work.recomputed() if each.recompute else work, each.replicas)[0])
            for work, each in zip(self._works(states), options, strict=True)
        )
        return CutPath(tuple(states), options, seconds)

    def _works(self, states: list[int]) -> list[Work]:
        return [self.space.work(i, np.array([j])) for i, j in pairwise(states)]

    def _data_parallel(self, replicas: Integers) -> CutPath | None:
        """Return the best single stage on any of these numbers of replicas.

        It recomputes only under the rule "always": with one minibatch in flight, recomputing saves no memory.
        """
        last = len(self.space) - 1
        work = self.space.work(0, np.array([last]))
        always = self.recompute == "always"
        work = work.recomputed() if always else work
        if self.memory_bytes is not None:
            footprint = self.space.footprint(0, np.array([last]), work)
            footprint = footprint.recomputed() if always else footprint
            if np.any(np.asarray(self.model.fewest_for_memory(footprint, 0, self.memory_bytes)) > 1):
                return None
        seconds: Floats = self.model.stage_s(work, replicas)
        best = int(np.argmin(seconds))
        options = StageOptions(int(replicas[best]), recompute=whole_stage(self.space.layers(0, last), always))
        return CutPath((0, last), (options,), float(seconds[best]))
