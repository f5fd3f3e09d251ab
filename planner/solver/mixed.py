"""Search for plans on GPUs of several kinds: for each order of the kinds, a search along their line.

Nearly exact, on links that are all alike, for plans in which the GPUs of a kind follow each other. Local search on
simulated times then also lets kinds take turns. The bound is perfect balance.

Along a line, under any schedule with one stage per worker, stages take consecutive GPUs; some may idle. So the GPUs at
which a stage begins and ends say which kinds it has. With the maximum over the stages bounded by X, a walk from the
last layer to the first

    sum(J, g) = min over K, r of  part(J, K, r, kinds of g - r .. g) + sum(K, g - r)        g: the last GPUs of the line

gives the least sum of the stages' parts; under asynchronous schedules those are zero. O(runs · states² · GPUs).
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, combinations_with_replacement, permutations

import numpy as np
from numpy.typing import NDArray

from planner.cost.candidate import Candidate
from planner.cost.kinds import everything_on, kind_on
from planner.cost.network.link import Link
from planner.cost.work import Integers
from planner.errors import InfeasibleError, InputError
from planner.formats.cluster import DeviceKind
from planner.solver.choose.first_plans import Leaner
from planner.solver.choose.improvement import improved
from planner.solver.evaluate.evaluation import fastest, priced
from planner.solver.problem.budget import OutOfTimeError
from planner.solver.problem.infeasible import against_rules
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation, Found
from planner.solver.problem.states import Chain
from planner.solver.search.chain.ways import Stages, relaxed_s, stages_on
from planner.solver.search.restricted import slowed

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


MOST_KINDS = 4  # whose orders are tried
MOST_STATES, MOST_ENTRIES = 160, 4_000_000  # beyond, cuts at some of them only: so many, or states² · GPUs
MOST_STARTS = 6  # plans with which local search begins
COARSE, FINE = 0.05, 0.004  # steps of the limit on the maximum, relative: over all of them, and around the best
SLOWER_LINKS = (2.0, 4.0)  # factors by which links are slower in alternatives
SLOWER = (1.02, 1.05, 1.1, 1.2)  # times the best time of an asynchronous plan, within which others are proposed


def solve_mixed(problem: Problem) -> Found:
    """Find a fast plan on GPUs of several kinds; raise InputError for more kinds than orders can be tried of.

    Raise InfeasibleError if no plan of the form above fits the memory.
    """
    alike: dict[object, tuple[int, ...]] = {}  # ranks: what the cluster lists in several places is one kind
    for kind, own in zip(problem.cluster.kinds, problem.cluster.kind_ranks, strict=True):
        key = kind.name, kind.speed, problem.cluster.memory_of(kind)
        alike[key] = (*alike.get(key, ()), *own)
    kinds = list(alike.values())
    if len(kinds) > MOST_KINDS:
        raise InputError(
            f"{len(kinds)} kinds of GPUs have too many orders to try",
            hint=f"join kinds that are much alike: up to {MOST_KINDS} are tried",
        )
    found = list(_simple(problem, kinds))
    with contextlib.suppress(OutOfTimeError):  # then it is what was found before
        found += _along_lines(problem, kinds, found)
    fitting = [plan for plan in found if problem.allows(plan)]
    if not fitting and not problem.cluster.has_memory_limit:
        raise against_rules(problem)
    if not fitting:
        raise InfeasibleError(
            "no plan was found that fits the memory of the cluster's GPUs",
            hint="give the kinds of GPUs more memory_bytes, or more GPUs",
        )
    best = fastest(problem, fitting)
    found_best = Found(best, min(relaxed_s(problem, Chain(problem.layer_costs)), best.seconds))
    # Local search begins with the fastest plans by the cost model that differ in their cuts or replicas.
    shapes: dict[object, Evaluation] = {}
    for plan in sorted(fitting, key=lambda plan: plan.price.cost_model_s or plan.seconds):
        shapes.setdefault(tuple((stage.layers, stage.replicas) for stage in plan.stages), plan)
    return improved(problem, found_best, list(shapes.values())[:MOST_STARTS])


def _simple(problem: Problem, kinds: Sequence[tuple[int, ...]]) -> Iterator[Evaluation]:
    """Yield the whole model on all GPUs, on those of each kind and on one of each, recomputing as memory demands."""
    leaner, gpus = Leaner(problem), problem.cluster.gpus
    most = problem.microbatches if problem.schedule.divides else gpus
    for ranks in {tuple(range(gpus)), *kinds, *(own[:1] for own in kinds)}:
        stage = everything_on(problem.layer_costs, problem.cluster, sorted(ranks)[:most])
        for level in problem.levels if stage.replicas > 1 else (0,):
            sharded = replace(stage, options=replace(stage.options, level=level))
            if (plan := leaner.lean_enough([sharded])) is not None:
                yield plan


def _along_lines(problem: Problem, kinds: Sequence[tuple[int, ...]], known: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the plans that are met in every order of the kinds, with the links of every level."""
    topology, found = problem.topology, list[Evaluation]()
    links = {problem.link, *(topology.link(level) for level in range(len(topology)))}
    known_s = min((plan.seconds for plan in known), default=np.inf)
    states = min(MOST_STATES, int((MOST_ENTRIES / problem.cluster.gpus) ** 0.5))
    everything = problem.layer_costs.single_stage
    # Where messages weigh more, there are fewer of them, and plans wait less.
    slower = [slowed(problem.link, times) for times in SLOWER_LINKS]
    for link in (*sorted(links, key=lambda each: each.bandwidth_bytes_per_s), *slower):
        best_s = np.inf if link in slower else known_s
        tables = dict[Kinds, StagesOn]()  # all stages on GPUs of each set of kinds
        for numbers in chain.from_iterable(combinations(range(len(kinds)), count + 1) for count in range(len(kinds))):
            ranks = [rank for number in numbers for rank in kinds[number]]
            kind = kind_on(problem.layer_costs, problem.cluster, everything, ranks)
            tables[frozenset(numbers)] = StagesOn(problem, link, kind, len(ranks), states)
        for order in permutations(range(len(kinds))):
            search = LineSearch(problem, tables, [(number, kinds[number]) for number in order])
            fast = _fastest(search, best_s) if problem.schedule.asynchronous else _traded(search, best_s)
            for plan in fast:
                found.append(priced(problem, plan.stages))
                best_s = min(best_s, plan.seconds if link in slower else found[-1].seconds)
            if problem.deadline.passed:
                return found
        known_s = min(known_s, best_s)
    return found


