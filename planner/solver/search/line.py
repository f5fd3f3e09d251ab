"""Search along one line of GPUs: kinds of GPUs in some order, and the ranks of each.

Under any schedule with one stage per worker, stages take consecutive GPUs of the line, and some may
idle. So the GPUs at which a stage begins and ends say which kinds of GPUs it has: a *run* of kinds.

With the maximum over the stages bounded by X, a walk from the last layer to the first

    sum(J, g) = min over K, r of  part(J, K, r, run) + sum(K, h)    where max_s(J, K, r, run) ≤ X
    sum(J, g) = min( sum(J, g), sum(J, g - 1) )                         one more GPU may idle

gives the least sum of the stages' parts; under asynchronous schedules those are zero.

    J, K    cuts: the stage runs the layers between them
    g       GPUs at the end of the line, of which the stage takes the first r
    run     of kinds, from the g-th to the (g - r + 1)-th GPU from the end
    h       GPUs for the stages after it: g - r, or as many as the memory of the stage allows

O(runs · states² · GPUs), times the numbers of replicas that are worth a try.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations_with_replacement

import numpy as np
from numpy.typing import NDArray

from planner.cost.candidate import StageOptions
from planner.cost.network.link import Link
from planner.cost.work import Floats, Integers
from planner.formats.cluster import DeviceKind
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import CutPath
from planner.solver.problem.states import Chain
from planner.solver.search.chain.variants import Stages, stages_on
from planner.solver.search.least_sums import LeastSums

Kinds = frozenset[int]  # numbers of kinds that a stage has GPUs of


class StagesOn:
    """All stages on GPUs of one kind with one link.

    For GPUs of several kinds it is the slowest kind, with the memory of the smallest.
    """

    def __init__(
        self,
        problem: Problem,
        link: Link,
        kind: DeviceKind,
        most: int,
        most_states: int,
    ) -> None:
        space = Chain(problem.layer_costs.on_kind(kind))
        if len(space) > most_states:
            space = space.only(space.spread(most_states))
        self.space = space
        self.stages = stages_on(problem, space, problem.cluster.memory_of(kind), most, link)


class LineSearch:
    """Searches along one line: numbers of kinds, and ranks of each, in the order of the line."""

    def __init__(
        self,
        problem: Problem,
        tables: Mapping[Kinds, StagesOn],
        line: Sequence[tuple[int, Sequence[int]]],
    ) -> None:
        self._problem = problem
        self._ranks = [rank for _, ranks in line for rank in ranks]
        self.gpus = len(self._ranks)
        self._run_at = _runs_of_kinds([len(ranks) for _, ranks in line])

        kinds = [kind for kind, _ in line]
        self._runs: dict[int, _Run] = {}
        for first, last in combinations_with_replacement(range(len(kinds)), 2):
            number = first * len(kinds) + last
            members = frozenset(kinds[first : last + 1])
            occurs = np.any(self._run_at == number, axis=1)
            self._runs[number] = _Run(tables[members], occurs)

        self.space = self._runs[0].table.space

    def within(self, limit_s: float) -> CutPath | None:
        """Return the plan of least sum with a maximum within the limit; None without one."""
        return self._problem.limits.of_few_stages(
            partial(self._walk, limit_s), self.space, self.gpus
        )

    def _walk(self, limit_s: float, most_stages: int | None) -> CutPath | None:
        """Return the plan of least sum within the limit, of so many stages at most."""
        last = len(self.space) - 1
        table = _Table(last, self.gpus, most_stages)
        openings: dict[int, _Openings] = {}
        batch = max(1, self._problem.tuning.arrays.batch_entries // (self.gpus + 1))

        for cut in reversed(range(last)):
            if self._problem.clock.passed:
                return None

            openings[cut] = self._openings(cut, limit_s)
            for rows in _batches(len(openings[cut].run), batch):
                stages = openings[cut].only(rows)
                place = self._run_at[stages.replicas - 1]
                spans = place == stages.run[:, None]
                table.prepend(cut, rows, stages, spans)

            table.idle(cut)

        if not np.isfinite(table.sums[0, 0, self.gpus]):
            return None
        return self._trace(table, openings)

    def _openings(self, cut: int, limit_s: float) -> "_Openings":
        """Return the stages from the cut that are worth a try, in every run of kinds."""
        columns = []
        for number, run in self._runs.items():
            stages = run.table.stages[cut]
            worth = _worth_a_try(stages, limit_s)
            occurs = run.occurs[: len(worth), None]
            row, variant = np.nonzero(worth & occurs)
            opening = _Openings(
                run=np.full_like(variant, number),
                variant=variant,
                replicas=row + 1,
                end=stages.variants.ends[variant],
                most_after=stages.after[row, variant],
                sum_s=stages.sum_s[variant],
                max_s=stages.max_s[row, variant],
            )
            columns.append(vars(opening).values())

        by_field = zip(*columns, strict=True)
        return _Openings(*map(np.concatenate, by_field))

    def _trace(self, table: "_Table", openings: Mapping[int, "_Openings"]) -> CutPath:
        """Follow the choices from the first layer to the last."""
        states = [0]
        options: list[StageOptions] = []
        ranks: list[tuple[int, ...]] = []
        sum_s = 0.0
        max_s = 0.0
        gpus = self.gpus
        last = len(self.space) - 1

        while states[-1] < last:
            # 1. The stage, before which some GPUs may idle.
            cut = states[-1]
            gpus = table.first_stage(len(options), cut, gpus)["begin"]
            first = table.first_stage(len(options), cut, gpus)
            stage = openings[cut].only(np.array(first["row"]))

            # 2. How it runs.
            replicas = int(stage.replicas)
            table_of_run = self._runs[int(stage.run)].table
            variants = table_of_run.stages[cut].variants
            options.append(variants.options(int(stage.variant), replicas))

            # 3. Its ranks.
            place = self.gpus - gpus
            taken = self._ranks[place : place + replicas]
            ranks.append(tuple(sorted(taken)))

            # 4. What comes after it.
            states.append(int(stage.end))
            sum_s += float(stage.sum_s)
            max_s = max(max_s, float(stage.max_s))
            gpus = first["after"]

        return CutPath(tuple(states), tuple(options), max_s, sum_s, tuple(ranks))


@dataclass(frozen=True)
class _Run:
    """A run of kinds."""

    table: StagesOn  # all stages on such GPUs
    occurs: NDArray[np.bool_]  # by replicas - 1, whether the line has a place for such a stage


@dataclass(frozen=True)
class _Openings:
    """Stages that begin at one cut, an entry each."""

    run: Integers  # its number
    variant: Integers  # its row in the run's table
    replicas: Integers
    end: Integers  # the cut where it ends
    most_after: Integers  # GPUs that may be at work after it
    sum_s: Floats
    max_s: Floats

    def only(self, rows: Integers) -> "_Openings":
        """Return some of them."""
        return _Openings(*(column[rows] for column in vars(self).values()))


class _Table(LeastSums):
    """The best stages for the layers after each cut J, by the GPUs g that they may use.

    Of the first stage it knows the row among the openings of its cut, the GPUs that the stages
    after it may use, and its first GPU, counted from the line's end; and the GPUs at work in all
    stages.
    """

    def __init__(self, last: int, gpus: int, most_stages: int | None) -> None:
        super().__init__(last, gpus, most_stages, "row", "after", "begin", "at_work")
        self._gpus = np.arange(gpus + 1)

    def prepend(
        self, cut: int, rows: Integers, stages: _Openings, spans: NDArray[np.bool_]
    ) -> None:
        """Put stages from a cut before the best suffixes after them, and keep the least sums.

        Args:
            cut: J.
            rows: numbers of the stages among the openings of the cut.
            stages: part, r and K of each.
            spans: by stage and g, whether the stage has its run of kinds there.
        """
        replicas = stages.replicas[:, None]
        end = stages.end[:, None]
        most_after = stages.most_after[:, None]

        for number, rest in self.tables():
            # 1. h: GPUs that idle behind a stage do not count for its memory.
            #    Where too many would be at work, those at the end of the line are.
            at_work = self.first["at_work"][rest]
            after = np.maximum(self._gpus - replicas, 0)
            crowded = at_work[end, after] > most_after
            after = np.where(crowded, np.minimum(after, most_after), after)

            # 2. part(J, K, r, run) + sum(K, h)
            totals = stages.sum_s[:, None] + self.sums[rest][end, after]
            totals[~spans] = np.inf

            # 3. min over K, r
            better, stage = self.put(number, cut, totals, row=rows, after=after)
            behind = at_work[stages.end[stage], after[stage, better]]
            self.first["at_work"][number, cut, better] = behind + stages.replicas[stage]

    def idle(self, cut: int) -> None:
        """Let the first GPUs idle where fewer do as well."""
        # sum(J, g) = min( sum(J, g), sum(J, g - 1) )
        for number, _ in self.tables():
            least = np.minimum.accumulate(self.sums[number, cut])
            _, firsts, group = np.unique(least, return_index=True, return_inverse=True)
            begin = firsts[group]
            self.sums[number, cut] = least
            self.first["begin"][number, cut] = begin
            self.first["at_work"][number, cut] = self.first["at_work"][number, cut, begin]


def _runs_of_kinds(counts: Sequence[int]) -> Integers:
    """Return the run of kinds of each stage by replicas - 1 and g, given the GPUs of each kind.

    The run from the i-th kind to the j-th of n has the number i · n + j, and no stage has -1.
    """
    kinds = np.repeat(np.arange(len(counts)), counts)
    gpus = len(kinds)

    # The GPUs of the stage by their places in the line, where it may end behind the line.
    first = gpus - np.arange(gpus + 1)
    replicas = np.arange(1, gpus + 1)[:, None]
    last = first + replicas - 1

    first_kind = kinds.take(first, mode="clip")
    last_kind = kinds.take(last, mode="clip")
    run = first_kind * len(counts) + last_kind
    return np.where(last < gpus, run, -1)


def _worth_a_try(stages: Stages, limit_s: float) -> NDArray[np.bool_]:
    """Return by replicas - 1 and way which stages are worth a try.

    Of those within the limit, these have the fewest replicas, or more if that allows more GPUs
    after the stage.
    """
    after = np.where(stages.max_s <= limit_s, stages.after, -1)
    with_fewer = np.full_like(after, -1)
    with_fewer[1:] = np.maximum.accumulate(after, axis=0)[:-1]
    return after > with_fewer


def _batches(count: int, size: int) -> Iterator[Integers]:
    """Yield the numbers below `count`, so many at a time."""
    for start in range(0, count, size):
        yield np.arange(start, min(start + size, count))
