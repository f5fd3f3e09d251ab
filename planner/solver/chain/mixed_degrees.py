"""Exact search over cuts for the asynchronous pipeline whose stages divide their layers over any allowed ranks.

A replica of t ranks counts t GPUs, and one unit in flight before it. So what a suffix costs the stages before it is a
pair: its GPUs, and its replicas, on which their units in flight depend. For a target T each state keeps the pairs that
no other one beats in both, and the walk of `search` goes over them:

    pairs(I) = best of  pairs(J) + (t·r, r)    with r the fewest replicas of t ranks for I to J that meet T and fit

More replicas than the fewest are worse in both numbers, so none are missing. With one degree both numbers are equal,
and each state has one pair. (Tarnawski et al., "Piper", NeurIPS 2021, have a table over both instead.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from planner.cost.rounding import SLACK
from planner.cost.stage_options import StageOptions
from planner.cost.work import Floats, Integers
from planner.solver.bounds.bounds import Bounds
from planner.solver.chain.fewest import FewestReplicas
from planner.solver.chain.search import RESOLUTION
from planner.solver.chain.states import StateSpace
from planner.solver.problem import Limits
from planner.solver.result import CutPath

_FAR = 4.0  # ratio of the bounds from which on their geometric mean is between them
_CLOSE = 2e-3  # relative distance of the bounds from which on each question is for anything better


@dataclass(frozen=True)
class _Pairs:
    """What suffixes that begin at one state need, ascending by GPUs and descending by replicas.

    Attributes:
        gpus, replicas: of the suffix.
        stages: their number.
        degree, own: of the first stage, and its replicas.
        other, pair: where it ends, and which of that state's pairs follows.
    """

    gpus: Integers
    replicas: Integers
    stages: Integers
    degree: Integers
    own: Integers
    other: Integers
    pair: Integers

    def unbeaten(self) -> _Pairs:
        """Return the pairs that no other one beats in both numbers, those of fewest stages among equals."""
        order = np.lexsort((self.degree, self.stages, self.replicas, self.gpus))
        replicas = self.replicas[order]
        fewer = np.concatenate(([True], replicas[1:] < np.minimum.accumulate(replicas)[:-1]))
        return _Pairs(*(column[order[fewer]] for column in vars(self).values()))

    def and_(self, others: _Pairs) -> _Pairs:
        """Return both."""
        return _Pairs(*map(np.concatenate, zip(vars(self).values(), vars(others).values(), strict=True)))


_END = _Pairs(*np.zeros((7, 1), dtype=np.int64))


class MixedDegrees:
    """Finds the fastest pipeline over states that all degrees have in common.

    Args:
        spaces: of the same states in the same order, by degree.
        model: of the schedule.
        limits: of the plans.
    """

    def __init__(self, spaces: Mapping[int, StateSpace], model: Bounds, limits: Limits) -> None:
        self._space = next(iter(spaces.values()))
        self._gpus, self._limits, self._last = limits.gpus, limits, len(self._space) - 1
        self._fewest = {
            degree: FewestReplicas(space, model, limits) for degree, space in spaces.items() if degree <= limits.gpus
        }
        self._before_s = self._least_gpu_seconds()
        self.interrupted = False  # by the deadline: there may be faster plans

    def best(self, below_s: float) -> CutPath | None:
        """Return the fastest plan that takes less than the seconds; None without one.

        Raises:
            OutOfTimeError: if the deadline passes within a walk.
        """
        best, best_s = None, below_s
        for degree, fewest in self._fewest.items():  # a single stage has a closed form, and is often near the optimum
            alone = fewest.quickest(0, self._last, np.arange(1, self._gpus // degree + 1), 0)
            if alone is not None and alone[1] < best_s:
                options = replace(alone[0], tensor=degree)
                best, best_s = CutPath((0, self._last), (options,), alone[1]), alone[1]
        low_s = float(self._before_s[-1]) / self._gpus * (1 - RESOLUTION)
        while low_s < (goal_s := best_s * (1 - RESOLUTION)):
            if self._limits.deadline.passed:
                self.interrupted = True
                break
            middle_s = (low_s + goal_s) / 2 if goal_s < _FAR * low_s else (low_s * goal_s) ** 0.5
            target_s = goal_s if goal_s - low_s < _CLOSE * goal_s else middle_s
            if (path := self.within(target_s)) is None:
                low_s = target_s
            else:
                best, best_s = path, path.seconds
        return best

    def within(self, target_s: float) -> CutPath | None:
        """Return a plan with the fewest GPUs that meets the target; None without one."""
        pairs: dict[int, _Pairs] = {self._last: _END}
        room = np.floor(self._gpus - self._before_s / target_s + SLACK).astype(np.int64)
        for state in range(self._last - 1, -1, -1):
            self._limits.deadline.check()
            if room[state] >= 1 and (found := self._from(state, pairs, target_s, int(room[state]))) is not None:
                pairs[state] = found
        return self._traced(pairs, target_s) if 0 in pairs else None

    def _from(self, state: int, pairs: Mapping[int, _Pairs], target_s: float, room: int) -> _Pairs | None:
        """Return the pairs of suffixes that begin at the state, within so many GPUs."""
        found: _Pairs | None = None
        later = self._space.among_later(state, np.array(sorted(pairs)))
        known = [pairs[other] for other in later.tolist()]
        if not known:
            return None
        sizes = [len(each.gpus) for each in known]
        others, pair = np.repeat(later, sizes), np.concatenate([np.arange(size) for size in sizes])
        gpus, after, stages = (
            np.concatenate([getattr(each, name) for each in known]) for name in ("gpus", "replicas", "stages")
        )
        for degree, fewest in self._fewest.items():
            most = (room - gpus) // degree
            rows = np.flatnonzero(fewest.least(state, others, target_s) <= most)
            if not len(rows):
                continue
            r, _ = fewest.fewest(state, others[rows], target_s, after[rows], most[rows])
            rows, r = rows[r <= most[rows]], r[r <= most[rows]]
            degrees = np.full(len(rows), degree)
            more = (gpus[rows] + degree * r, after[rows] + r, stages[rows] + 1, degrees, r, others[rows], pair[rows])
            found = _Pairs(*more) if found is None else found.and_(_Pairs(*more))
        return None if found is None or not len(found.gpus) else found.unbeaten()

    def _traced(self, pairs: Mapping[int, _Pairs], target_s: float) -> CutPath:
        states, options, seconds, pair = [0], list[StageOptions](), 0.0, 0
        while (state := states[-1]) < self._last:
            own = pairs[state]
            degree, r, other = (int(column[pair]) for column in (own.degree, own.own, own.other))
            best = self._fewest[degree].quickest(state, other, np.array([r]), int(own.replicas[pair]) - r, target_s)
            assert best is not None
            options.append(replace(best[0], tensor=degree))
            seconds = max(seconds, best[1])
            states.append(other)
            pair = int(own.pair[pair])
        return CutPath(tuple(states), tuple(options), seconds)

    def _least_gpu_seconds(self) -> Floats:
        """Return GPU seconds of the layers before each state, at least, however they are divided."""
        least = np.full(self._last + 1, np.inf)
        least[0] = 0.0
        for state in range(1, self._last + 1):
            for degree, fewest in self._fewest.items():
                before_s = degree * fewest.before_s
                least[state] = min(least[state], float(np.min(least[:state] + before_s[state] - before_s[:state])))
        return least
