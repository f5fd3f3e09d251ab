"""Exact search for the asynchronous pipeline: the fewest GPUs that meet a time, and a binary search
over the time.

PipeDream (SOSP 2019, section 3.1) minimises A(j, m), the time of the slowest stage of layers 1 to j
on m GPUs:

    A(j, m) = min over i, m' of  max(A(i, m - m'), transfer(i), T(i + 1, j, m'))

in O(states² · GPUs²).

Here the time is fixed to a target T instead, and the GPUs are minimised. With states I and J,
between which a stage is,

    gpus(last) = 0
    gpus(I)    = min over J of  gpus(J) + fewest_replicas(I, J, T)

is the fewest GPUs that run everything after the cut I in time T, whatever the cluster, found in
O(states²). Memory fits
in the same walk: what a stage has in flight depends only on the GPUs after it, and fewer are never
worse. A state that leaves fewer GPUs than the layers before it need is on no plan. Where that plan
breaks a limit on the number of stages, the number becomes part of the state:

    gpus(I, n) = min over J of  gpus(J, n - 1) + fewest_replicas(I, J, T)

in O(states² · stages).
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.cost.candidate import StageOptions
from planner.cost.work import IMPOSSIBLE, Integers
from planner.formats.files import replace
from planner.solver.clock import OutOfTimeError
from planner.solver.problem.problem import Limits
from planner.solver.problem.replica_models import ReplicaModel
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

    def __init__(self, space: CutSpace, model: ReplicaModel, limits: Limits) -> None:
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

        # GPUs that may come after each state, and that must, from the last walk
        self._most_after = np.full(len(space), self.gpus, dtype=np.int64)
        self._least_after = np.zeros(len(space), dtype=np.int64)

    def best(self, below_s: float = np.inf, precision: float = RESOLUTION) -> CutPath | None:
        """Return the fastest plan, and of equally fast ones the one with fewest GPUs, stages, and
        recomputing stages; None if no plan fits the memory, or none takes less than `below_s`.

        Other plans may be faster by `precision`. Raise OutOfTimeError if the deadline passes before
        any plan is found.
        """
        rough = self.rough(below_s)
        best = rough
        try:
            for better in self._ever_better(rough, below_s, precision):
                best = better
        except OutOfTimeError:
            if best is None:
                raise
            self.interrupted = True

        return best

    def _ever_better(
        self, rough: CutPath | None, below_s: float, precision: float
    ) -> Iterator[CutPath]:
        """Yield plans, the best at last; none where none is as fast as the rough one."""
        # 1. A plan as fast as the best over a few of the states, or else any plan.
        if rough is None:
            start_s = min(ANY_TIME_S, below_s * (1 - RESOLUTION))
        else:
            start_s = rough.seconds

        best = self.within(start_s)
        if best is None:
            return

        if rough is not None:
            if best.seconds > rough.seconds * (1 + RESOLUTION):
                return
            self._tighten(start_s)

        yield best

        # 2. A single stage has a closed form, and is often near the optimum.
        single = self.single_stage()
        if single is not None and single.seconds < best.seconds:
            best = single

        # 3. Search between the time of the best plan and what no plan is below.
        low_s = float(self._before_s[-1]) / self.gpus * (1 - RESOLUTION)
        tuning = self.limits.tuning.chain
        targets = Targets(low_s, best.seconds, precision, tuning, near=rough is not None)
        tighten_at_s = tuning.close_share * best.seconds
        while targets.is_open:
            yield best
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

        yield best

        # 4. Among equally fast plans, this walk takes the one with fewest GPUs.
        tidy = self.within(best.seconds * (1 + RESOLUTION))
        assert tidy is not None
        yield tidy

    def rough(self, below_s: float = np.inf) -> CutPath | None:
        """Return the best plan that cuts at a few of many states only, which is near the best; None
        without many.
        """
        few = self.limits.tuning.chain.rough_states
        if self._fewest.variants.chooses and self.limits != self._all_choices:
            few //= 2
        states = self.space.rough(few)
        if states is None:
            return None

        path = type(self)(self.space.only(states), self.model, self._all_choices).best(below_s)
        if path is None:
            return None
        return path.over(states)

    def within(self, target_s: float) -> CutPath | None:
        """Return a plan with the fewest GPUs that meets the (positive) target, or None if there are
        too few GPUs. Raise OutOfTimeError if the deadline passes.
        """

        def walk(most_stages: int | None) -> CutPath | None:
            suffixes = self._walk(target_s, most_stages)
            if suffixes.gpus[-1, 0] > self.gpus:
                return None

            if most_stages is None:
                self._least_after = suffixes.gpus[-1]
            return self._trace(*suffixes.path(), target_s)

        return self.limits.of_few_stages(walk, self.space, self.gpus)

    def _walk(self, target_s: float, most_stages: int | None = None) -> Suffixes:
        """Return the best suffixes that meet the target, of any number of stages or at most so
        many.
        """
        suffixes = Suffixes(len(self.space), most_stages)
        room = self._room(target_s)
        for state in range(len(self.space) - 2, -1, -1):
            self.limits.clock.check()

            # 1. If the layers before I need all GPUs, no plan that meets the target has a cut here.
            most = int(room[state])
            if most < 1:
                continue

            # 2. J: a stage needs at least its computation over T, however its all-reduce overlaps.
            ends = self.space.containing(state, suffixes.reached)
            after = suffixes.following[:, ends]
            least = self._fewest.by_compute(state, ends, target_s)
            rows, columns = np.nonzero(after + least <= most)
            if not len(rows):
                continue

            ends = ends[columns]
            after = after[rows, columns]

            # 3. gpus(J) + fewest_replicas(I, J, T)
            gpus, replicas, recomputes = self.suffixes(state, ends, target_s, after, most)

            # 4. min over J: the first of equals, which makes the choice deterministic.
            order = suffixes.ranked(rows, ends, np.minimum(gpus, self.gpus + 1), recomputes)
            begins = np.flatnonzero(np.diff(rows, prepend=-1))
            for begin, end in pairwise([*begins.tolist(), len(rows)]):
                pick = begin + int(np.argmin(order[begin:end]))
                if gpus[pick] <= most:
                    suffixes.put(
                        int(rows[pick]),
                        state,
                        int(ends[pick]),
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
        # The last walk asks for a little more than the best time.
        target_s *= 1 + 4 * RESOLUTION

        # 1. States that the last walk did not reach stay out of reach for all smaller targets.
        reached = self._least_after < IMPOSSIBLE
        before = np.where(reached, self.gpus + 1, IMPOSSIBLE)
        before[0] = 0
        useful = np.flatnonzero(self._least_after <= self.gpus)

        # 2. From each state, the stages that leave enough GPUs for those after them.
        for number, state in enumerate(useful.tolist()):
            self.limits.clock.check()
            ends = self.space.containing(state, useful[number + 1 :])
            least = self._fewest.by_compute(state, ends, target_s)
            needed = before[state] + least + self._least_after[ends]
            ends = ends[needed <= self.gpus]
            if len(ends):
                replicas = self._fewest.whatever_memory(state, ends, target_s)
                before[ends] = np.minimum(before[ends], before[state] + replicas)

        self._most_after = np.minimum(self._most_after, self.gpus - before)

    def suffixes(
        self, state: int, ends: Integers, target_s: float, after: Integers, room: int
    ) -> tuple[Integers, Integers, NDArray[np.bool_]]:
        """Return the GPUs of the suffixes that begin with each stage, its replicas, and whether it
        recomputes.

        Where a suffix needs more than `room`, the answer is any larger number.
        """
        allowed = self.most_replicas(state, ends)
        most = np.minimum(room - after, allowed)
        replicas, recomputes = self._fewest.fewest(state, ends, target_s, after, most)
        gpus = np.where(replicas > allowed, IMPOSSIBLE, after + replicas)
        return gpus, replicas, recomputes

    def most_replicas(self, state: int, ends: Integers) -> Integers:
        """Return the most replicas that the kind of plans allows the stages from the state to each
        of others.
        """
        return np.full(len(ends), self.limits.most_replicas)

    def _trace(self, states: Sequence[int], replicas: Sequence[int], target_s: float) -> CutPath:
        """Return the path of these stages, each in the best way to run it."""
        after = sum(replicas)
        options = list[StageOptions]()
        seconds = 0.0
        for (state, end), count in zip(pairwise(states), replicas, strict=True):
            after -= count
            quickest = self._fewest.quickest(state, end, np.array([count]), after, target_s)
            assert quickest is not None
            stage_options, stage_s = quickest
            options.append(stage_options)
            seconds = max(seconds, stage_s)

        return CutPath(tuple(states), tuple(options), seconds)

    def single_stage(self) -> CutPath | None:
        """Return the fastest plan of one stage; on many GPUs, of some numbers of replicas."""
        last = len(self.space) - 1
        quickest = self._fewest.quickest(0, last, self._counts(), 0)
        if quickest is None:
            return None

        options, seconds = quickest
        return CutPath((0, last), (options,), seconds)

    def _counts(self) -> Integers:
        """Return the numbers of replicas of a single stage that are tried."""
        count = self.limits.tuning.chain.single_stage_counts
        counts = np.geomspace(1, self._most_alone, count).astype(np.int64)
        return np.unique(counts)

    @property
    def _most_alone(self) -> int:
        """The most replicas of a single stage."""
        return min(self.gpus, self.model.most_replicas, self.limits.most_replicas)
