"""Plans that take no search: the answer where time runs out, and what no answer may be slower than.

They are what people use without a planner: data parallelism, and pipelines of equal blocks or equal times with the same
number of replicas for every stage, with the optimizer's state whole or divided over the replicas, on all GPUs and on a
half, a quarter and so on of them. Under schedules that drain, each number of replicas has as many stages as there are
GPUs for: as on 35 groups of GPUs 35, 17, 11, 8, 7. A stage that does not fit the memory recomputes as little as makes
it fit. Where none of these plans fits, one walk over some of the cuts finds a plan that does, of stages as large as
their memory allows.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import accumulate, islice, takewhile

import numpy as np

from planner.cost.candidate import Candidate, StageOptions
from planner.cost.recomputation import Recomputation
from planner.solver.choose.baselines import equal_blocks, equal_times
from planner.solver.evaluate.evaluation import priced, simulated
from planner.solver.evaluate.pipelines import MOST_COMPUTATIONS
from planner.solver.problem.budget import Budget
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation, Found
from planner.solver.problem.states import Chain, column
from planner.solver.search.pipeline_search import PipelineSearch
from planner.solver.search.restricted import counts_to_try
from planner.units import SLACK

GRACE_S = 3.0  # to simulate these plans after the time limit: otherwise nobody knows which is the fastest
MOST_SIMULATED = 3  # of the best by the cost model, before the search begins
MOST_AT_ONCE = 2**12  # forwards of a minibatch of plans that are simulated before the search: parts of a second
MOST_REGULAR = 2**12  # stages of the plans that use all GPUs, in all
MOST_CUTS = 100  # among which any plan that fits is sought


class FirstPlans:
    """The plans of one problem that take no search, as far as they fit the memory."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._fitting = fitting_plans(self._hurried())  # as far as nobody has looked at them
        self.best: Evaluation | None = None

    def evaluate(self) -> None:
        """Find the fastest of them, of which the best by the cost model are simulated, unless that takes seconds."""
        self._consider(self._hurried(), islice(self._fitting, MOST_SIMULATED), MOST_AT_ONCE)

    def last_resort(self) -> Evaluation | None:
        """Return the best of them; where none fits the memory, any plan that does, or None if no such plan is found."""
        problem, cluster = self._problem, self._problem.cluster
        if self.best is None and cluster.memory_bytes is not None:
            # This is what is left to do when the time is over, so it must not end with it, and has no time for choices.
            rules = replace(problem.rules, recompute="blocks") if problem.recompute == "auto" else problem.rules
            unhurried = replace(problem, budget=Budget(progress=problem.budget.progress), rules=rules)
            chain = Chain(problem.layer_costs)
            search = PipelineSearch(unhurried, chain.only(chain.spread(MOST_CUTS)))
            if (found := search.fits(cluster.gpus, cluster.memory_bytes)) is not None:
                plan = Leaner(problem).lean_enough(found.stages) or found
                self._consider(self._hurried(), [plan] if problem.allows(plan) else [])
        return self.best

    def at_least(self, found: Found) -> Found:
        """Return what a search has found, or one of these plans if that is faster."""
        problem = self._hurried()
        if not found.best.simulated:  # time ran out before its waiting was known
            found = found.with_best(simulated(problem, found.best))
        if self.best is not None and not self.best.simulated:
            self.best = simulated(problem, self.best)
        # No plan is faster, and with many layers these take longer to find than the search took. But the search has no
        # level 2, which may save recomputation.
        if self.best is None and found.best.seconds <= found.bound_s * (1 + SLACK) and 2 not in problem.levels:
            return found
        enough_s = found.best.counted_s * (1 - SLACK)
        self._consider(problem, takewhile(lambda plan: plan.seconds < enough_s, self._fitting))
        self._problem.budget.seen |= problem.budget.seen
        return found if self.best is None or not self.best.saves(found.best) else found.with_best(self.best)

    def _hurried(self) -> Problem:
        """Return the problem with a budget of its own, also where the time is over.

        What these plans spend is not taken from the search, whose answer would depend on them otherwise.
        """
        given = self._problem.budget
        return replace(self._problem, budget=replace(given.apart(), deadline=given.deadline.at_least(GRACE_S), seen={}))

    def _consider(self, problem: Problem, plans: Iterable[Evaluation], most: int = MOST_COMPUTATIONS) -> None:
        """Simulate plans of up to so many forwards, the fastest by the cost model first, while one may be the best."""
        left = MOST_COMPUTATIONS
        for plan in plans:
            forwards = len(plan.stages) * problem.microbatches
            left -= forwards
            if self.best is not None and (plan.seconds >= self.best.counted_s or left < 0):
                break  # simulating only adds waiting, and of large plans it takes seconds
            evaluation = simulated(problem, plan) if forwards <= most else plan
            if self.best is None or evaluation.saves(self.best):
                self.best = evaluation
        if problem.deadline.at_s is not None:  # otherwise the search looks at all that may be faster
            self._problem.budget.count += problem.budget.count


