"""Plans that take no search: the answer where time runs out, and what no answer may be slower than.

They are what people use without a planner: data parallelism, and pipelines of equal blocks or equal times with the same
number of replicas for every stage, on all GPUs and on a half, a quarter and so on of them. A stage that does not fit
the memory recomputes its activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from planner.cost.layer_costs import Candidate
from planner.cost.rounding import SLACK
from planner.cost.stage_options import whole_stage
from planner.solver.candidates.budget import Budget
from planner.solver.candidates.evaluation import priced, simulated
from planner.solver.candidates.pipelines import too_large
from planner.solver.problem import Problem
from planner.solver.reference.baselines import equal_blocks, equal_time
from planner.solver.result import Evaluation, Found

MOST_SIMULATED = 3  # of the best by the cost model, before the search begins
WAITING = 0.1  # share of its time that a plan may wait in a simulation for which no time is left


class FirstPlans:
    """The plans of one problem that take no search, as far as they fit the memory."""

    def __init__(self, problem: Problem) -> None:
        # What these spend is not taken from the search, whose answer would depend on them otherwise.
        self._problem = replace(problem, budget=Budget(problem.budget.deadline, progress=problem.budget.progress))
        self._fitting: list[Evaluation] | None = None
        self.best: Evaluation | None = None

    def evaluate(self) -> None:
        """Find the fastest of them, of which the best by the cost model are simulated."""
        self._consider(self.fitting[:MOST_SIMULATED])

    def at_least(self, found: Found) -> Found:
        """Return what a search has found, or one of these plans if that is faster."""
        self._consider([plan for plan in self.fitting if plan.seconds < found.best.seconds * (1 - SLACK)])
        return found if self.best is None or self._none_beats(found.best) else found.with_best(self.best)

    def _none_beats(self, plan: Evaluation) -> bool:
        assert self.best is not None
        seconds = plan.seconds
        if self.best.simulated and not plan.simulated and not too_large(self._problem, plan.stages):
            seconds /= 1 - WAITING  # time ran out before its simulation ended
        return seconds <= self.best.seconds * (1 + SLACK)

    def _consider(self, plans: Sequence[Evaluation]) -> None:
        """Simulate plans, the fastest by the cost model first, as long as one may be the best."""
        for plan in plans:
            if self.best is not None and plan.seconds >= self.best.seconds:
                break  # simulating only adds waiting
            evaluation = simulated(self._problem, plan) if self._problem.simulates else plan
            if self.best is None or evaluation.seconds < self.best.seconds:
                self.best = evaluation

    @property
    def fitting(self) -> list[Evaluation]:
        """The plans that fit the memory, the fastest by the cost model first."""
        if self._fitting is None:
            plans = (_lean_enough(self._problem, stages) for stages in _all_stages(self._problem))
            self._fitting = sorted((plan for plan in plans if plan is not None), key=lambda plan: plan.seconds)
        return self._fitting


def _all_stages(problem: Problem) -> Iterator[list[Candidate]]:
    """Yield the stages of each plan, which may not fit the memory."""
    gpus = problem.cluster.gpus
    most_replicas = problem.microbatches if problem.schedule.divides else gpus
    most_stages = min(gpus, problem.rules.max_stages or gpus)
    cuts: dict[int, list[list[Candidate]]] = {}
    for used in _halves(gpus):
        for stages in (2**power for power in range(most_stages.bit_length())):
            replicas = used // stages
            if not 1 <= replicas <= most_replicas or stages > most_stages:
                continue
            if stages not in cuts:
                cuts[stages] = [equal_blocks(problem.layer_costs, stages), equal_time(problem.layer_costs, stages)]
            for each in cuts[stages]:
                if len(each) == stages:
                    yield [replace(stage, options=replace(stage.options, replicas=replicas)) for stage in each]


def _halves(gpus: int) -> list[int]:
    return [gpus >> power for power in range(gpus.bit_length())]


def _lean_enough(problem: Problem, stages: list[Candidate]) -> Evaluation | None:
    """Return the priced plan with as many recomputing stages as the memory demands; None if it does not fit anyhow."""
    rule = problem.rules.recompute
    if rule in ("always", "blocks"):
        stages = [_recomputing(stage) for stage in stages]
    while True:
        plan = priced(problem, stages)
        if plan.fits(problem.cluster):
            return plan if _allowed(problem, plan) else None
        held = zip(plan.price.gpu_bytes, stages, strict=True)
        over = [total > (problem.cluster.memory_of(stage.options.kind) or total) for total, stage in held]
        if rule != "auto" or any(stage.options.recompute for stage, each in zip(stages, over, strict=True) if each):
            return None
        stages = [_recomputing(stage) if each else stage for stage, each in zip(stages, over, strict=True)]


def _recomputing(stage: Candidate) -> Candidate:
    return replace(stage, options=replace(stage.options, recompute=whole_stage(stage.layers)))


def _allowed(problem: Problem, plan: Evaluation) -> bool:
    """Return whether the plan's gradients are as recent as asked for."""
    most = problem.rules.max_staleness
    return most is None or max(map(problem.schedule.staleness, plan.price.in_flight)) <= most
