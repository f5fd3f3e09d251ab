"""Minimise a sum over the stages plus a maximum over them, by trading the one against the other.

Let S(P) be the sum over the stages of a plan P, and M(P) the maximum over them. A search along cuts
can minimise S under a bound on M, so the best plan is found from a series of its answers:

    P(k) = argmin { S(P) : M(P) ≤ X(k) }
    B(k) = min over i ≤ k of  S(P(i)) + M(P(i))
    X(k+1) = (1 - ε) · min( M(P(k)), B(k) - S(P(k)) )

The best of the answers is the best plan, up to ε. Let P with M(P) ≤ X(k) be faster than B(k). Then

    S(P) ≥ S(P(k))        because P(k) has the least sum within X(k)
    M(P) < B(k) - S(P) ≤ B(k) - S(P(k))
    M(P) < M(P(k))        else S(P) + M(P) would be at least S(P(k)) + M(P(k)) ≥ B(k)

so P is within X(k+1), too, and the series only ends when no plan is left that is faster. It ends,
because X falls below a stage's part of the maximum each time: after no more answers than there are
such parts, and after log(X(0) / X(end)) / ε of them at most.
"""

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import numpy as np

from planner.solver.problem.result import RESOLUTION


class TradeOff(Protocol):
    """A plan that has the least sum within some bound on its maximum."""

    @property
    def sum_s(self) -> float:
        """Sum over the stages of their parts of it."""

    @property
    def max_s(self) -> float:
        """Maximum over the stages of their parts of it."""


Plan = TypeVar("Plan", bound=TradeOff)


def trade_offs(
    least_sum: Callable[[float], Plan | None],
    limit_s: float = np.inf,
    *,
    below_s: float = np.inf,
    floor_s: float = 0.0,
    step: float = RESOLUTION,
    every: bool = False,
) -> Iterator[Plan]:
    """Yield plans of growing sum and falling maximum, among them the one with the least total.

    Args:
        least_sum: returns the plan of least sum whose maximum is within a limit, None without one.
        limit_s: X(0), the first limit on the maximum.
        below_s: seconds that a plan must be below to be of use, which bound B from the start.
        floor_s: the limit at which the series ends.
        step: ε. It may be 0 where `least_sum` keeps maxima strictly below the limit.
        every: whether also to yield plans that are slower than an earlier one, for a caller to whom
            sum and maximum are bounds: X then falls with M alone.
    """
    best_s = below_s
    while True:
        plan = least_sum(limit_s)
        if plan is None:
            return

        yield plan

        limit_s = plan.max_s
        if not every:
            best_s = min(best_s, plan.sum_s + plan.max_s)
            # The maximum itself is a limit, because rounding could leave the difference above it.
            limit_s = min(limit_s, best_s - plan.sum_s)

        limit_s *= 1 - step
        if limit_s <= floor_s:
            return
