"""Plans for zb-h1: the cut that is best for 1f1b-flush, with the time of zb-h1's own streams."""

from __future__ import annotations

from dataclasses import replace

from planner.solver.bounds.balance import balanced_s
from planner.solver.candidates.evaluation import priced, simulated
from planner.solver.candidates.first_plans import FirstPlans
from planner.solver.problem import Problem
from planner.solver.result import Found


def solve_zero_bubble(problem: Problem, flush: Found) -> Found:
    """Evaluate the stages of `flush`, the best plan for 1f1b-flush, under zb-h1, and bound what no plan can beat.

    How much of the bubble the weights' gradients fill depends on all stages together, which no walk along the layers
    can add up. A good cut does the same under both schedules: no stage has more work than the others.
    """
    assert problem.schedule.divides
    best = simulated(problem, priced(problem, flush.best.stages))
    found = replace(flush, bound_s=balanced_s(problem.layer_costs, problem.setting)).with_best(best)
    return FirstPlans(problem).at_least(found)
