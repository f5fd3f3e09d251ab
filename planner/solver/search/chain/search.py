"""Exact search for the asynchronous pipeline: the fewest GPUs that meet a time, and a binary search over the time.

Fix a target T. Walking from the last state to the first,

    gpus(I) = min over J of  gpus(J) + fewest_replicas(I, J, T)

is the fewest GPUs that run everything after the cut I in time T. Memory fits in the same walk: what a stage has in
flight depends only on the GPUs after it, and fewer are never worse. O(states²) per target, whatever the cluster (the
published dynamic programme is O(states²·GPUs²)). A state that leaves fewer GPUs than the layers before it need is on no
plan. Where that plan breaks a limit on the numbers of stages, the number becomes part of the state.
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
from planner.solver.problem.states import Chain
from planner.solver.search.chain.fewest import FEW_STATES, FewestReplicas
from planner.units import SLACK

_ROUGH_STATES = 300  # at most this many states in the search for a start; twice as many have such a search
_NEAR = 2e-3  # how far the best time may be below that of the start, as a first guess
_MOST_PATIENCE = 4  # halvings between two questions for anything better
ANY_TIME_S = 1e15  # every stage on any number of GPUs takes less
_CLOSE = 0.02  # relative distance of the bounds from which on each walk should be cheap


class Search:
    """Finds the fastest pipeline over a space of states, for GPUs that are alike and equally far apart."""

    def __init__(self, space: Chain, model: Bounds, limits: Limits) -> None:
        # Choices of what recomputes are looked for between a few of many states: all stages have too many of them.
        self.space, self.model, self._all_choices = space, model, limits
        self.limits = limits = replace(limits, whole_stages=limits.whole_stages or len(space) > FEW_STATES)
        self.gpus = limits.gpus
        self._must_hurry = False  # whether a walk ends at the deadline, because there is no answer yet
        self.interrupted = False  # by the deadline: there may be faster plans
        self._fewest = FewestReplicas(space, model, limits)
        self._before_s = self._fewest.before_s
        self._room = np.full(len(space), self.gpus, dtype=np.int64)  # most GPUs that may come after each state
        self._suffix = np.zeros(len(space), dtype=np.int64)  # fewest that must, from the last walk

    def best(self, below_s: float | None = None, precision: float = RESOLUTION) -> CutPath | None:
        """Return the fastest plan, and of equally fast ones the one with fewest GPUs, stages, and recomputing stages.

        None if no plan fits the memory, or none takes less than `below_s`. Other plans may be faster by `precision`.
        Raise OutOfTimeError if the deadline passes before there is any plan, and all plans are looked for.
        """
        start_s = ANY_TIME_S if below_s is None else below_s * (1 - RESOLUTION)
        if (rough := self.rough(below_s)) is not None:
            start_s = rough.seconds
        self._must_hurry = below_s is None
        best = self.within(start_s)
        self._must_hurry = False
        if best is None or (rough is not None and best.seconds > rough.seconds * (1 + RESOLUTION)):
            return rough
        if rough is not None:
            self._tighten(start_s)
        # This is a start, not an answer, so a few replica counts are enough.
        # A single stage has a closed form, and is often near the optimum.
        most = min(self.gpus, self.model.most_replicas, self.limits.most_replicas)
        alone = self._data_parallel(np.unique(np.geomspace(1, most, num=32).astype(np.int64)))
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

    def rough(self, below_s: float | None = None) -> CutPath | None:
        """Return the best plan that cuts at a few of many states only, which is near the best; None without many."""
        chooses = self._fewest.ways.chooses and self.limits != self._all_choices
        few = _ROUGH_STATES // 2 if chooses else _ROUGH_STATES
        if len(self.space) <= 2 * few:
            return None
        states = self.space.spread(few)
        path = type(self)(self.space.only(states), self.model, self._all_choices).best(below_s)
        return path and replace(path, states=tuple(states[list(path.states)].tolist()))

    def within(self, target_s: float) -> CutPath | None:
        """Return a plan with the fewest GPUs that meets the (positive) target, or None if there are too few GPUs."""
        path = self._walk(target_s)
        if path is None or self.limits.allows_stages(len(path.options)):
            return path
        return self._numbered(target_s)

    def _room_at(self, target_s: float) -> Integers:
        return np.minimum(np.floor(self.gpus - self._before_s / target_s + SLACK).astype(np.int64), self._room)

    def _walk(self, target_s: float) -> CutPath | None:
        last, before_s, room = len(self.space) - 1, self._before_s, self._room_at(target_s)
        gpus = np.full(last + 1, IMPOSSIBLE, dtype=np.int64)
        # Of the suffix: its stages, and those that recompute; the next state, and the first stage's replicas.
        stages, recomputed, follow, replicas = np.zeros((4, last + 1), dtype=np.int64)
        gpus[last] = 0
        reached = np.empty(last + 1, dtype=np.int64)  # states with a suffix that meets the target, filled from the end
        reached[last] = last
        start = last
        for state in range(last - 1, -1, -1):
            if self._must_hurry:
                self.limits.deadline.check()
            # The layers before this state need all GPUs, so no plan that meets the target has a cut here.
            if room[state] < 1:
                continue
            others = reached[start:]
            least_s = before_s[others] - before_s[state]
            least = np.maximum(np.ceil(least_s / target_s - SLACK), 1.0)
            # A stage needs at least its compute time over the target, however its all-reduce overlaps.
            others = others[gpus[others] + least <= room[state]]
            if not len(others):
                continue
            total, r, again = self.suffixes(state, others, target_s, gpus[others], int(room[state]))
            # One number orders by GPUs, then stages, then recomputing stages. Taking the first of equals makes the
            # choice deterministic.
            order = np.minimum(total, self.gpus + 1) * (last + 2) + stages[others]
            choice = int(np.argmin(order * (last + 2) + recomputed[others] + again))
            # Not even the best suffix leaves enough GPUs for the layers before the state.
            if total[choice] > room[state]:
                continue
            gpus[state], replicas[state] = total[choice], r[choice]
            follow[state], stages[state] = others[choice], stages[others[choice]] + 1
            recomputed[state] = recomputed[others[choice]] + again[choice]
            start -= 1
            reached[start] = state
        if gpus[0] > self.gpus:
            return None
        self._suffix = gpus
        states = [0]
        while states[-1] < last:
            states.append(int(follow[states[-1]]))
        return self._trace(states, [int(replicas[state]) for state in states[:-1]], target_s)

    def _numbered(self, target_s: float) -> CutPath | None:
        """Return such a plan of as many stages as there may be; the last walk's suffixes are its bounds."""
        space, last = self.space, len(self.space) - 1
        most, room = self.limits.most_stages(space, self.gpus), self._room_at(target_s)
        gpus = np.full((most + 1, last + 1), IMPOSSIBLE, dtype=np.int64)  # by the stages before, and the state
        rest = np.zeros((2, most + 1, last + 1), dtype=np.int64)  # stages of the suffix, and those that recompute
        choice = np.zeros((2, most + 1, last + 1), dtype=np.int64)  # next state and replicas
        gpus[1:, last] = 0
        useful = np.flatnonzero(self._suffix <= self.gpus)
        for place in range(len(useful) - 2, -1, -1):
            state = int(useful[place])
            others = useful[place + 1 :]
            numbers = np.arange(1) if state == 0 else np.arange(1, most)
            if not len(others) or not len(numbers):
                continue
            room_of = np.minimum(room[state], self.gpus - numbers)
            after = gpus[numbers + 1][:, others]
            rows, columns = np.nonzero(after < room_of[:, None])
            if not len(rows):
                continue
            ends = others[columns]
            total, replicas, again = self.suffixes(state, ends, target_s, after[rows, columns], int(room[state]))
            stages, recomputing = rest[:, numbers[rows] + 1, ends] + np.stack((np.ones_like(ends), again))
            order = np.lexsort((recomputing, stages, total, rows))
            for pick in order[np.unique(rows[order], return_index=True)[1]]:  # the best of each number
                number = numbers[rows[pick]]
                if total[pick] <= room_of[rows[pick]]:
                    gpus[number, state] = total[pick]
                    rest[:, number, state] = stages[pick], recomputing[pick]
                    choice[:, number, state] = ends[pick], replicas[pick]
        if gpus[0, 0] > self.gpus:
            return None
        states, chosen = [0], list[int]()
        while states[-1] < last:
            following, r = choice[:, len(chosen), states[-1]].tolist()
            states.append(following)
            chosen.append(r)
        return self._trace(states, chosen, target_s)

    def _tighten(self, target_s: float) -> None:
        """Bound the GPUs before each state by a walk forward, for all smaller targets; memory is left out."""
        # States that the last walk did not reach stay out of reach for all smaller targets.
        prefix = np.where(self._suffix < IMPOSSIBLE, self.gpus + 1, IMPOSSIBLE)
        prefix[0] = 0
        useful = np.flatnonzero(self._suffix <= self.gpus)
        target_s *= 1 + 4 * RESOLUTION  # the last walk asks for a little more than the best time
        for number, state in enumerate(useful):
            others = useful[number + 1 :]
            least = np.maximum(np.ceil((self._before_s[others] - self._before_s[state]) / target_s - SLACK), 1)
            others = others[prefix[state] + least + self._suffix[others] <= self.gpus]
            if len(others):
                r = self._fewest.alone(int(state), others, target_s)
                prefix[others] = np.minimum(prefix[others], prefix[state] + r)
        self._room = np.minimum(self._room, self.gpus - prefix)

    def suffixes(
        self, state: int, others: Integers, target_s: float, after: Integers, room: int
    ) -> tuple[Integers, Integers, NDArray[np.bool_]]:
        """Return the GPUs of the suffixes that begin with each stage, its replicas, and whether it recomputes.

        Where a suffix needs more than `room`, the answer is any larger number.
        """
        most = np.minimum(room - after, self.most_replicas(state, others))
        r, again = self._fewest.fewest(state, others, target_s, after, most)
        return np.where(r > self.most_replicas(state, others), IMPOSSIBLE, after + r), r, again

    def most_replicas(self, state: int, others: Integers) -> Integers:
        """Return the most replicas that the kind of plans allows the stages from the state to each of others."""
        return np.full(len(others), self.limits.most_replicas)

    def _trace(self, states: Sequence[int], replicas: Sequence[int], target_s: float) -> CutPath:
        after, options, seconds = sum(replicas), list[StageOptions](), 0.0
        for (i, j), r in zip(pairwise(states), replicas, strict=True):
            after -= r
            best = self._fewest.quickest(i, j, np.array([r]), after, target_s)
            assert best is not None
            options.append(best[0])
            seconds = max(seconds, best[1])
        return CutPath(tuple(states), tuple(options), seconds)

    def _data_parallel(self, replicas: Integers) -> CutPath | None:
        last = len(self.space) - 1
        best = self._fewest.quickest(0, last, replicas, 0)
        return None if best is None else CutPath((0, last), (best[0],), best[1])
