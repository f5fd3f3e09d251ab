"""Exact search for synchronous pipelines: minimise a sum over the stages plus a maximum over them.

With the maximum bounded by X, each stage takes the fewest replicas that respect X, because replicas do not change the
sum. A shortest path over (state, GPUs left) then gives the least sum. Lowering X below each answer's maximum walks
along the answers that trade sum against maximum, until the sum alone is no better than the best total.
O(states²·GPUs) per answer.

Under 1f1b-flush, the more GPUs follow a stage, the more it holds. Where memory is limited, a stage on r replicas
therefore allows only so many GPUs after it, and more replicas may allow more. So all replica counts are tried, not only
the fewest.

A stage that is sharded or recomputes layers is one more choice each; the latter only where the stage without
recomputation does not always fit. The number of a stage is one more axis only where a limit on numbers binds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.models.synchronous import SynchronousModel
from planner.cost.stage_options import StageOptions
from planner.cost.work import Floats, Integers
from planner.solver.candidates.budget import OutOfTimeError
from planner.solver.chain.search import RESOLUTION
from planner.solver.chain.states import StateSpace
from planner.solver.chain.ways import Ways, WaysOf
from planner.solver.problem import Limits
from planner.solver.result import CutPath

_BATCH = 2**20  # entries of an array over stages and GPUs


@dataclass(frozen=True)
class _Stages:
    """The ways to run the stages that begin at one state."""

    ways: Ways
    sum_s: Floats
    max_s: Floats  # by replicas - 1 and way; not a number where memory does not suffice
    after: Integers  # most GPUs that may follow, by replicas - 1 and way

    @property
    def others(self) -> Integers:
        """States at which they end."""
        return self.ways.others


class SynchronousSearch:
    """Finds the fastest gpipe, 1f1b-flush or naive plan over a space of states."""

    def __init__(self, space: StateSpace, model: SynchronousModel, limits: Limits) -> None:
        self.deadline, self.interrupted = limits.deadline, False  # interrupted: there may be faster plans
        self._cut_short = False  # whether the deadline ended the last walk
        self.found: list[CutPath] = []  # on the way to the best: each has a larger sum and a smaller maximum
        # Replicas beyond the number of microbatches would idle, and naive runs one microbatch at a time.
        most = 1 if not model.schedule.pipelined else min(limits.gpus, model.microbatches)
        self.space, self.model, self.limits, self.memory_bytes = space, model, limits, limits.memory_bytes
        self.gpus = min(limits.gpus, most * (len(space) - 1))
        self._replicas = np.arange(1, most + 1)
        self._ways = WaysOf(space, limits)
        self._ends = [self._possible(state) for state in range(len(space) - 1)]
        self._stages = [self._from(state) for state in range(len(space) - 1)]

    def best(self, precision: float = RESOLUTION) -> CutPath | None:
        """Return the fastest plan, with few GPUs among equally fast ones; None if no plan fits the memory.

        Args:
            precision: how much faster, relatively, other plans may be.

        Raises:
            OutOfTimeError: if the deadline passes before there is any plan.
        """
        best: CutPath | None = None
        limit_s = self._promising_s() if precision > RESOLUTION else np.inf
        while (answer := self.within(limit_s)) is not None:
            path, sum_s, max_s = answer
            self.found.append(path)
            if best is None or path.seconds < best.seconds:
                best = path
            # A better plan needs a smaller maximum than this one's, and a total below the best. The limit is the
            # maximum itself: rounding could leave seconds minus sum above it, and the loop would never end.
            limit_s = min(max_s, best.seconds - sum_s) * (1 - precision)
            if limit_s <= 0:
                break
            if self.deadline.passed:
                self.interrupted = True
                break
        self.interrupted |= self._cut_short
        return best

    def _promising_s(self) -> float:
        """Return a limit that leaves out nothing but plans slower than one that is balanced well.

        The way from no limit at all to a balanced plan is long, and plans on it are of no use.
        """
        everything = self.space.work(0, np.array([len(self.space) - 1]))
        answer, limit_s = None, float(self.model.microbatches * everything.compute_s[0]) / self.gpus
        least = self.within(np.inf)
        if least is None or not self.model.schedule.pipelined or limit_s <= 0:
            return np.inf
        while answer is None:
            limit_s *= 2
            answer = self.within(limit_s)
        return max(answer[0].seconds - least[1], answer[2])

    def within(self, limit_s: float) -> tuple[CutPath, float, float] | None:
        """Return the path of least sum with a maximum within the limit, its sum and its maximum; None without one."""
        answer, numbering = self._walk(limit_s, 0), self.limits.numbering
        if answer is None or numbering.allows_path(self.space, answer[0].states):
            return answer
        return self._walk(limit_s, numbering.most(self.space, self.gpus))

    def _walk(self, limit_s: float, numbers: int) -> tuple[CutPath, float, float] | None:
        """Return the same for plans of so many stages at most, whose numbers are allowed; for 0, for any stages."""
        last, many = len(self.space) - 1, max(numbers, 1)
        self._cut_short = False
        # Least sum of the suffix, by the number of its first stage, state, and the GPUs it may use.
        sums = np.full((many + 1, last + 1, self.gpus + 1), np.inf)
        sums[:, last] = 0.0
        # For each of these, the best stage's way and its replicas.
        choices = np.zeros((2, many, last, self.gpus + 1), dtype=np.int64)
        for state in range(last - 1, -1, -1):
            if self.deadline.passed:
                if not self.found:
                    raise OutOfTimeError
                self._cut_short = True  # there is an answer already
                return None
            stages = self._stages[state]
            ends = self._ends[state]
            may = self.limits.numbering.numbers(self.space, state, ends, many)
            for ways, r in self._worth_a_try(stages, limit_s):
                left = np.arange(self.gpus + 1) - r[:, None]
                after = np.minimum(np.maximum(left, 0), stages.after[r - 1, ways][:, None])
                for number in range(many):
                    rest = sums[number + 1 if numbers else 0]
                    totals = stages.sum_s[ways, None] + rest[stages.others[ways, None], after]
                    totals[left < 0] = np.inf
                    if numbers:
                        totals[~may[number, stages.ways.stage[ways]]] = np.inf
                    pick = totals.argmin(axis=0)
                    least = totals[pick, np.arange(self.gpus + 1)]
                    better = least < sums[number, state]
                    sums[number, state, better] = least[better]
                    choices[0, number, state, better] = ways[pick[better]]
                    choices[1, number, state, better] = r[pick[better]]
        if not np.isfinite(sums[0, 0, self.gpus]):
            return None
        # Among equal sums the fewest GPUs win; rounding must not make more of them look better.
        enough = int(np.argmax(sums[0, 0] <= sums[0, 0, self.gpus] * (1 + RESOLUTION)))
        return self._trace(choices, enough)

    def _worth_a_try(self, stages: _Stages, limit_s: float) -> Iterator[tuple[Integers, Integers]]:
        """Yield ways and their replicas that are worth a try, by ascending replicas, as many as suit one array.

        Each way is tried with the fewest replicas that respect the limit. With more it has fewer microbatches in
        flight, which is worth a try where that allows more GPUs after it than fewer replicas do.
        """
        meets = stages.max_s <= limit_s
        after = np.maximum.accumulate(np.where(meets, stages.after, -1), axis=0)
        before = np.concatenate((np.full((1, meets.shape[1]), -1), after[:-1]))  # with fewer replicas
        room = self.gpus - self._replicas[:, None]
        rows, columns = np.nonzero(meets & (stages.after > before) & (before < room))
        batch = max(1, _BATCH // (self.gpus + 1))
        for start in range(0, len(rows), batch):
            yield columns[start : start + batch], self._replicas[rows[start : start + batch]]

    def _possible(self, state: int) -> Integers:
        """Return where a stage from this state may end so that what it holds in any case fits the memory."""
        others = self.space.among_later(state, np.arange(state + 1, len(self.space)))
        if self.memory_bytes is None or not len(others):
            return others
        footprint = self.space.footprint(state, others, self.space.work(state, others))
        shards = min(self.gpus, self._ways.most_sharded) if self._ways.shards else 1
        held = footprint.weight_bytes + footprint.fixed_weight_bytes + footprint.optimizer_bytes / shards
        held = held + (footprint.gradient_bytes if self.model.microbatches > 1 else 0.0)
        fits = np.array(np.broadcast_to(held, others.shape) <= self.memory_bytes)
        fits[0] = True  # no state is without any stage
        return others[fits]

    def _from(self, state: int) -> _Stages:
        self.deadline.check()
        others = self._ends[state]
        plainest = self._priced(self._ways.all(state, others, np.zeros(len(others), dtype=bool)))
        if not self._ways.chooses:
            return plainest
        # Recomputing costs time, so it is a choice only where some number of GPUs after the stage does not fit.
        limited = (np.isnan(plainest.max_s) | (plainest.after < self.gpus)).any(axis=0)
        tight = np.bincount(plainest.ways.stage, limited & ~plainest.ways.sharded, len(others)) > 0
        return self._priced(self._ways.all(state, others, tight)) if tight.any() else plainest

    def _priced(self, ways: Ways) -> _Stages:
        replicas, shape = self._replicas[:, None], (len(self._replicas), len(ways))
        max_s = np.array(np.broadcast_to(self.model.max_s(ways.work, replicas), shape))
        max_s[~ways.allowed(np.broadcast_to(replicas, shape))] = np.nan
        after = np.full(shape, self.gpus, dtype=np.int64)
        if self.memory_bytes is not None:
            footprint = ways.footprint_on(replicas).divided(self.model.microbatches)
            # With nothing after it a stage holds least, with everything most.
            held = footprint.total_bytes(self.model.in_flight(self._replicas, 0)[:, None], 1)
            max_s[held > self.memory_bytes] = np.nan
            most = footprint.most_in_flight(self.memory_bytes, stashing=False)
            least_room = self.model.in_flight(self._replicas, self.gpus)[:, None] > most
            after = np.where(least_room, np.maximum(most - 1, 0) * replicas, after)
            max_s[_of_no_use(ways, max_s, after)] = np.nan
        sum_s = np.broadcast_to(self.model.sum_s(ways.work), len(ways))
        return _Stages(ways, sum_s, max_s, after)

    def _trace(self, choices: Integers, gpus: int) -> tuple[CutPath, float, float]:
        """Return the path of the choices, by number, state and GPUs left, with so many GPUs."""
        states, sums, most_s = [0], 0.0, 0.0
        options: list[StageOptions] = []
        while (state := states[-1]) < len(self.space) - 1:
            number = min(len(options), choices.shape[1] - 1)  # a walk without numbers has 0 alone
            way, r = (int(each) for each in choices[:, number, state, gpus])
            stages = self._stages[state]
            states.append(int(stages.others[way]))
            options.append(stages.ways.options(way, r))
            sums += float(stages.sum_s[way])
            most_s = max(most_s, float(stages.max_s[r - 1, way]))
            gpus = min(gpus - r, int(stages.after[r - 1, way]))
        return CutPath(tuple(states), tuple(options), sums + most_s), sums, most_s


def _of_no_use(ways: Ways, max_s: Floats, after: Integers) -> NDArray[np.bool_]:
    """Return which ways, by replicas, allow no more GPUs after the stage than one that recomputes less."""
    useless = np.zeros(max_s.shape, dtype=bool)
    allowed = np.where(np.isnan(max_s), -1, after)
    starts = np.flatnonzero(np.diff(ways.stage, prepend=-1))
    for first, end in zip(starts, [*starts[1:], len(ways)], strict=True):
        for sharded in (False, True):
            rows = first + np.flatnonzero(ways.sharded[first:end] == sharded)
            if len(rows) > 1:
                most = np.maximum.accumulate(allowed[:, rows], axis=1)
                useless[:, rows[1:]] = most[:, 1:] <= most[:, :-1]
    return useless
