"""The plan of least sum whose maximum is within a limit, along a chain of states on GPUs that are
alike.

With sum(I, J, w) and max(I, J, w, r) the parts of the stage from state I to J, run in way w on r
replicas,

    least(I, g) = min over J, w, r <= g with max(I, J, w, r) <= X of
                  sum(I, J, w) + least(J, min(g - r, after(I, J, w, r)))

where after is how many GPUs may follow the stage, for its memory's sake. Replicas do not change the
sum, so each stage takes the fewest that respect X, or more where that allows more GPUs after it.
O(states² · GPUs) per limit X.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.cost.candidate import StageOptions
from planner.cost.work import Integers
from planner.solver.clock import Clock
from planner.solver.problem.result import RESOLUTION, CutPath
from planner.solver.search.chain.variants import Stages
from planner.solver.search.least_sums import LeastSums


@dataclass(frozen=True)
class Walk:
    """Walks from the last state to the first.

    Attributes:
        stages: of each state but the last, those that begin there.
        gpus: in units, as all numbers of GPUs and replicas here.
        unit: GPUs of one.
        clock: when it passes, a walk raises `OutOfTimeError`.
        batch_entries: of an array over stages and GPUs.
    """

    stages: Sequence[Stages]
    replicas: Integers  # 1, 2, ... up to the most of a stage
    gpus: int
    unit: int
    clock: Clock
    batch_entries: int

    def within(self, limit_s: float, most_stages: int | None = None) -> CutPath | None:
        """Return the path of least sum within the limit, of at most so many stages; None without
        one.
        """
        last = len(self.stages)
        table = LeastSums(last, self.gpus, most_stages, "variant", "replicas")

        # A plan that respects the limit needs some GPUs before each state, and some after it.
        room = self.gpus - self._needed_before(limit_s)
        needed_after = np.full(last + 1, self.gpus + 1, dtype=np.int64)
        needed_after[last] = 0

        for state in reversed(range(last)):
            self.clock.check()
            most = int(room[state])
            trials = self._trials(state, limit_s, most, needed_after)
            for variant, replicas in trials:
                self._prepend(table, state, variant, replicas, most)

            reached = table.reached(state)
            if len(reached):
                needed_after[state] = reached[0]

        return self._trace(table)

    def _prepend(
        self, table: LeastSums, state: int, variant: Integers, replicas: Integers, most: int
    ) -> None:
        """Let suffixes from the state, on up to `most` GPUs, begin with one of these stages."""
        stages = self.stages[state]
        ends = stages.variants.ends[variant, None]
        sum_s = stages.sum_s[variant, None]

        # By stage and GPUs: those that are left after the stage, and that may be at work there.
        left = np.arange(most + 1) - replicas[:, None]
        allowed = stages.after[replicas - 1, variant][:, None]
        after = np.minimum(np.maximum(left, 0), allowed)

        for number, rest in table.tables():
            totals = sum_s + table.sums[rest][ends, after]
            totals[left < 0] = np.inf
            table.put(number, state, totals, variant=variant, replicas=replicas)

    def _needed_before(self, limit_s: float) -> Integers:
        """Return the fewest GPUs that the layers before each state need within the limit; more than
        all if too many.
        """
        too_many = self.gpus + 1
        needed = np.full(len(self.stages) + 1, too_many, dtype=np.int64)
        needed[0] = 0
        for state, stages in enumerate(self.stages):
            if needed[state] > self.gpus or not len(stages.variants):
                continue
            meets = stages.max_s <= limit_s
            first = self.replicas[meets.argmax(axis=0)]
            fewest = np.where(meets.any(axis=0), first, too_many)
            np.minimum.at(needed, stages.variants.ends, needed[state] + fewest)

        return np.minimum(needed, too_many)

    def _trials(
        self, state: int, limit_s: float, room: int, needed_after: Integers
    ) -> Iterator[tuple[Integers, Integers]]:
        """Yield ways and their replicas that are worth a try, by ascending replicas, as many as
        suit one array.

        These are the fewest replicas that respect the limit, and more where that allows more GPUs
        after the stage than fewer replicas do, or ways with a smaller sum. `room` is for the stage
        and those after it.
        """
        # 1. Replicas that leave enough for the stages after this one.
        stages = self.stages[state]
        needed = needed_after[stages.variants.ends]
        left = room - needed
        most = min(int(left.max(initial=0)), len(self.replicas))
        if most < 1:
            return

        replicas = self.replicas[:most, None]
        after = stages.after[:most]
        in_time = stages.max_s[:most] <= limit_s
        may = in_time & (replicas <= left) & (after >= needed)

        # 2. Those that allow more GPUs after the stage than fewer replicas do. Numbers grow from
        #    stage to stage, so that the maximum of each begins anew.
        begin = stages.variants.stage * (self.gpus + 2)
        allowed = np.where(may, after + 1, 0)
        most_after = np.maximum.accumulate(allowed, axis=0) + begin
        with_fewer = np.concatenate((begin[None], most_after[:-1]))
        lacking = with_fewer - begin - 1 < room - replicas
        worth = may & (most_after > with_fewer) & lacking

        # 3. The ways of a stage stand together, by their sums: later ones must allow more.
        if stages.by_sum:
            most_after = np.maximum.accumulate(most_after, axis=1)
            worth[:, 1:] &= most_after[:, 1:] > most_after[:, :-1]

        rows, columns = np.nonzero(worth)
        batch = max(1, self.batch_entries // (room + 1))
        for start in range(0, len(rows), batch):
            part = slice(start, start + batch)
            yield columns[part], self.replicas[rows[part]]

    def _trace(self, table: LeastSums) -> CutPath | None:
        """Follow the choices from the first state; None where nothing reaches it."""
        sums = table.sums[0, 0]
        least_s = sums[self.gpus]
        if not np.isfinite(least_s):
            return None

        # Among equal sums the fewest GPUs win; rounding must not make more of them look better.
        gpus = int(np.argmax(sums <= least_s * (1 + RESOLUTION)))

        states = [0]
        options: list[StageOptions] = []
        sum_s = 0.0
        max_s = 0.0
        while states[-1] < len(self.stages):
            stages = self.stages[states[-1]]
            first = table.first_stage(len(options), states[-1], gpus)
            variant = first["variant"]
            replicas = first["replicas"]
            place = replicas - 1, variant

            states.append(int(stages.variants.ends[variant]))
            options.append(stages.variants.options(variant, replicas * self.unit))
            sum_s += float(stages.sum_s[variant])
            max_s = max(max_s, float(stages.max_s[place]))
            gpus = min(gpus - replicas, int(stages.after[place]))

        return CutPath(tuple(states), tuple(options), max_s, sum_s)
