"""Search for plans on GPUs of several kinds: for each order of the kinds, a search along their line.

Nearly exact, on links that are all alike, for plans in which the GPUs of a kind follow each other. Local search on
simulated times then also lets kinds take turns. The bound is perfect balance.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations, permutations

import numpy as np

from planner.cost.kinds import everything_on, kind_on
from planner.errors import InfeasibleError, InputError
from planner.solver.choose.first_plans import Leaner
from planner.solver.choose.improvement import improved
from planner.solver.evaluate.evaluation import fastest, priced
from planner.solver.problem.budget import OutOfTimeError
from planner.solver.problem.infeasible import against_rules
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation, Found
from planner.solver.problem.states import Chain
from planner.solver.search.chain.ways import relaxed_s
from planner.solver.search.line import Kinds, LinePlan, LineSearch, StagesOn
from planner.solver.search.restricted import slowed
from planner.solver.search.trade import trade_offs

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
    widest = search.within(np.inf)
    if widest is None:
        return
    limit_s = min(widest.max_s, best_s - widest.sum_s)
    if limit_s <= 0:
        return

    # 1. Coarse steps over all limits.
    best = None
    for plan in trade_offs(search.within, limit_s, below_s=best_s, step=COARSE):
        yield plan
        if plan.seconds < best_s:
            best = plan
            best_s = plan.seconds
    if best is None:
        return

    # 2. Fine steps around the best.
    yield from trade_offs(
        search.within,
        best.max_s * (1 + COARSE),
        below_s=best_s,
        floor_s=best.max_s * (1 - COARSE),
        step=FINE,
    )
