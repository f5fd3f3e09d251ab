"""Let stages that do not fit the memory recompute as little as makes them fit."""

from collections.abc import Sequence
from functools import cache

import numpy as np

from planner.cost.candidate import Candidate
from planner.cost.recomputation import Choices, Recomputation
from planner.formats.files import replace
from planner.solver.evaluate.evaluation import priced
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation


class Leaner:
    """Chooses what recomputes in given stages; what it finds out about a stage is remembered."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._choices = cache(Recomputation(problem.layer_costs, problem.rules.recompute).choices)

    def lean_enough(self, stages: Sequence[Candidate]) -> Evaluation | None:
        """Return the priced plan, with stages that recompute as memory demands; None if it does not
        fit anyhow.
        """
        choices = [self._choices(stage.layers) for stage in stages]
        rows = [0] * len(stages)

        while all(row < len(each) for row, each in zip(rows, choices, strict=True)):
            plan = self._priced(stages, choices, rows)
            if plan.fits(self._problem.cluster):
                if self._problem.allows(plan):
                    return plan
                return None

            excess_bytes = self._excess_bytes(plan)
            for number, in_flight in enumerate(plan.price.in_flight):
                if excess_bytes[number] > 0:
                    rows[number] = _next_row(
                        choices[number],
                        rows[number],
                        in_flight,
                        excess_bytes[number],
                    )

        return None

    def _priced(
        self, stages: Sequence[Candidate], choices: Sequence[Choices], rows: Sequence[int]
    ) -> Evaluation:
        recomputing = []
        for stage, each, row in zip(stages, choices, rows, strict=True):
            options = replace(stage.options, recompute=each.groups(row))
            recomputing.append(replace(stage, options=options))

        return priced(self._problem, recomputing)

    def _excess_bytes(self, plan: Evaluation) -> list[int]:
        """Return by how many bytes each stage's device exceeds its memory; 0 where it does not."""
        excess_bytes = []
        for stage, held_bytes in zip(plan.stages, plan.price.gpu_bytes, strict=True):
            limit_bytes = self._problem.cluster.memory_of(stage.options.kind)
            excess_bytes.append(0 if limit_bytes is None else max(0, held_bytes - limit_bytes))

        return excess_bytes


def _next_row(choices: Choices, row: int, in_flight: int, excess_bytes: int) -> int:
    """Return the quickest choice after `row` that should save the bytes; past the end where `row`
    was the last one.

    The bytes at work depend on the microbatches, too, so that a choice that seems to hold too much
    may just do.
    """
    held_bytes = in_flight * choices.saved_bytes + choices.working_bytes
    enough = np.flatnonzero(held_bytes[row + 1 :] <= held_bytes[row] - excess_bytes)
    if len(enough):
        return row + 1 + int(enough[0])
    return max(row + 1, len(choices) - 1)
