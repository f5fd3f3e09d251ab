"""Propose plans on GPUs of several kinds: for each order of the kinds, a search along their line.

A stage's all-reduce and its messages are priced at the links of its own kinds. Nearly exact, on
links that are all alike, for plans in which the GPUs of a kind follow each other
(`planner.solver.search.line`). Local search on simulated times then also lets kinds take turns.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, permutations

import numpy as np

from planner.cost.candidate import Candidate
from planner.cost.kinds import everything_on, kind_on
from planner.cost.network.link import Link
from planner.errors import InfeasibleError, InputError
from planner.formats.files import replace
from planner.solver.clock import OutOfTimeError
from planner.solver.evaluate.evaluation import priced
from planner.solver.evaluate.leaner import Leaner
from planner.solver.pool import Batch, Pool
from planner.solver.problem.infeasible import against_rules
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import CutPath, stages_along
from planner.solver.search.line import Kinds, LineSearch, StagesOn
from planner.solver.search.trade import trade_offs
from planner.solver.tuning.searches import MixedTuning

Ranks = tuple[int, ...]
LinkOf = Callable[[Sequence[int]], Link]  # the link of these ranks


def propose_mixed(problem: Problem, pool: Pool) -> Iterator[Batch]:
    """Yield plans of the whole model on each kind, and those that are met along the lines, as one
    batch.

    Raises:
        InputError: for more kinds than orders can be tried of.
        InfeasibleError: if no plan of this form fits the memory.
    """
    kinds = _kinds_alike(problem)
    most_kinds = problem.tuning.mixed.most_kinds
    if len(kinds) > most_kinds:
        raise InputError(
            f"{len(kinds)} kinds of GPUs have too many orders to try",
            hint=f"join kinds that are much alike: up to {most_kinds} are tried",
        )

    whole = list(_whole_models(problem, kinds))
    lines = _Lines(
        problem,
        kinds,
        best_s=min((_price_s(problem, stages) for stages in whole), default=np.inf),
    )

    yield [*whole, *lines.plans()]

    if pool.best is None and not pool.usable and pool.untrained is None:
        if not problem.cluster.has_memory_limit:
            raise against_rules(problem)
        raise InfeasibleError(
            "no plan was found that fits the memory of the cluster's GPUs",
            hint="give the kinds of GPUs more memory_bytes, or more GPUs",
        )


def _kinds_alike(problem: Problem) -> list[Ranks]:
    """Return the ranks of each kind; what the cluster lists in several places is one kind."""
    cluster = problem.cluster
    alike: dict[object, Ranks] = {}
    for kind, ranks in zip(cluster.kinds, cluster.kind_ranks, strict=True):
        key = kind.name, kind.speed, cluster.memory_of(kind), kind.link_ratios
        alike[key] = (*alike.get(key, ()), *ranks)

    return list(alike.values())


def _whole_models(problem: Problem, kinds: Sequence[Ranks]) -> Iterator[Sequence[Candidate]]:
    """Yield the whole model on all GPUs, on those of each kind and on one of each, recomputing as
    memory demands.
    """
    leaner = Leaner(problem)
    cluster = problem.cluster
    if problem.schedule.divides:
        most = problem.microbatches
    else:
        most = cluster.gpus

    for ranks in {tuple(range(cluster.gpus)), *kinds, *(ranks[:1] for ranks in kinds)}:
        stage = everything_on(problem.layer_costs, cluster, sorted(ranks)[:most])
        for sharding in problem.sharding.of_replicas(stage.replicas, whole=True):
            options = stage.options.with_sharding(sharding)
            plan = leaner.lean_enough([replace(stage, options=options)])
            if plan is not None:
                yield plan.stages


def _price_s(problem: Problem, stages: Sequence[Candidate]) -> float:
    return priced(problem, stages).seconds


@dataclass
class _Lines:
    """The plans that are met in every order of the kinds, with the links of every level and with
    slower ones.

    Attributes:
        best_s: seconds of the fastest plan so far by the cost model, below which others are sought.
    """

    problem: Problem
    kinds: Sequence[Ranks]
    best_s: float
    _met: list[Sequence[Candidate]] = field(default_factory=list)

    def plans(self) -> list[Sequence[Candidate]]:
        """Return as many as there is time for."""
        try:
            for link_of in self._links():
                self._take(link_of, true=True)
            # Where messages weigh more, there are fewer of them, and plans wait less.
            for factor in self.problem.tuning.mixed.slower_link_ratios:
                slower = self.problem.link.slowed(factor)
                self._take(_same_for_all(slower), true=False)
        except OutOfTimeError:
            pass  # what was met so far is proposed

        return self._met

    def _links(self) -> list[LinkOf]:
        """Return the slowest link for all ranks, then what each level is to ranks, where that
        differs; slow links first.
        """
        topology = self.problem.topology
        slowest = self.problem.link
        choices: dict[tuple[Link, ...], LinkOf] = {
            (slowest,) * len(self.kinds): _same_for_all(slowest),
        }
        for level in range(len(topology)):
            link_of = partial(topology.link, level)
            choices.setdefault(tuple(map(link_of, self.kinds)), link_of)

        rates = {links: [link.bandwidth_bytes_per_s for link in links] for links in choices}
        return [choices[links] for links in sorted(choices, key=rates.__getitem__)]

    def _take(self, link_of: LinkOf, *, true: bool) -> None:
        """Meet plans for links; for links that are not `true` their own seconds say which of them
        are fast.
        """
        problem = self.problem
        tables = self._tables(link_of)
        best_s = self.best_s if true else np.inf

        for order in permutations(range(len(self.kinds))):
            line = [(number, self.kinds[number]) for number in order]
            search = LineSearch(problem, tables, line)
            for path in _met_along(search, best_s, problem):
                stages = stages_along(search.space, path)
                self._met.append(stages)
                seconds = path.seconds
                if true:
                    seconds = _price_s(problem, stages)
                best_s = min(best_s, seconds)
            problem.clock.check()

        if true:
            self.best_s = min(self.best_s, best_s)

    def _tables(self, link_of: LinkOf) -> Mapping[Kinds, StagesOn]:
        """Return all stages on GPUs of each set of kinds."""
        problem = self.problem
        cluster = problem.cluster
        tuning = problem.tuning.mixed
        entries = tuning.most_entries / cluster.gpus
        states = min(tuning.most_states, int(entries**0.5))
        everything = problem.layer_costs.single_stage

        tables: dict[Kinds, StagesOn] = {}
        for numbers in _subsets(len(self.kinds)):
            ranks: list[int] = []
            for number in numbers:
                ranks += self.kinds[number]

            kind = kind_on(problem.layer_costs, cluster, everything, ranks)
            link = link_of(ranks)
            tables[frozenset(numbers)] = StagesOn(problem, link, kind, len(ranks), states)

        return tables


def _same_for_all(link: Link) -> LinkOf:
    return lambda ranks: link


def _subsets(count: int) -> Iterator[tuple[int, ...]]:
    """Yield all sets of one or more of the numbers below `count`, the small ones first."""
    for size in range(1, count + 1):
        yield from combinations(range(count), size)


def _met_along(search: LineSearch, best_s: float, problem: Problem) -> Iterator[CutPath]:
    if problem.schedule.asynchronous:
        return _ever_faster(search, best_s, problem.tuning.mixed)
    return _traded(search, best_s, problem.tuning.mixed)


def _ever_faster(search: LineSearch, best_s: float, tuning: MixedTuning) -> Iterator[CutPath]:
    """Yield ever faster plans of an asynchronous pipeline, whose sum is zero; none if none is below
    the seconds.
    """
    low_s = 0.0
    high_s = np.inf
    plan = search.within(best_s * (1 - tuning.fine_step))
    if plan is None:
        return

    # not the same again, where a target rounds to its seconds
    while plan is not None and plan.max_s < high_s:
        yield plan
        best_s = high_s = plan.max_s
        while True:
            middle_s = (low_s + high_s) / 2
            plan = search.within(middle_s)
            if plan is not None or high_s - low_s <= tuning.fine_step * high_s:
                break
            low_s = middle_s

    # Slower plans by the cost model may wait less.
    for factor in tuning.slower_plan_ratios:
        slower = search.within(best_s * factor)
        if slower is not None:
            yield slower


def _traded(search: LineSearch, best_s: float, tuning: MixedTuning) -> Iterator[CutPath]:
    """Yield plans of a synchronous pipeline that trade the sum against the maximum, and some near
    the best of them.
    """
    widest = search.within(np.inf)
    if widest is None:
        return

    limit_s = min(widest.max_s, best_s - widest.sum_s)
    if limit_s <= 0:
        return

    # 1. Coarse steps over all limits.
    best: CutPath | None = None
    for plan in trade_offs(search.within, limit_s, below_s=best_s, step=tuning.coarse_step):
        yield plan
        if plan.seconds < best_s:
            best = plan
            best_s = plan.seconds

    if best is None:
        return

    # 2. Fine steps around the best.
    yield from trade_offs(
        search.within,
        best.max_s * (1 + tuning.coarse_step),
        below_s=best_s,
        floor_s=best.max_s * (1 - tuning.coarse_step),
        step=tuning.fine_step,
    )
