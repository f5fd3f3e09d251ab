"""Trading a sum against a maximum: the best total of any plans, in few answers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.solver.search.trade import trade_offs


@dataclass(frozen=True)
class Parts:
    """A plan's sum and maximum."""

    sum_s: float
    max_s: float

    @property
    def total_s(self) -> float:
        return self.sum_s + self.max_s


@dataclass
class Search:
    """Answers from a list of plans, and counts the questions."""

    plans: list[Parts]
    asked: int = 0

    def within(self, limit_s: float) -> Parts | None:
        self.asked += 1
        assert self.asked <= len(self.plans) + 1
        fitting = [plan for plan in self.plans if plan.max_s <= limit_s]
        return min(fitting, key=lambda plan: plan.sum_s, default=None)

    def below(self, limit_s: float) -> Parts | None:
        self.asked += 1
        assert self.asked <= len(self.plans) + 1
        fitting = [plan for plan in self.plans if plan.max_s < limit_s]
        return min(fitting, key=lambda plan: plan.sum_s, default=None)


seconds = st.integers(0, 12).map(float)
plans = st.lists(st.builds(Parts, seconds, seconds), max_size=12)


@given(plans=plans)
def test_the_best_total_is_among_the_answers(plans: list[Parts]) -> None:
    best_s = min((plan.total_s for plan in plans), default=None)
    within = list(trade_offs(Search(plans).within))
    below = list(trade_offs(Search(plans).below, step=0.0))
    every = list(trade_offs(Search(plans).within, every=True))
    for answers in (within, below, every):
        assert min((plan.total_s for plan in answers), default=None) == best_s
        maxima = [plan.max_s for plan in answers]
        assert maxima == sorted(set(maxima), reverse=True)
    assert len(within) <= len(every)


@given(plans=plans, below_s=seconds)
def test_plans_below_some_seconds_are_found(plans: list[Parts], below_s: float) -> None:
    faster = [plan.total_s for plan in plans if plan.total_s < below_s]
    answers = [plan.total_s for plan in trade_offs(Search(plans).within, below_s=below_s)]
    if faster:
        assert min(answers) == min(faster)


@pytest.mark.parametrize(("floor_s", "maxima"), [(0.0, [8.0, 4.0, 2.0]), (2.5, [8.0, 4.0])])
def test_limits_fall_by_a_step_down_to_a_floor(floor_s: float, maxima: list[float]) -> None:
    """With steps of a half, the plan of 7 s is left out, and a limit of 2 is at or below a floor of
    2.5.
    """
    search = Search([Parts(0.0, 8.0), Parts(1.0, 7.0), Parts(2.0, 4.0), Parts(3.0, 2.0)])
    answers = trade_offs(search.within, step=0.5, floor_s=floor_s, every=True)
    assert [plan.max_s for plan in answers] == maxima