def fitting_plans(problem: Problem) -> Iterator[Evaluation]:
    """Yield the plans that fit the memory, the fastest by the cost model first.

    Pricing a plan of many stages takes time, and so does finding what recomputes, which adds to its time. So both are
    done for those plans only that may be the next by what is known of their time.
    """
    leaner, usual, priced_once = Leaner(problem), list(_usual_plans(problem)), set[int]()
    plans: list[tuple[float, int, Evaluation | None]] = [(least_s, n, None) for n, (least_s, _, _) in enumerate(usual)]
    heapify(plans)
    found = False
    while plans and not (found and problem.deadline.passed):
        _, number, plan = heappop(plans)
        if plan is not None:
            found = True
            yield plan
            continue
        stages = [replace(stage, options=usual[number][2]) for stage in usual[number][1]]
        if number not in priced_once:
            priced_once.add(number)
            heappush(plans, (priced(problem, stages).seconds, number, None))
        elif (plan := leaner.lean_enough(stages)) is not None:
            heappush(plans, (plan.seconds, number, plan))


def _usual_plans(problem: Problem) -> Iterator[tuple[float, Sequence[Candidate], StageOptions]]:
    """Yield each plan's least seconds per minibatch, its cut and the options of all its stages.

    Plans may not fit the memory, and divide nothing, the optimizer's state, or of the whole model more than that.
    """
    gpus = problem.cluster.gpus
    most_replicas = min(problem.most_replicas, problem.microbatches if problem.schedule.divides else gpus)
    most_stages = min(gpus, problem.rules.max_stages or gpus)
    drains = problem.schedule.formula == "synchronous"
    memory = None if problem.cluster.kinds else problem.cluster.memory_bytes
    gradients = ("gradient_bytes",) if problem.microbatches > 1 else ()  # of a single one not all exist at once
    layers_s, kept, optimizer = (
        np.sum([column(problem.layer_costs, name) for name in names], axis=0)
        for names in (("forward_s", "backward_s"), ("weight_bytes", *gradients), ("optimizer_bytes",))
    )
    counts = _stages_to_try(problem, min(most_stages, len(layers_s)))
    for stages, equal in zip(counts, equal_times(problem.layer_costs, counts, problem.budget.deadline), strict=False):
        if len(equal) < stages:
            return  # there are fewer cuts
        blocks = equal_blocks(problem.layer_costs, stages)
        for cut in [equal, blocks] if len(blocks) == stages and blocks != equal else [equal]:
            rows = [list(stage.layers) for stage in cut]
            slowest_s, total_s = max(float(layers_s[own].sum()) for own in rows), float(layers_s.sum())
            if problem.cluster.kinds:
                slowest_s = total_s = 0.0  # the devices may be faster than the profiled one
            # Where the state does not fit, no recomputation helps.
            state = [(float(kept[own].sum()), float(optimizer[own].sum())) for own in rows]
            for used in counts_to_try(gpus) if stages == 1 else (gpus >> power for power in range(gpus.bit_length())):
                replicas = used // stages
                if 1 <= replicas <= most_replicas:
                    least_s = slowest_s * problem.microbatches / replicas
                    if drains:
                        least_s = total_s + max(0.0, least_s - slowest_s)
                    for level in problem.levels if replicas > 1 else (0,):
                        parts = [replicas if level > least else 1 for least in (1, 0)]
                        held = max(whole / parts[0] + divided / parts[1] for whole, divided in state)
                        may = level < 2 or (stages == 1 and problem.microbatches % replicas == 0)
                        if may and (memory is None or held <= memory):
                            yield least_s * (1 - SLACK), cut, StageOptions(replicas, level=level)


def _stages_to_try(problem: Problem, most: int) -> list[int]:
    """Return numbers of stages, ascending: the powers of two, and under schedules that drain whatever uses all GPUs.

    Of the latter only the least, `MOST_REGULAR` stages in all: thousands of GPUs would have hundreds of pipelines.
    """
    gpus, tried = problem.cluster.gpus, {2**power for power in range(most.bit_length())}
    if not (problem.schedule.asynchronous or problem.cluster.kinds):
        regular = sorted({gpus // replicas for replicas in range(1, gpus + 1)})
        tried |= {each for each, total in zip(regular, accumulate(regular), strict=True) if total <= MOST_REGULAR}
    return sorted(each for each in tried if each <= most)


class Leaner:
    """Lets stages that do not fit the memory recompute as little as makes them fit."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._choices = cache(Recomputation(problem.layer_costs, problem.rules.recompute).choices)

    def lean_enough(self, stages: Sequence[Candidate]) -> Evaluation | None:
        """Return the priced plan, with stages that recompute as memory demands; None if it does not fit anyhow."""
        problem, choices = self._problem, [self._choices(stage.layers) for stage in stages]
        rows = [0] * len(stages)
        while True:
            again = [each.groups(row) for each, row in zip(choices, rows, strict=True)]
            ways = [replace(stage.options, recompute=groups) for stage, groups in zip(stages, again, strict=True)]
            plan = priced(problem, [replace(stage, options=way) for stage, way in zip(stages, ways, strict=True)])
            if plan.fits(problem.cluster):
                return plan if problem.allows(plan) else None
            for number, (each, row, held) in enumerate(zip(choices, rows, plan.price.gpu_bytes, strict=True)):
                limit = problem.cluster.memory_of(plan.stages[number].options.kind)
                if limit is not None and held > limit:
                    # The quickest choice after this one that should save these bytes. The bytes at work depend on the
                    # microbatches, too, so that a choice that seems too large may just do.
                    holds = plan.price.in_flight[number] * each.saved_bytes + each.working_bytes
                    enough = np.flatnonzero(holds[row + 1 :] <= holds[row] - (held - limit))
                    rows[number] = row + 1 + int(enough[0]) if len(enough) else max(row + 1, len(each) - 1)
            if any(row == len(each) for row, each in zip(rows, choices, strict=True)):
                return None
