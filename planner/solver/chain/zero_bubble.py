"""Plans for zb-h1: the cut that is best for 1f1b-flush, at the pace of its own streams."""

from __future__ import annotations

from dataclasses import replace

from planner.cost.price import Price
from planner.solver.bounds.balance import balanced_s
from planner.solver.candidates.trials import Trials
from planner.solver.integer.request import Request
from planner.solver.methods import Found


def solve_zero_bubble(request: Request, drained: Found, trials: Trials) -> tuple[Found, Price]:
    """The plan with the stages of `drained`, the best for 1f1b-flush, and a time that no plan is below.

    What the weights' gradients fill of the bubble depends on all stages together, which no walk along the layers adds
    up. What the cut must do is the same under both schedules: leave no stage with more work than the others.
    """
    assert request.schedule.divides
    cost = trials.price(request.layer_costs, drained.stages, request.priced(drained.stages))
    bound_s = balanced_s(request.layer_costs.everything, request.setting)
    return replace(drained, bound_s=min(bound_s, cost.seconds_per_minibatch)), cost
