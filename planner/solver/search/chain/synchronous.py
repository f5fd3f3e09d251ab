"""Exact search for synchronous pipelines: minimise a sum over the stages plus a maximum over them.

With the maximum bounded by X, a shortest path over (state, GPUs left) gives the least sum. Lowering X below each
answer's maximum walks along the answers that trade sum against maximum, until the sum alone is no better than the best
total. O(states²·GPUs) per answer. Replicas do not change the sum, so each stage takes the fewest that respect X, or
more where memory then allows more GPUs after it.

In a cluster of thousands of GPUs, all counts are multiples of a unit, or the tables would fill the memory. What is
found then may not be the best (`interrupted`).
"""

from collections.abc import Hashable, Iterator
from dataclasses import replace

import numpy as np

from planner.cost.candidate import StageOptions
from planner.cost.models.synchronous import SynchronousModel
from planner.cost.work import Floats, Integers, Work
from planner.solver.clock import NO_LIMIT, OutOfTimeError
from planner.solver.problem.problem import Limits
from planner.solver.problem.result import RESOLUTION, CutPath
from planner.solver.problem.states import Chain
from planner.solver.search.chain.ways import Stages, WaysOf, stages_alike

COARSE = 1e-2
_MOST_SINGLE_GPUS = 1024  # in larger clusters, GPUs are counted in units where tables would have more entries than:
_MOST_ENTRIES = 2**23
_MOST_KEPT = 2**23  # entries of tables that are kept for other searches over a space, about
_STEP = 1.25  # from one limit to the next, on the way to a plan that is balanced well
_BATCH = 2**20  # entries of an array over stages and GPUs


# All stages, and the answers to what was asked of them: the best path, and those found on the way to it.
_Table = tuple[list[Stages], dict[Hashable, tuple[CutPath | None, list[CutPath]]]]
# By what the stages of a space depend on: what they hold, and what they take on these links.
_Tables = dict[Hashable, _Table]


