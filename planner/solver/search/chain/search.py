"""Exact search for the asynchronous pipeline: the fewest GPUs that meet a time, and a binary search
over the time.

PipeDream (SOSP 2019, section 3.1) minimises A(j, m), the time of the slowest stage of layers 1 to j
on m GPUs:

    A(j, m) = min over i, m' of  max(A(i, m - m'), transfer(i), T(i + 1, j, m'))             O(states² · GPUs²)

Here the time is fixed to a target T instead, and the GPUs are minimised. With states I and J,
between which a stage is,

    gpus(I) = min over J of  gpus(J) + fewest_replicas(I, J, T)        gpus(last) = 0        O(states²)

is the fewest GPUs that run everything after the cut I in time T, whatever the cluster. Memory fits
in the same walk: what a stage has in flight depends only on the GPUs after it, and fewer are never
worse. A state that leaves fewer GPUs than the layers before it need is on no plan. Where that plan
breaks a limit on the number of stages, the number becomes part of the state:

    gpus(I, n) = min over J of  gpus(J, n - 1) + fewest_replicas(I, J, T)                    O(states² · stages)
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.cost.candidate import StageOptions
from planner.cost.work import IMPOSSIBLE, Integers
from planner.solver.problem.bounds import Bounds
from planner.solver.problem.problem import Limits
from planner.solver.problem.result import RESOLUTION, CutPath
from planner.solver.problem.states import CutSpace
from planner.solver.search.chain.fewest import FewestReplicas
from planner.solver.search.chain.suffixes import Suffixes
from planner.solver.search.chain.targets import Targets
from planner.units import SLACK

ANY_TIME_S = 1e15  # every stage on any number of GPUs takes less


class Search:
    """Finds the fastest pipeline over a space of states, for GPUs that are alike and equally far
    apart.

    Attributes:
        interrupted: whether the deadline ended the search: there may be faster plans.
    """

    def __init__(self, space: CutSpace, model: Bounds, limits: Limits) -> None:
        self.space = space
        self.model = model
        self.gpus = limits.gpus
        self.interrupted = False

        # Over many states stages recompute whole or not at all: choices for every pair of states
        # would be too many.
        many = len(space) > limits.tuning.chain.most_choosing_states
        self._all_choices = limits
        self.limits = replace(limits, whole_stages=limits.whole_stages or many)
        self._fewest = FewestReplicas(space, model, self.limits)
        self._before_s = self._fewest.before_s

        self._must_hurry = False  # whether a walk ends at the clock, because there is no answer yet
        # GPUs that may come after each state
        self._most_after = np.full(len(space), self.gpus, dtype=np.int64)
        self._least_after = np.zeros(len(space), dtype=np.int64)  # that must, from the last walk

    def best(self, below_s: float | None = None, precision: float = RESOLUTION) -> CutPath | None:
        """Return the fastest plan, and of equally fast ones the one with fewest GPUs, stages, and
        recomputing stages.

        None if no plan fits the memory, or none takes less than `below_s`. Other plans may be
        faster by `precision`. Without `below_s`, raise OutOfTimeError if time ends before there is
        any plan; with it, the first walk runs to its end.
        """
        # 1. Start from the best plan over a few of many states, or else from any plan.
        rough = self.rough(below_s)
        start_s = ANY_TIME_S if below_s is None else below_s * (1 - RESOLUTION)
        if rough is not None:
            start_s = rough.seconds
        self._must_hurry = below_s is None
        best = self.within(start_s)
        self._must_hurry = False
        if best is None:
            return rough
        if rough is not None:
            if best.seconds > rough.seconds * (1 + RESOLUTION):
                return rough
            self._tighten(start_s)

        # 2. A single stage has a closed form, and is often near the optimum. For a start a few
        # counts are enough.
        most = min(self.gpus, self.model.most_replicas, self.limits.most_replicas)
        count = self.limits.tuning.chain.single_stage_counts
        counts = np.geomspace(1, most, count).astype(np.int64)
        alone = self._data_parallel(np.unique(counts))
        if alone is not None and alone.seconds < best.seconds:
            best = alone

        # 3. Search between the time of the best plan and what no plan is below.
        best = self._improved(best, precision, has_rough=rough is not None)

        # 4. Among equally fast plans, this walk takes the one with fewest GPUs.
        tidy = self.within(best.seconds * (1 + RESOLUTION))
        assert tidy is not None
        return tidy

    def _improved(self, best: CutPath, precision: float, *, has_rough: bool) -> CutPath:
        """Return the result of the binary search that starts from a plan."""
        low_s = float(self._before_s[-1]) / self.gpus * (1 - RESOLUTION)
        tuning = self.limits.tuning.chain
        targets = Targets(low_s, best.seconds, precision, tuning, near=has_rough)
        tighten_at_s = tuning.close_share * best.seconds
        while targets.is_open:
            if self.limits.clock.passed:
                self.interrupted = True
                break

            target_s = targets.next()
            better = self.within(target_s)
            if better is None:
                targets.missed(target_s)
                continue

            best = better
            targets.met(best.seconds)
            if targets.gap_s < tighten_at_s:
                self._tighten(target_s)
                tighten_at_s = targets.gap_s / tuning.tighten_ratio
        return best

    def rough(self, below_s: float | None = None) -> CutPath | None:
        """Return the best plan that cuts at a few of many states only, which is near the best; None
        without many.
        """
        chooses = self._fewest.ways.chooses and self.limits != self._all_choices
        few = self.limits.tuning.chain.rough_states
        if chooses:
            few //= 2
        states = self.space.rough(few)
        if states is None:
            return None

        search = type(self)(self.space.only(states), self.model, self._all_choices)
        path = search.best(below_s)
        if path is None:
            return None
        return replace(path, states=tuple(states[list(path.states)].tolist()))

    def within(self, target_s: float) -> CutPath | None:
        """Return a plan with the fewest GPUs that meets the (positive) target, or None if there are
        too few GPUs.
        """
        suffixes = self._walk(target_s)
        if suffixes.gpus[-1, 0] > self.gpus:
            return None
        self._least_after = suffixes.gpus[-1]

        states, replicas = suffixes.path()
        if not self.limits.allows_stages(len(replicas)):
            suffixes = self._walk(target_s, self.limits.most_stages(self.space, self.gpus))
            if suffixes.gpus[-1, 0] > self.gpus:
                return None
            states, replicas = suffixes.path()
        return self._trace(states, replicas, target_s)

    def _walk(self, target_s: float, most_stages: int | None = None) -> Suffixes:
        """Return the best suffixes that meet the target, of any number of stages or at most so
        many.
        """
        suffixes = Suffixes(len(self.space), most_stages)
        room = self._room(target_s)
        for state in range(len(self.space) - 2, -1, -1):
            if self._must_hurry:
                self.limits.clock.check()

            # 1. If the layers before I need all GPUs, no plan that meets the target has a cut here.
            most = int(room[state])
            if most < 1:
                continue

            # 2. J: a stage needs at least its computation over T, however its all-reduce overlaps.
            others = self.space.containing(state, suffixes.reached)
            after = suffixes.following[:, others]
            least = self._fewest.by_compute(state, others, target_s)
            rows, columns = np.nonzero(after + least <= most)
            if not len(rows):
                continue
            others = others[columns]
            after = after[rows, columns]

            # 3. gpus(J) + fewest_replicas(I, J, T)
            gpus, replicas, recomputes = self.suffixes(state, others, target_s, after, most)

            # 4. min over J: the first of equals, which makes the choice deterministic.
            order = suffixes.ranked(rows, others, np.minimum(gpus, self.gpus + 1), recomputes)
            begins = np.flatnonzero(np.diff(rows, prepend=-1))
            for begin, end in pairwise([*begins.tolist(), len(rows)]):
                pick = begin + int(np.argmin(order[begin:end]))
                if gpus[pick] <= most:
                    suffixes.put(
                        int(rows[pick]),
                        state,
                        int(others[pick]),
                        int(replicas[pick]),
                        int(gpus[pick]),
                        bool(recomputes[pick]),
                    )
        return suffixes

    def _room(self, target_s: float) -> Integers:
        """Return how many GPUs the layers before each state leave for those after it."""
        room = np.floor(self.gpus - self._before_s / target_s + SLACK).astype(np.int64)
        return np.minimum(room, self._most_after)

    def _tighten(self, target_s: float) -> None:
        """Bound the GPUs before each state by a walk forward, for all smaller targets; memory is
        left out.

        before(J) = min over I of  before(I) + fewest_replicas(I, J, T)        before(first) = 0
        """
        target_s *= 1 + 4 * RESOLUTION  # the last walk asks for a little more than the best time

        # States that the last walk did not reach stay out of reach for all smaller targets.
        before = np.where(self._least_after < IMPOSSIBLE, self.gpus + 1, IMPOSSIBLE)
        before[0] = 0
        useful = np.flatnonzero(self._least_after <= self.gpus)
        for number, state in enumerate(useful.tolist()):
            others = self.space.containing(state, useful[number + 1 :])
            least = self._fewest.by_compute(state, others, target_s)
            others = others[before[state] + least + self._least_after[others] <= self.gpus]
            if len(others):
                replicas = self._fewest.whatever_memory(state, others, target_s)
                before[others] = np.minimum(before[others], before[state] + replicas)
        self._most_after = np.minimum(self._most_after, self.gpus - before)

    def suffixes(
        self, state: int, others: Integers, target_s: float, after: Integers, room: int
    ) -> tuple[Integers, Integers, NDArray[np.bool_]]:
        """Return the GPUs of the suffixes that begin with each stage, its replicas, and whether it
        recomputes.

        Where a suffix needs more than `room`, the answer is any larger number.
        """
        allowed = self.most_replicas(state, others)
        most = np.minimum(room - after, allowed)
        replicas, recomputes = self._fewest.fewest(state, others, target_s, after, most)
        gpus = np.where(replicas > allowed, IMPOSSIBLE, after + replicas)
        return gpus, replicas, recomputes

    def most_replicas(self, state: int, others: Integers) -> Integers:
        """Return the most replicas that the kind of plans allows the stages from the state to each
        of others.
        """
        return np.full(len(others), self.limits.most_replicas)

    def _trace(self, states: Sequence[int], replicas: Sequence[int], target_s: float) -> CutPath:
        """Return the path of these stages, each in the best way to run it."""
        after = sum(replicas)
        options = list[StageOptions]()
        seconds = 0.0
        for (state, other), r in zip(pairwise(states), replicas, strict=True):
            after -= r
            quickest = self._fewest.quickest(state, other, np.array([r]), after, target_s)
            assert quickest is not None
            options.append(quickest[0])
            seconds = max(seconds, quickest[1])
        return CutPath(tuple(states), tuple(options), seconds)

    def _data_parallel(self, replicas: Integers) -> CutPath | None:
        """Return the fastest plan of one stage with any of these numbers of replicas."""
        last = len(self.space) - 1
        quickest = self._fewest.quickest(0, last, replicas, 0)
        if quickest is None:
            return None
        options, seconds = quickest
        return CutPath((0, last), (options,), seconds)
