"""Choose the fastest plan by simulation: alternatives to the best one by the cost model, then local search.

Under asynchronous schedules the alternatives are the kinds of plans of `planner.solver.search.restricted`, found for
links that are all alike. Under synchronous schedules they are the plans that the search meets on its way to the best.

No change of one thing leads from nine replicas to a short pipeline, so local search begins at the fastest plan, and at
the fastest of each of a few other numbers of stages. Where GPUs are of several kinds, it changes how many replicas each
stage has, and `allotted` says which GPUs they are.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, permutations, product

import numpy as np

from planner.cost.candidate import Candidate
from planner.cost.weight_copies import counted_with_copies
from planner.solver.choose.first_plans import Leaner
from planner.solver.evaluate.evaluation import SETTLED, fastest, in_every_order, priced, priced_path, simulated
from planner.solver.evaluate.pipelines import MOST_WORKERS
from planner.solver.problem.budget import LATER, OutOfTimeError
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import RESOLUTION, WAITING, CutPath, Evaluation, Found, stages_along
from planner.solver.problem.states import Chain
from planner.solver.search.chain.fewest import FEW_STATES
from planner.solver.search.chain.search import Search
from planner.solver.search.chain.synchronous import SynchronousSearch
from planner.solver.search.chain.ways import BestWays
from planner.solver.search.levels.levels import MOST_PLACED, PathPrices, local_search_for
from planner.solver.search.levels.local_search import LocalSearch
from planner.solver.search.pipeline_search import MOST_SYNCHRONOUS_STATES, PipelineSearch
from planner.solver.search.restricted import (
    KINDS,
    Kind,
    StraightSearch,
    counts_to_try,
    families,
    kinds_of_plans,
    slowed,
    steps_below,
)
from planner.units import SLACK

SLOWER_LINKS = (1.0, 2.0)  # factors by which links are slower in the alternatives of synchronous schedules
# Alternatives for faster links, on clusters of several levels: the factor between them, and how many.
FASTER, FASTER_STEPS = 2.0, 4
SLOWED = 1.15  # how much worse than the best a plan's bound may be on a slower link, to be proposed


def fastest_simulated(search: PipelineSearch, plans: Sequence[Evaluation], bound_s: float) -> Evaluation:
    """Return the fastest plan by simulation: one of `plans`, the best by the cost model, or an alternative.

    No plan takes less than `bound_s`: what is as fast needs no alternative.
    """
    problem, budget, best = search.problem, search.problem.budget, fastest(search.problem, plans)
    if not best.simulated:
        return best
    if problem.schedule.asynchronous:
        return _fastest_kind(search, best, bound_s)
    least_s = min(plan.seconds for plan in plans)
    if len(search.space) > MOST_SYNCHRONOUS_STATES:
        return best
    for slower in SLOWER_LINKS:
        if best.seconds <= least_s * (1 + SETTLED):
            break
        if budget.over:
            budget.exhausted = False
            break
        # Slower links make the search weigh messages more, so it meets plans with fewer of them.
        again = SynchronousSearch(search.space, problem.synchronous(slowed(problem.link, slower)), problem.limits)
        try:
            again.best(max(problem.precision, RESOLUTION))
        except OutOfTimeError:
            break
        best = fastest(problem, [*plans, *map(search.priced, again.found)], best)
    return best


def _fastest_kind(search: PipelineSearch, best: Evaluation, bound_s: float) -> Evaluation:
    """Return the best plan so far, or the best of a kind on some number of GPUs if that is faster by simulation."""
    problem, budget = search.problem, search.problem.budget
    if problem.schedule.stashes:
        # Without replicas gradients may be less late, and what is nearly as fast counts among the plans simulated.
        most = replace(problem.limits, gpus=min(problem.limits.gpus, MOST_WORKERS))
        straight = StraightSearch(search.space, problem.asynchronous(), most).best(best.seconds * LATER)
        straight_plan = None if straight is None else simulated(problem, search.priced(straight), best.seconds * LATER)
        if straight_plan is not None and straight_plan.simulated and straight_plan.saves(best):
            best = straight_plan
    # On several levels a plan is found for links that are all alike, and local search adapts it to the cluster's.
    nearby = None
    if problem.placed and problem.cluster.gpus <= MOST_PLACED:
        nearby = local_search_for(problem, search.space, PathPrices(problem, search.space).strain)
    # From many GPUs to few: plans on fewer GPUs wait less, until their busiest resource alone is too slow.
    for space, (search_type, link, limits) in _kinds(search):
        model, used = problem.asynchronous(link), limits.gpus + 1
        # On a slower link a plan looks slower than it is, so its limit is more generous.
        generous = SLOWED if link.bandwidth_bytes_per_s < problem.link.bandwidth_bytes_per_s else 1
        for count in counts_to_try(limits.gpus):
            if best.seconds <= bound_s * (1 + SETTLED):
                return best
            if count >= used:
                continue  # the best plan on more GPUs left some unused
            if budget.over:
                budget.exhausted = False
                return best
            path = search_type(space, model, replace(limits, gpus=count)).best(best.seconds * generous)
            if path is None:
                break
            used, proposal = path.gpus, search.priced(path)
            if nearby is not None and proposal.seconds >= best.seconds and (adapted := nearby.from_(path)) is not None:
                proposal = search.priced(adapted)
            best = fastest(problem, [proposal], best)
    return best


def _kinds(search: PipelineSearch) -> Iterator[tuple[Chain, Kind]]:
    problem, space = search.problem, search.space
    everything = problem.layer_costs.footprint(problem.layer_costs.single_stage)
    link_unit = (int(everything.weight_bytes + everything.saved_bytes) or 1) / float(space.compute_s[-1])
    # The search over the profile itself does not know what the copies of a shared weight cost a stage, as the
    # simulation does: here are the cuts at which every copy costs that, if there are any.
    counted = counted_with_copies(problem.layer_costs.profile)
    # Over many states all searches choose between the whole of a stage and nothing, so the families are alike.
    for limits in families(problem.limits)[-1 if len(space) > FEW_STATES else 0 :]:
        kinds = [*kinds_of_plans(problem.link, limits, link_unit)]
        if problem.placed:  # some messages cross faster links than the slowest
            own, most = problem.link.bandwidth_bytes_per_s, replace(limits, gpus=min(limits.gpus, MOST_WORKERS))
            faster = steps_below(own * FASTER**FASTER_STEPS, link_unit, FASTER, FASTER_STEPS)
            kinds += [(Search, slowed(problem.link, own / bandwidth), most) for bandwidth in faster]
        if counted is not None:
            copies = Chain(problem.with_profile(counted).layer_costs)
            yield from ((copies, kind) for kind in kinds[: len(KINDS)])
        yield from ((space, kind) for kind in kinds)


MOST_ALLOTMENTS = 24  # ways to share out the GPUs that are priced for one plan
STARTS = 4  # of the search, each at another number of stages
FARTHER = 4  # times as many plans are priced on clusters of several levels, with half as many times the instructions
MOST_PRICED, FEW_LAYERS = 100, 50  # plans priced from each start, for models of so many layers; of larger ones, fewer
DEEPER = (1.0, 1.5, 2.0)  # times the published depths that stages are given room for
ADDED = 1.25  # times the best plan's seconds, up to which plans are simulated that may take less than their price
MOST_INSTRUCTIONS = 2**16  # of the simulations from each start: a part of a second


def improved(problem: Problem, found: Found, others: Sequence[Evaluation] = ()) -> Found:
    """Return the answer with the fastest plan that single changes lead to, one after the other.

    The search begins again with `others`, as far as the effort for one start allows; by default with plans that were
    simulated before, each with an effort of its own.
    """
    best = found.best
    if best.seconds <= found.bound_s * (1 + SETTLED) or problem.budget.over:
        return found
    space, budget = Chain(problem.layer_costs), problem.budget
    if (path := _path(problem, space, best)) is None:
        return found
    again = others or _met(problem, best)
    # Where links differ, the searches propose worse starts.
    more = FARTHER if problem.placed else 1
    most_instructions = MOST_INSTRUCTIONS * max(1, more // 2)
    own = budget.apart(min(budget.left, most_instructions))
    trials = _Trials(replace(problem, budget=own), space, path, best)
    layers = len(problem.layer_costs.profile.layers)
    most = MOST_PRICED * more * FEW_LAYERS // max(FEW_LAYERS, layers)
    # Stages that recompute more than the published depths demand have room for deeper pipelines.
    limited = problem.cluster.memory_bytes is not None and not problem.cluster.kinds
    ways = [BestWays(problem, space, deeper).options for deeper in (DEEPER if limited else (1.0,))]
    gpus, deadline = problem.cluster.gpus, budget.deadline
    local_search = LocalSearch(space, gpus, trials.seconds, ways, most, deadline, trials.least_s)
    for start in (path, *filter(None, (_path(problem, space, plan) for plan in again))):
        local_search.from_(start)
        if not others:
            local_search.allow(most)
            own.left = min(budget.left, most_instructions)
    budget.count += own.count
    return found if trials.best is best else found.with_best(trials.best)


def deepened(problem: Problem, found: Found) -> Found:
    """Return the answer with stages that recompute more and run deeper, where a long pipeline then waits less.

    Under schedules that drain, a pipeline that is deeper in some stages alone may take twice as long, so that local
    search, which changes a stage at a time, does not meet one that is deeper in all.
    """
    best, waited_s = found.best, found.best.seconds - (found.best.price.cost_model_s or found.best.seconds)
    schedule, limited = problem.schedule, problem.cluster.memory_bytes is not None and not problem.cluster.kinds
    if schedule.asynchronous or not (schedule.deepens and limited) or waited_s <= WAITING * best.seconds:
        return found
    space, budget = Chain(problem.layer_costs), problem.budget
    if (path := _path(problem, space, best)) is None:
        return found
    own = replace(problem, budget=budget.apart(math.inf))  # two simulations, of what takes long because it waits
    for deeper in DEEPER[1:]:
        options = BestWays(problem, space, deeper).options(path.states, path.replicas)
        plan = priced_path(problem, space, replace(path, options=options))
        below_s = min(best.seconds, problem.hopeless_s)
        if problem.allows(plan) and plan.seconds < below_s and not budget.deadline.passed:
            evaluation = simulated(own, plan, best.seconds)
            best = evaluation if evaluation.simulated and evaluation.saves(best) else best
    budget.count += own.budget.count
    return found.with_best(best)


def _met(problem: Problem, best: Evaluation) -> list[Evaluation]:
    """Return the fastest plans that were simulated with each other number of stages, then with other replicas."""
    seen = sorted(filter(problem.allows, problem.budget.seen.values()), key=lambda plan: plan.seconds)
    stages, configs = {len(best.stages): best}, {best.config: best}
    for plan in seen:
        stages.setdefault(len(plan.stages), plan)
        configs.setdefault(plan.config, plan)
    starts = {plan.config: plan for plan in (*stages.values(), *configs.values())}
    return list(starts.values())[1:STARTS]


class _Trials:
    """The best plan so far, and how plans are compared with it."""

    def __init__(self, problem: Problem, space: Chain, path: CutPath, start: Evaluation) -> None:
        self._problem, self._space, self._path, self._start, self.best = problem, space, path, start, start
        # Stages on unlike GPUs update at different times, which the cost model of synchronous schedules adds up.
        adds = problem.cluster.kinds and not problem.schedule.asynchronous
        self._lenient = ADDED if adds else 1 - SLACK
        self._orders: dict[CutPath, list[Evaluation]] = {}

    def least_s(self, path: CutPath) -> float:
        """Return seconds that no plan of the path is below; infinity where none is allowed."""
        plans: Iterable[Evaluation] = ()
        if self._problem.cluster.kinds:
            plans = allotted(self._problem, stages_along(self._space, path))
        elif path != self._path and self._problem.allows(plan := priced_path(self._problem, self._space, path)):
            plans = [plan]
        orders = self._orders[path] = in_every_order(self._problem, plans)
        if path == self._path:
            return 0.0
        return orders[0].seconds / max(1.0, self._lenient) if orders else np.inf

    def seconds(self, path: CutPath) -> float:
        """Return the seconds that count; infinity for what cannot be faster than the best plan."""
        least_s = self._start.counted_s if path == self._path else np.inf
        for order in self._orders.pop(path):
            if self._problem.budget.over or order.seconds >= min(least_s, self.best.counted_s) * self._lenient:
                break  # there is no time left; or simulating, which only adds waiting, cannot help
            evaluation = simulated(self._problem, order, self.best.counted_s)
            if self._start.simulated and not evaluation.simulated:
                break  # the budget ended the simulation
            least_s = min(least_s, evaluation.counted_s)
            self.best = evaluation if evaluation.saves(self.best) else self.best
        return least_s


def _path(problem: Problem, space: Chain, plan: Evaluation) -> CutPath | None:
    """Return a plan's path over the space; None where its stages are no runs of consecutive layers that may be cut."""
    lengths = [len(space.layers(0, state)) for state in range(len(space))]
    ends = [0, *(len(stage.before) + len(stage.layers) for stage in plan.stages)]
    runs = all(stage.before == frozenset(range(end)) for stage, end in zip(plan.stages, ends, strict=False))
    placed = not problem.cluster.kinds and any(stage.ranks for stage in plan.stages)
    if not runs or placed or any(end not in lengths for end in ends):
        return None
    states = tuple(lengths.index(end) for end in ends)
    return CutPath(states, tuple(stage.options for stage in plan.stages), np.inf)