def _fastest(search: LineSearch, best_s: float) -> Iterator[LinePlan]:
    """Yield ever faster plans of an asynchronous pipeline, whose sum is zero; none if none is below the seconds."""
    low_s, high_s, plan = 0.0, np.inf, search.within(best_s * (1 - FINE))
    if plan is None:
        return
    while plan is not None and plan.max_s < high_s:  # not the same again, where a target rounds to its seconds
        yield plan
        best_s = high_s = plan.max_s
        while (better := search.within((low_s + high_s) / 2)) is None and high_s - low_s > FINE * high_s:
            low_s = (low_s + high_s) / 2
        plan = better
    # Slower plans by the cost model may wait less.
    yield from filter(None, (search.within(best_s * times) for times in SLOWER))


def _traded(search: LineSearch, best_s: float) -> Iterator[LinePlan]:
    """Yield plans of a synchronous pipeline that trade the sum against the maximum, and some near the best of them."""
    first, best, step = search.within(np.inf), None, COARSE
    limit_s, low_s = (0.0, 0.0) if first is None else (min(first.max_s, best_s - first.sum_s), 0.0)
    while True:
        while limit_s > low_s and (plan := search.within(limit_s)) is not None:
            yield plan
            if plan.seconds < best_s:
                best, best_s = plan, plan.seconds
            limit_s = min(plan.max_s, best_s - plan.sum_s) * (1 - step)
        if step == FINE or best is None:
            return
        limit_s, low_s, step = best.max_s * (1 + step), best.max_s * (1 - step), FINE
