"""Moved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np
from numpy.typing import NDArray

from planner.cost.candidate import Candidate
from planner.cost.network.link import Link
from planner.cost.work import Integers
from planner.formats.cluster import DeviceKind
from planner.solver.problem.problem import Problem
from planner.solver.problem.states import Chain
from planner.solver.search.chain.ways import Stages, stages_on

Kinds = frozenset[int]  # numbers of kinds that a stage has GPUs of
_BATCH = 2**20  # entries of an array over stages and GPUs


class StagesOn:
    """All stages on GPUs of one kind with one link; of several kinds, the slowest with the memory of the smallest."""

    def __init__(self, problem: Problem, link: Link, kind: DeviceKind, most: int, most_states: int) -> None:
        chain = Chain(problem.layer_costs.on_kind(kind))
        self.space = chain if len(chain) <= most_states else chain.only(chain.spread(most_states))
        self.stages = stages_on(problem, self.space, problem.cluster.memory_of(kind), most, link)


def _worth_a_try(stages: Stages, limit_s: float) -> tuple[Integers, Integers]:
    """Return ways and their replicas: the fewest that keep the limit, and more where those allow more GPUs after."""
    meets = stages.max_s <= limit_s
    after = np.maximum.accumulate(np.where(meets, stages.after, -1), axis=0)
    before = np.concatenate((np.full((1, meets.shape[1]), -1), after[:-1]))
    rows, columns = np.nonzero(meets & (stages.after > before))
    return columns, rows + 1


@dataclass(frozen=True)
class LinePlan:
    """Stages on a line, with the parts of their time."""

    stages: tuple[Candidate, ...]
    sum_s: float
    max_s: float

    @property
    def seconds(self) -> float:
        """Seconds per minibatch, by the link that the walk was for."""
        return self.sum_s + self.max_s


class LineSearch:
    """Walks along one line: numbers of kinds, and ranks of each, in the order of the line."""

    def __init__(self, problem: Problem, tables: Mapping[Kinds, StagesOn], line: Sequence[tuple[int, Sequence[int]]]):
        self._problem, self._line = problem, [rank for _, ranks in line for rank in ranks]
        self.gpus = len(self._line)
        self._gpus = np.arange(self.gpus + 1)
        self._space = next(iter(tables.values())).space
        # Where each kind of the line begins and ends, counted from the line's end.
        ends = np.cumsum([0, *(len(ranks) for _, ranks in reversed(line))])[::-1]
        self._runs: list[tuple[StagesOn, NDArray[np.bool_]]] = []
        g, r = self._gpus, np.arange(1, self.gpus + 1)[:, None]
        for first, last in combinations_with_replacement(range(len(line)), 2):
            begins = (ends[first + 1] < g) & (g <= ends[first])
            spans = begins & (ends[last + 1] <= g - r) & (g - r < ends[last])
            self._runs.append((tables[frozenset(number for number, _ in line[first : last + 1])], spans))

    def within(self, limit_s: float) -> LinePlan | None:
        """Return the plan of least sum with a maximum within the limit; None without one."""
        answer, limits = self._walk(limit_s, 0), self._problem.limits
        if answer is None or limits.allows_stages(len(answer.stages)):
            return answer
        return self._walk(limit_s, limits.most_stages(self._space, self.gpus))

    def _walk(self, limit_s: float, numbers: int) -> LinePlan | None:
        """Return the plan of least sum within the limit, of at most `numbers` numbered stages; 0 for any stages."""
        last, many = len(self._space) - 1, max(numbers, 1)
        walk = _Walk(many, last, self.gpus)
        rest = slice(1, many + 1) if numbers else slice(0, 1)
        batch = max(1, _BATCH // ((self.gpus + 1) * many))
        for state in range(last - 1, -1, -1):
            if self._problem.deadline.passed:
                return None
            for run, (on, spans) in enumerate(self._runs):
                stages = on.stages[state]
                ways, replicas = _worth_a_try(stages, limit_s)
                possible = np.any(spans, axis=1)[replicas - 1]
                ways, replicas = ways[possible], replicas[possible]
                for start in range(0, len(ways), batch):
                    way, r = ways[start : start + batch], replicas[start : start + batch]
                    others, most = stages.ways.others[way, None], stages.after[r - 1, way][:, None]
                    left = np.broadcast_to(np.maximum(self._gpus - r[:, None], 0), (many, len(way), self.gpus + 1))
                    # GPUs that idle behind a stage do not count for its memory. Where too many would be at work, those
                    # at the end of the line are.
                    left = np.where(walk.used[rest][:, others, left[0]] <= most, left, np.minimum(left, most))
                    at = np.arange(many)[:, None, None], others, left
                    totals = stages.sum_s[way, None] + walk.sums[rest][at]
                    totals[:, ~spans[r - 1]] = np.inf
                    used = walk.used[rest][at] + r[:, None]
                    for number in range(many):
                        pick = totals[number].argmin(axis=0)
                        least = totals[number][pick, self._gpus]
                        gpus = np.flatnonzero(least < walk.sums[number, state])
                        step = pick[gpus]
                        walk.sums[number, state, gpus] = least[gpus]
                        walk.choices[:, number, state, gpus] = np.stack(
                            [0 * step + run, way[step], r[step], left[number, step, gpus], used[number, step, gpus]]
                        )
            for number in range(many):
                walk.idle(number, state)
        return self._traced(walk) if np.isfinite(walk.sums[0, 0, self.gpus]) else None

    def _traced(self, walk: "_Walk") -> LinePlan:
        state, gpus, sum_s, max_s = 0, self.gpus, 0.0, 0.0
        found: list[Candidate] = []
        while state < len(self._space) - 1:
            number = min(len(found), len(walk.begins) - 1)  # a walk without numbers has 0 alone
            gpus = int(walk.begins[number, state, gpus])
            run, way, r, left = (int(each) for each in walk.choices[:4, number, state, gpus])
            stages = self._runs[run][0].stages[state]
            other, begin = int(stages.ways.others[way]), self.gpus - gpus
            layers = frozenset(self._space.layers(state, other))
            ranks = tuple(sorted(self._line[begin : begin + r]))
            found.append(Candidate(frozenset(self._space.layers(0, state)), layers, stages.ways.options(way, r), ranks))
            sum_s, max_s = sum_s + float(stages.sum_s[way]), max(max_s, float(stages.max_s[r - 1, way]))
            state, gpus = other, left
        return LinePlan(tuple(found), sum_s, max_s)


class _Walk:
    """What a walk knows of every suffix of the layers on the last GPUs of the line."""

    def __init__(self, many: int, last: int, gpus: int) -> None:
        # The least sum and its GPUs at work, by the number of its first stage, its first state, and GPUs it may use.
        self.sums = np.full((many + 1, last + 1, gpus + 1), np.inf)
        self.sums[:, last] = 0.0
        self.used = np.zeros(self.sums.shape, dtype=np.int64)
        # Of its first stage: run of kinds, way, replicas, the GPUs that the rest may use, and those at work.
        self.choices = np.zeros((5, many, last, gpus + 1), dtype=np.int64)
        # The GPU, counted from the line's end, at which that stage begins: those before it idle.
        self.begins = np.zeros((many, last, gpus + 1), dtype=np.int64)

    def idle(self, number: int, state: int) -> None:
        sums = self.sums[number, state]
        least = np.minimum.accumulate(sums)
        new = np.concatenate(([True], least[1:] < least[:-1]))
        begins = np.maximum.accumulate(np.where(new, np.arange(len(sums)), 0))
        self.sums[number, state], self.begins[number, state] = least, begins
        self.used[number, state] = self.choices[4, number, state, begins]