class SynchronousSearch:
    """Finds the fastest gpipe or 1f1b-flush plan, in which all replicas are multiples of a number."""

    def __init__(self, space: Chain, model: SynchronousModel, limits: Limits, multiple: int = 1) -> None:
        self.clock, self.interrupted = limits.clock, False  # interrupted: there may be faster plans
        self._cut_short = False  # whether the deadline ended the last walk
        self.found: list[CutPath] = []  # on the way to the best: each has a larger sum and a smaller maximum
        # Replicas beyond the number of microbatches would idle.
        most = min(limits.gpus, model.microbatches, limits.most_replicas)
        self.space, self.model, self.limits = space, model, limits
        self._unit, many = 1, limits.gpus > _MOST_SINGLE_GPUS
        while many and self._unit < most and len(space) ** 2 // 2 * most // self._unit > _MOST_ENTRIES:
            self._unit *= 2  # twice the GPUs have twice the unit
        gpus = min(limits.gpus, most * (len(space) - 1))
        self.gpus = gpus // self._unit  # in units, and so are those of all stages
        self._replicas = np.arange(1, most // self._unit + 1)
        self._ways = WaysOf(space, limits)
        tables = space.memo.table(SynchronousSearch, _Tables)
        alike = replace(limits, clock=NO_LIMIT, rules=replace(limits.rules, max_stages=None))
        # Links that take the same seconds are one key, however their all-reduces' bandwidth is written.
        link = replace(model.link, all_reduce_bandwidth_bytes_per_s=model.link.ring_bytes_per_s)
        key = model.schedule.name, model.microbatches, link, alike
        if key not in tables:

            def parts_s(work: Work, replicas: Integers) -> tuple[Floats, Floats]:
                return model.sum_s(work), model.max_s(work, replicas)

            alike_s = stages_alike(self._ways, model.schedule, model.microbatches, parts_s, most, gpus, self._unit)
            tables[key] = alike_s, {}
        self._stages, self._answers = tables[key]
        if multiple > 1:
            uneven = (self._replicas * self._unit % multiple > 0)[:, None]
            self._stages = [replace(each, max_s=np.where(uneven, np.nan, each.max_s)) for each in self._stages]
        self._asked = multiple, limits.rules.max_stages
        if sum(each.after.size for stages, _ in tables.values() for each in stages) > _MOST_KEPT:
            tables.clear()

    def best(self, precision: float = RESOLUTION, below_s: float = np.inf) -> CutPath | None:
        """Return the fastest plan, with few GPUs among equally fast ones; None if no plan fits the memory.

        Others may be faster by `precision`, and plans that take `below_s` or longer may be missed. Raise OutOfTimeError
        if the deadline passes before there is any plan.
        """
        precision = max(precision, COARSE) if self._unit > 1 else precision
        asked = (*self._asked, precision, below_s)
        if asked not in self._answers:
            best = self._best(precision, below_s)
            if self.interrupted:
                return best
            self._answers[asked] = best, self.found
        best, self.found = self._answers[asked]
        return best

    def _best(self, precision: float, below_s: float) -> CutPath | None:
        best: CutPath | None = None
        if np.isfinite(below_s):
            limit_s = below_s - self._least_s
        else:
            limit_s = self._promising_s() if precision > RESOLUTION else np.inf
        while (answer := self.within(limit_s)) is not None:
            path, sum_s, max_s = answer
            self.found.append(path)
            if best is None or path.seconds < best.seconds:
                best = path
            # A better plan needs a smaller maximum than this one's, and a total below the best. The limit is the
            # maximum itself: rounding could leave seconds minus sum above it, and the loop would never end.
            limit_s = min(max_s, min(best.seconds, below_s) - sum_s) * (1 - precision)
            if limit_s <= 0:
                break
            if self.clock.passed:
                self.interrupted = True
                break
        self.interrupted |= self._cut_short or self._unit > 1
        return best

    def _promising_s(self) -> float:
        """Return a limit that leaves out nothing but plans slower than one that is balanced well."""
        everything = self.space.work(0, np.array([len(self.space) - 1]))
        limit_s = float(self.model.microbatches * everything.compute_s[0]) / (self.gpus * self._unit)
        if limit_s <= 0 or self.within(np.inf) is None:
            return np.inf
        while (answer := self.within(limit_s)) is None:
            limit_s *= _STEP
        return max(answer[0].seconds * _STEP - self._least_s, answer[2])

    @property
    def _least_s(self) -> float:
        """Seconds that no plan's sum is below: those of one stage that waits for no messages."""
        everything = self.space.work(0, np.array([len(self.space) - 1]))
        return float(self.model.sum_s(self._ways.least(everything).without_transfers())[0])

    def within(self, limit_s: float) -> tuple[CutPath, float, float] | None:
        """Return the path of least sum with a maximum within the limit, its sum and its maximum; None without one."""
        answer = self._walk(limit_s, 0)
        if answer is None or self.limits.allows_stages(len(answer[0].options)):
            return answer
        return self._walk(limit_s, self.limits.most_stages(self.space, self.gpus))

    def _walk(self, limit_s: float, numbers: int) -> tuple[CutPath, float, float] | None:
        """Return the path of least sum within the limit, of at most `numbers` numbered stages; 0 for any stages."""
        last, many = len(self.space) - 1, max(numbers, 1)
        self._cut_short = False
        # Least sum of the suffix, by the number of its first stage, state, and the GPUs it may use.
        sums = np.full((many + 1, last + 1, self.gpus + 1), np.inf)
        sums[:, last] = 0.0
        # For each of these, the best stage's way and its replicas.
        choices = np.zeros((2, many, last, self.gpus + 1), dtype=np.int64)
        # A plan that respects the limit needs some GPUs before each state, and some after it.
        room = self.gpus - self._needed_before(limit_s)
        needed = np.full(last + 1, self.gpus + 1, dtype=np.int64)
        needed[last] = 0
        for state in range(last - 1, -1, -1):
            if self.clock.passed:
                if not self.found:
                    raise OutOfTimeError
                self._cut_short = True  # there is an answer already
                return None
            stages, most = self._stages[state], int(room[state])
            for columns, r in self._worth_a_try(stages, limit_s, most, needed):
                left = np.arange(most + 1) - r[:, None]
                after = np.minimum(np.maximum(left, 0), stages.after[r - 1, columns][:, None])
                for number in range(many):
                    rest = sums[number + 1 if numbers else 0]
                    totals = stages.sum_s[columns, None] + rest[stages.ways.others[columns, None], after]
                    totals[left < 0] = np.inf
                    pick = totals.argmin(axis=0)
                    least = totals[pick, np.arange(most + 1)]
                    better = np.flatnonzero(least < sums[number, state, : most + 1])
                    sums[number, state, better] = least[better]
                    choices[0, number, state, better] = columns[pick[better]]
                    choices[1, number, state, better] = r[pick[better]]
            if len(reached := np.flatnonzero(np.isfinite(sums[:many, state]).any(axis=0))):
                needed[state] = reached[0]
        if not np.isfinite(sums[0, 0, self.gpus]):
            return None
        # Among equal sums the fewest GPUs win; rounding must not make more of them look better.
        enough = int(np.argmax(sums[0, 0] <= sums[0, 0, self.gpus] * (1 + RESOLUTION)))
        return self._trace(choices, enough)

    def _needed_before(self, limit_s: float) -> Integers:
        needed = np.full(len(self.space), self.gpus + 1, dtype=np.int64)
        needed[0] = 0
        for state, stages in enumerate(self._stages):
            if needed[state] <= self.gpus and len(stages.ways):
                meets = stages.max_s <= limit_s
                fewest = np.where(meets.any(axis=0), self._replicas[meets.argmax(axis=0)], self.gpus + 1)
                np.minimum.at(needed, stages.ways.others, needed[state] + fewest)
        return np.minimum(needed, self.gpus + 1)

    def _worth_a_try(
        self, stages: Stages, limit_s: float, room: int, needed: Integers
    ) -> Iterator[tuple[Integers, Integers]]:
        """Yield ways and their replicas that are worth a try, by ascending replicas, as many as suit one array.

        These are the fewest replicas that respect the limit, and more where that allows more GPUs after the stage than
        fewer replicas do, or ways with a smaller sum. `room` is for the stage and those after it.
        """
        left = room - needed[stages.ways.others]
        if not len(left) or (most := min(int(left.max()), len(self._replicas))) < 1:
            return
        replicas, after = self._replicas[:most, None], stages.after[:most]
        may = (stages.max_s[:most] <= limit_s) & (replicas <= left) & (after >= needed[stages.ways.others])
        # The ways of a stage stand together, by their sums. Numbers grow from stage to stage, so that each begins anew.
        begin = stages.ways.stage * (self.gpus + 2)
        most_after = np.maximum.accumulate(np.where(may, after + 1, 0), axis=0) + begin
        with_fewer = np.concatenate((begin[None], most_after[:-1]))
        worth = may & (most_after > with_fewer) & (with_fewer - begin - 1 < room - replicas)
        if stages.by_sum:
            most_after = np.maximum.accumulate(most_after, axis=1)
            worth[:, 1:] &= most_after[:, 1:] > most_after[:, :-1]
        rows, columns = np.nonzero(worth)
        batch = max(1, _BATCH // (room + 1))
        for start in range(0, len(rows), batch):
            yield columns[start : start + batch], self._replicas[rows[start : start + batch]]

    def _trace(self, choices: Integers, gpus: int) -> tuple[CutPath, float, float]:
        states, sums, most_s = [0], 0.0, 0.0
        options: list[StageOptions] = []
        while (state := states[-1]) < len(self.space) - 1:
            number = min(len(options), choices.shape[1] - 1)  # a walk without numbers has 0 alone
            way, r = (int(each) for each in choices[:, number, state, gpus])
            stages = self._stages[state]
            states.append(int(stages.ways.others[way]))
            options.append(stages.ways.options(way, r * self._unit))
            sums += float(stages.sum_s[way])
            most_s = max(most_s, float(stages.max_s[r - 1, way]))
            gpus = min(gpus - r, int(stages.after[r - 1, way]))
        return CutPath(tuple(states), tuple(options), sums + most_s), sums, most_s
