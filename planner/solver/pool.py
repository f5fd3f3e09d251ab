"""The candidates of one problem: what each is worth, and the best of them so far."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from planner.cost.candidate import Candidate
from planner.cost.price_with_copies import copies_fit
from planner.formats.files import replace
from planner.plan.shape import trainable_pairs
from planner.solver.evaluate.evaluation import priced, simulated
from planner.solver.evaluate.leaner import Leaner
from planner.solver.evaluate.orders import in_every_order
from planner.solver.evaluate.pipelines import shared_between, too_large
from planner.solver.problem.cut_space import SearchedCuts
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Answer, Evaluation
from planner.solver.problem.states import Chain
from planner.units import SLACK

# Candidates that are evaluated together, the most promising first.
Batch = Sequence[Sequence[Candidate]]

SEARCH = "search"  # the name of all methods but the integer program


class Pool:
    """Evaluates candidates for a problem, and keeps the best plan that fits the memory and can be
    trained.

    A candidate is priced by the cost model, which knows no waiting. A simulation only adds to that,
    so a candidate is simulated only while its price is below the time of the best plan.

    Attributes:
        problem: what candidates are evaluated for, with all the memory that its devices have.
        best: the fastest plan so far; None while no candidate may be the answer.
        bound_s: seconds per minibatch that no plan with the searched cuts is below.
        cuts: which cuts are searched.
        anywhere_s: seconds that no plan is below whatever its cuts, if others than those searched
            may be the answer.
        usable: the candidates that may be the answer, as they were priced.
        crowded: the fastest candidate that lacked room for its communicators.
        staler: the fastest plan, if the best one takes its place because its gradients are less
            late.
        untrained: the fastest candidate whose copies of tied weights do not fit, or cannot be kept
            equal.
        room: communicators of each device for which the last search kept room: `attempts` writes
            it, and local search keeps as much.
        relaxed: whether all plans of the problem are plans of the one that is searched now, whose
            bound then holds.
    """

    def __init__(
        self,
        problem: Problem,
        bound_s: float,
        cuts: SearchedCuts | None = None,
        anywhere_s: float = math.inf,
    ) -> None:
        """Take a problem, whose plans have cuts along the profile's order if no others are
        given.
        """
        self.problem = problem
        self.bound_s = bound_s
        self.cuts = cuts or SearchedCuts(Chain(problem.layer_costs), complete=True)
        self.anywhere_s = anywhere_s
        self.best: Evaluation | None = None
        self.usable: list[Evaluation] = []
        self.staler: Evaluation | None = None
        self.crowded: Evaluation | None = None
        self.untrained: Evaluation | None = None
        self.relaxed = False
        self.room = 0
        self._method = SEARCH
        self._leaner = Leaner(problem)

    @property
    def best_s(self) -> float:
        """Seconds that a candidate must be below; infinite without a plan."""
        if self.best is None:
            return math.inf
        return self.problem.comparable_s(self.best)

    @property
    def settled(self) -> bool:
        """Whether no other candidate is worth a look: none is much faster than the best."""
        return self.best is not None and self._is_close_to(self._least_s(self.best))

    def _least_s(self, plan: Evaluation) -> float:
        """Return seconds that no plan is below with the searched cuts, or whatever its cuts if the
        plan has others.
        """
        if self.cuts.complete or plan.in_order:
            return self.bound_s
        return self.anywhere_s

    @property
    def hopeless(self) -> bool:
        """Whether no plan is of any use, because an answer to another problem is faster."""
        return min(self.bound_s, self.anywhere_s) >= self.problem.hopeless_s

    @property
    def spent(self) -> bool:
        """Whether nothing more may be simulated; then not every candidate was looked at."""
        budget = self.problem.budget
        if budget.over:
            budget.exhausted = False
        return budget.over

    def raise_bound(self, bound_s: float) -> None:
        """Take note of seconds that no plan of the problem that is searched is below."""
        if self.relaxed:
            self.bound_s = max(self.bound_s, bound_s)

    def consider(self, candidates: Batch, method: str = SEARCH) -> None:
        """Evaluate candidates, in every order of their workers, the most promising first."""
        plans = list(self._usable(candidates))
        self.usable += plans
        ordered = in_every_order(self.problem, plans)
        seen = self.problem.budget.seen

        settled = False
        for plan in ordered:
            if not self._is_promising(plan, settled=settled):
                continue

            # Searches propose the same stages again and again.
            if plan.stages in seen:
                self.keep(seen[plan.stages], method)
            elif self.best is not None and self.spent:
                return
            else:
                self._simulate(plan, method)

            # Nothing in the batch is faster by much than a plan that takes no longer than the least
            # price.
            settled = self._is_close_to(ordered[0].seconds)

    def _is_close_to(self, seconds: float) -> bool:
        """Whether the best plan takes so little more than these seconds that it needs no
        alternative.
        """
        if self.best is None:
            return False
        return self.best.seconds <= seconds * (1 + self.problem.tuning.evaluate.settled_share)

    def _is_promising(self, plan: Evaluation, *, settled: bool) -> bool:
        """Whether a priced candidate may be faster than the best plan, or late by less and nearly
        as fast.
        """
        best = self.best
        if best is None:
            return True
        if not settled and plan.seconds < self.best_s * (1 - SLACK):
            return True

        less_late = max(plan.price.in_flight) < max(best.price.in_flight)
        nearly_s = self.best_s * self.problem.tuning.evaluate.min_speedup_per_stale_update
        return self.problem.schedule.stashes and less_late and plan.seconds < nearly_s

    def consider_regular(
        self,
        plans: Iterable[Evaluation],
        most_forwards: int | None = None,
    ) -> None:
        """Evaluate plans that come in the order of their prices.

        What they take is not taken from the searches, whose answer would depend on them otherwise.

        Args:
            plans: the fastest by the cost model first.
            most_forwards: those of more forwards of a minibatch are not simulated.
        """
        left = self.problem.tuning.evaluate.most_forwards
        if most_forwards is None:
            most_forwards = left
        for plan in plans:
            forwards = len(plan.stages) * self.problem.microbatches
            left -= forwards
            if plan.seconds >= self.best_s * (1 - SLACK) or (self.best is not None and left < 0):
                return

            if not self.trains(plan):
                self.untrained = _faster(self.untrained, plan)
            elif forwards <= most_forwards:
                self._simulate_apart(plan)
            else:
                self.keep(plan)

    def priced(self, stages: Sequence[Candidate]) -> Evaluation:
        """Return a candidate with its price."""
        return priced(self.problem, stages)

    def simulate_best(self) -> None:
        """Simulate the best plan, where there was no time for that when it was found."""
        if self.best is not None and not self.best.simulated:
            self.best = simulated(self.unhurried(), self.best)

    def trains(self, plan: Evaluation) -> bool:
        """Whether the plan's copies of tied weights fit the memory, and stay equal in training."""
        problem = self.problem
        shared = shared_between(problem.layer_costs, plan.stages)
        if not shared:
            return True

        replicas = [stage.replicas for stage in plan.stages]
        if not trainable_pairs(shared, replicas, problem.schedule):
            return False
        return copies_fit(problem.layer_costs, plan.stages, plan.price, problem.setting)

    def keep(self, plan: Evaluation, method: str = SEARCH) -> None:
        """Keep a plan that can be trained if it is faster than the best one."""
        if self.trains(plan) and (self.best is None or self.problem.is_faster(plan, self.best)):
            self._show(plan)
            self.best = plan
            self._method = method

    def _show(self, plan: Evaluation) -> None:
        """Let people know of a new best plan: of nothing else, since the answer may be this."""
        problem = self.problem
        shown = plan.divided(problem.degree) if problem.degree > 1 else plan
        problem.clock.progress.meet(
            shown.config,
            plan.seconds,
            instead_of_s=math.inf if self.best is None else self.best.seconds,
            simulated=plan.simulated,
        )

    def answer(self) -> Answer:
        """Return the best plan, with the bound; there must be one."""
        assert self.best is not None
        bound_s = min(self._least_s(self.best), self.best.seconds)
        bound_of = self.cuts.bound_of if self.best.in_order else ""
        return Answer(
            self.best,
            bound_s,
            self._method,
            bound_of,
            self.cuts.words,
            staler=self.staler,
        )

    def _usable(self, candidates: Batch) -> Iterator[Evaluation]:
        """Yield the candidates that may be the answer, priced; those that lack room
        recompute more.
        """
        for stages in candidates:
            plan = priced(self.problem, stages)
            if not self.problem.allows(plan):
                if not plan.fits(self.problem.cluster):
                    self.crowded = _faster(self.crowded, plan)
                lean = self._recomputing_more(plan)
                if lean is None:
                    continue
                plan = lean

            if self.trains(plan):
                yield plan
            else:
                self.untrained = _faster(self.untrained, plan)

    def _recomputing_more(self, plan: Evaluation) -> Evaluation | None:
        """Return a plan that recomputes as much as makes room for its communicators; None if
        nothing does.
        """
        problem = self.problem
        if problem.layer_costs.overheads is None or problem.schedule.chunked:
            return None
        if plan.seconds >= self.best_s * (1 - SLACK):
            return None
        return self._leaner.lean_enough(plan.stages)

    def _simulate(self, plan: Evaluation, method: str) -> None:
        """Simulate a plan within the budget of the searches, and keep it if it is the best."""
        self._keep_simulated(self._simulated(self.problem, plan), method)

    def _simulate_apart(self, plan: Evaluation) -> None:
        """Do the same with an allowance of its own, which is not taken from the searches."""
        unhurried = self.unhurried()
        evaluation = self._simulated(unhurried, plan)
        self.problem.budget.seen.update(unhurried.budget.seen)
        self._keep_simulated(evaluation, SEARCH)

    def _keep_simulated(self, plan: Evaluation, method: str) -> None:
        """Keep the best plan; one that the budget left without a simulation only where there is no
        other, or none can be had.
        """
        if plan.simulated or self.best is None or too_large(self.problem, plan.stages):
            self.keep(plan, method)

    def _simulated(self, problem: Problem, plan: Evaluation) -> Evaluation:
        """Return a plan with its simulated time, at depths at which its copies of weights fit."""
        below_s = math.inf
        if self.best is not None:
            below_s = self.best.seconds
            if problem.schedule.stashes:
                below_s *= problem.tuning.evaluate.min_speedup_per_stale_update

        evaluation = simulated(problem, plan, below_s)
        if self.trains(evaluation):
            return evaluation

        # Deeper stages hold more versions of their copies.
        return simulated(replace(problem, depth="published"), plan, below_s)

    def unhurried(self) -> Problem:
        """Return the problem with an allowance of its own, and some time, also where the time is
        over.
        """
        budget = self.problem.budget
        clock = budget.clock.at_least(budget.tuning.grace_s)
        longer = replace(budget.apart(), clock=clock, seen={})
        return replace(self.problem, budget=longer)


def _faster(one: Evaluation | None, other: Evaluation) -> Evaluation:
    if one is None or other.seconds < one.seconds:
        return other
    return one