_Ranks = tuple[tuple[int, ...], ...]  # of each stage


def allotted(problem: Problem, stages: Sequence[Candidate]) -> Iterator[Evaluation]:
    """Yield the plans of these stages on GPUs of the kinds, as far as they are allowed.

    Stages take consecutive GPUs of the kinds in every order, the first stage or the heaviest one first. In small
    clusters other mixtures follow. Stages recompute as memory demands.
    """
    leaner, replicas = Leaner(problem), [stage.replicas for stage in stages]
    kinds = [tuple(ranks) for ranks in problem.cluster.kind_ranks]
    shares_s = [float(problem.layer_costs.work(stage).compute_s) / stage.replicas for stage in stages]
    heaviest = sorted(range(len(stages)), key=lambda number: -shares_s[number])
    orders = [range(len(stages)), heaviest, range(len(stages) - 1, -1, -1)]
    lines = (_in_line(replicas, order, kinds_first) for kinds_first in permutations(kinds) for order in orders)
    found = dict.fromkeys((*islice(lines, MOST_ALLOTMENTS), *islice(_mixtures(replicas, kinds), MOST_ALLOTMENTS)))
    for ranks in islice(found, MOST_ALLOTMENTS):
        placed = [
            replace(stage, ranks=own, options=replace(stage.options, recompute=()))
            for stage, own in zip(stages, ranks, strict=True)
        ]
        if (plan := leaner.lean_enough(priced(problem, placed).stages)) is not None:
            yield plan


def _in_line(replicas: Sequence[int], order: Sequence[int], kinds: Sequence[Sequence[int]]) -> _Ranks:
    line = chain(*kinds)
    ranks = {number: tuple(sorted(islice(line, replicas[number]))) for number in order}
    return tuple(ranks[number] for number in range(len(replicas)))


def _mixtures(replicas: Sequence[int], free: Sequence[tuple[int, ...]]) -> Iterator[_Ranks]:
    """Yield the first free GPUs of each kind for the stages, for all numbers of each kind."""
    if not replicas:
        yield ()
        return
    for counts in product(*(range(min(len(own), replicas[0]) + 1) for own in free)):
        if sum(counts) == replicas[0]:
            own = tuple(rank for ranks, count in zip(free, counts, strict=True) for rank in ranks[:count])
            left = [ranks[count:] for ranks, count in zip(free, counts, strict=True)]
            yield from ((own, *others) for others in _mixtures(replicas[1:], left))
