"""Plans that take no search: the answer where time runs out, and what no answer may be slower than.

They are what people use without a planner: data parallelism, and pipelines of equal blocks or equal times with the same
number of replicas for every stage, on all GPUs and on a half, a quarter and so on of them, with the optimizer's state
whole or divided over the replicas. A stage that does not fit the memory recomputes as little as makes it fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from planner.cost.layer_costs import Candidate
from planner.cost.recomputation import Choices, Recomputation
from planner.cost.rounding import SLACK
from planner.cost.stage_options import Groups, StageOptions
from planner.solver.candidates.budget import Budget
from planner.solver.candidates.evaluation import priced, simulated
from planner.solver.problem import Problem
from planner.solver.reference.baselines import equal_blocks, equal_time
from planner.solver.result import Evaluation, Found

MOST_SIMULATED = 3  # of the best by the cost model, before the search begins
WAITING = 0.1  # share of the time of a plan that is not simulated, beside one that is


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
        return found if self.best is None or not self._beats(self.best, found.best) else found.with_best(self.best)

    def _consider(self, plans: Sequence[Evaluation]) -> None:
        """Simulate plans, the fastest by the cost model first, as long as one may be the best."""
        for plan in plans:
            if self.best is not None and plan.seconds >= self.best.seconds:
                break  # simulating only adds waiting
            evaluation = simulated(self._problem, plan) if self._problem.simulates else plan
            if self.best is None or self._beats(evaluation, self.best):
                self.best = evaluation

    def _beats(self, one: Evaluation, other: Evaluation) -> bool:
        # A plan that is too large to simulate, or for which no time was left, would wait, too.
        allowance = {True: 1.0, False: 1 / (1 - WAITING)}
        return one.seconds * allowance[one.simulated] < other.seconds * allowance[other.simulated] * (1 - SLACK)

    @property
    def fitting(self) -> list[Evaluation]:
        """The plans that fit the memory, the fastest by the cost model first."""
        if self._fitting is None:
            leaner = _Leaner(self._problem)
            plans = (leaner.lean_enough(stages) for stages in _all_stages(self._problem))
            self._fitting = sorted((plan for plan in plans if plan is not None), key=lambda plan: plan.seconds)
        return self._fitting


def _all_stages(problem: Problem) -> Iterator[list[Candidate]]:
    """Yield the stages of each plan, which may not fit the memory, with a whole and with a sharded optimizer."""
    gpus, rule = problem.cluster.gpus, problem.rules.shard_optimizer
    may_shard = rule != "never" and problem.layer_costs.profile.may_shard_optimizer
    most_replicas = problem.microbatches if problem.schedule.divides else gpus
    most_stages = min(gpus, problem.rules.max_stages or gpus)
    for stages in (2**power for power in range(most_stages.bit_length())):
        cuts = [equal_time(problem.layer_costs, stages)]
        if (blocks := equal_blocks(problem.layer_costs, stages)) not in cuts:
            cuts.append(blocks)
        for cut in (each for each in cuts if len(each) == stages):
            for used in (gpus >> power for power in range(gpus.bit_length())):
                replicas = used // stages
                if not 1 <= replicas <= most_replicas:
                    continue
                for sharded in {rule == "always" and replicas > 1, may_shard and replicas > 1}:
                    options = StageOptions(replicas, sharded=sharded)
                    yield [replace(stage, options=options) for stage in cut]


class _Leaner:
    """Lets stages that do not fit the memory recompute as little as makes them fit."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._recomputation = problem, Recomputation(problem.layer_costs, problem.rules.recompute)

    def lean_enough(self, stages: Sequence[Candidate]) -> Evaluation | None:
        """Return the priced plan, with stages that recompute as memory demands; None if it does not fit anyhow."""
        problem, choices = self._problem, [self._recomputation.choices(stage.layers) for stage in stages]
        rows = [0] * len(stages)
        while True:
            recomputing = [
                _with(stage, each.groups(row)) for stage, each, row in zip(stages, choices, rows, strict=True)
            ]
            plan = priced(problem, recomputing)
            if plan.fits(problem.cluster):
                return plan if problem.allows(plan) else None
            for number, (each, row, held) in enumerate(zip(choices, rows, plan.price.gpu_bytes, strict=True)):
                limit = problem.cluster.memory_of(stages[number].options.kind)
                if limit is not None and held > limit:
                    rows[number] = _leaner_row(each, row, plan.price.in_flight[number], held - limit)
            if any(row == len(each) for row, each in zip(rows, choices, strict=True)):
                return None


def _leaner_row(choices: Choices, row: int, in_flight: int, over_bytes: int) -> int:
    """Return the quickest choice after `row` that should save these bytes; the number of choices if none does."""
    held = in_flight * choices.saved_bytes + choices.working_bytes
    enough = np.flatnonzero(held[row + 1 :] <= held[row] - over_bytes)
    # The bytes at work depend on the microbatches, too, so a choice that seems too large may just do.
    return row + 1 + int(enough[0]) if len(enough) else max(row + 1, len(choices) - 1)


def _with(stage: Candidate, groups: Groups) -> Candidate:
    return replace(stage, options=replace(stage.options, recompute=groups))
