"""Beyond the profile's order: whether other cuts of a branching model beat the best plan found along the order."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import numpy as np

from planner.cost.layer_costs import LayerCosts
from planner.cost.rounding import SLACK
from planner.cost.stage_options import RecomputeRule
from planner.cost.work import Integers
from planner.solver.bounds.bounds import Bounds
from planner.solver.candidates.deadline import NO_HURRY, Deadline
from planner.solver.chain.search import RESOLUTION, Path, Search
from planner.solver.chain.states import Chain, StateSpace
from planner.solver.graph.downsets import Downsets
from planner.solver.graph.lattice import Covers, Lattice, enumerate_covers
from planner.solver.graph.orders import around, depth_first, fewest_live_bytes
from planner.solver.graph.relaxation import Budget, OutOfBudgetError, Relaxation
from planner.solver.graph.windows import Windows

MOST_DOWNSETS = 300_000  # enumerated in a second
MOST_STATES = 2_000  # searched pair by pair in a second
WORK = 9 * 10**8  # covers looked at: some seconds, and the same ones for the same question
_CLOSE = 0.02  # relative distance of the bounds from which on to ask for anything strictly better, too
_PRECISION = 1e-3  # gains below this are not worth another look around a plan's cuts
_SETTLED = 4e-10  # nothing that much faster is looked for
_UNSETTLED = 1e-3  # where a time is neither met nor ruled out, how closely to find where that begins
_EXPANSIONS = 60  # states from which the walk for a plan goes on
_PER_PAIR, _PER_FIT = 12, 40  # covers that a stage looked at costs, without and with memory
_BREADTH = 4  # ways on that it tries from each
_WORTH_A_WALK = 20
NEAR_STATES = 600
ROUNDS = 3
_NEAR_UNLISTED, _ROUNDS_UNLISTED = 1_000, 4


@dataclass(frozen=True)
class Beyond:
    """What a search over other cuts found.

    Attributes:
        path: a faster plan, or None when none was found.
        space: where the path's states are.
        bound_s: no plan over any cuts is faster.
    """

    path: Path | None
    space: StateSpace | None
    bound_s: float


def search_beyond(
    layer_costs: LayerCosts,
    model: Bounds,
    gpus: int,
    memory_bytes: int | None,
    space: StateSpace,
    known: Path,
    recompute: RecomputeRule = "auto",
    *,
    bound_only: bool = False,
    deadline: Deadline = NO_HURRY,
) -> Beyond:
    """Look for a plan over all cuts that is faster than the `known` one over `space`, and for a bound.

    `bound_only`: other plans would not be used. `deadline`: what is known then is the answer.
    """
    task = _Task(layer_costs, model, gpus, memory_bytes, recompute, deadline)
    covers = enumerate_covers(layer_costs, MOST_DOWNSETS)
    if covers is not None:
        return _Bracket(task, covers, space, known).narrowed()
    bound_s = Windows(layer_costs, model).bound_s(gpus, memory_bytes, recompute, known.seconds)
    return Beyond(known, space, bound_s) if bound_only else _along_orders(task, space, known, bound_s)


@dataclass(frozen=True)
class _Task:
    """The question, whatever the states."""

    layer_costs: LayerCosts
    model: Bounds
    gpus: int
    memory_bytes: int | None
    recompute: RecomputeRule
    deadline: Deadline

    def over(self, space: StateSpace) -> Search:
        """The exact search over these states."""
        return Search(space, self.model, self.gpus, self.memory_bytes, self.recompute, self.deadline)


def _along_orders(task: _Task, space: StateSpace, known: Path, bound_s: float) -> Beyond:
    """Where cuts are too many to list: the best along other orders of the branches, and what is near its cuts."""
    best, best_space = known, space
    for order in (depth_first, fewest_live_bytes):
        chain = Chain(task.layer_costs, order(task.layer_costs))
        if (better := task.over(chain).best(below_s=best.seconds)) is not None:
            best, best_space = better, chain
    for _ in range(_ROUNDS_UNLISTED):
        cuts = [best_space.layers(0, state) for state in best.states[1:-1]]
        if not cuts or best.seconds * (1 - _SETTLED) <= bound_s or task.deadline.passed:
            break
        nearby = Downsets(task.layer_costs, around(task.layer_costs, cuts, _NEAR_UNLISTED), complete=False)
        if (better := task.over(nearby).best(best.seconds * (1 - _PRECISION), _PRECISION)) is None:
            break
        best, best_space = better, nearby
    return Beyond(None if best is known else best, None if best is known else best_space, min(bound_s, best.seconds))


class _Bracket:
    """The fastest plan so far and the best bound, brought together by asking what is possible at times between them."""

    def __init__(self, task: _Task, covers: Covers, space: StateSpace, known: Path) -> None:
        self.task, self.gpus = task, task.gpus
        self.space = Downsets(task.layer_costs, covers.words, complete=True)
        lattice = Lattice(covers, self.space.order)
        self.relaxation = Relaxation(
            self.space, lattice, task.model, task.gpus, task.memory_bytes, task.recompute, Budget(WORK)
        )
        self.pairs = task.over(self.space)
        self.known, self.known_space, self.best = known, space, known
        self.best_space: Downsets | None = None
        self.low_s = float(self.relaxation.least_s[-1]) / task.gpus * (1 - RESOLUTION)
        self.open_s = known.seconds  # what is slower than this, but faster than the best, cannot be told

    def narrowed(self) -> Beyond:
        """Narrow the bracket as far as the budget goes."""
        with contextlib.suppress(OutOfBudgetError):
            self._narrow()
        if self.low_s < self._goal_s and not self.task.deadline.passed:
            self._polish()
            task = self.task
            windows = Windows(task.layer_costs, task.model)
            bound_s = windows.bound_s(task.gpus, task.memory_bytes, task.recompute, self.best.seconds)
            self.low_s = max(self.low_s, bound_s)
        path = None if self.best is self.known else self.best
        bound_s = self.best.seconds if self.low_s >= self._goal_s else self.low_s
        return Beyond(path, self.best_space, bound_s)

    @property
    def _goal_s(self) -> float:
        return self.best.seconds * (1 - _SETTLED)

    def _narrow(self) -> None:
        strict, halvings, patience = True, 0, 1
        while not self.task.deadline.passed:
            told = self.open_s >= self.best.seconds
            if self.low_s >= (self._goal_s if told else self.open_s * (1 - _UNSETTLED)):
                return
            # As in `Search.best`: halving finds good plans, asking for anything strictly better ends the search.
            strict = strict and told
            found = self._ask(self._goal_s if strict else (self.low_s + self.open_s) / 2)
            if strict:
                strict, halvings, patience = False, 0, patience * (1 + found)
            elif self.open_s - self.low_s < _CLOSE * self.open_s:
                halvings += 1
                strict = halvings >= patience

    def _ask(self, target_s: float) -> bool:
        """Whether a plan meets the target; move one end of the bracket there."""
        after = self.relaxation.after(target_s)
        if after[0] > self.gpus:
            self.low_s = target_s
            return False
        useful = np.flatnonzero(after <= self.gpus)
        if MOST_STATES < len(useful) <= _WORTH_A_WALK * MOST_STATES:
            before = self.relaxation.before(target_s, after)
            useful = np.flatnonzero(before + after <= self.gpus)
        if len(useful) <= MOST_STATES:
            space = self.space.only(np.union1d(useful, [0, len(self.space) - 1]), complete=True)
            path = self.task.over(space).within(target_s)
            if path is None:
                self.low_s = target_s
                return False
        else:
            space, path = self.space, self._traced(after, target_s)
            if path is None:
                self.open_s = target_s
                return False
        self._keep(path, space)
        return True

    def _keep(self, path: Path, space: Downsets) -> None:
        self.best, self.best_space, self.open_s = path, space, path.seconds

    def _traced(self, after: Integers, target_s: float) -> Path | None:
        """A plan that meets the target, by a depth-first walk along the fewest GPUs that the relaxation leaves."""
        space, last, left = self.space, len(self.space) - 1, _EXPANSIONS
        before_s = self.relaxation.least_s
        trail: list[tuple[int, int]] = []  # states and replicas

        def walk(state: int, room: int) -> bool:
            nonlocal left
            if state == last:
                return True
            left -= 1
            others = np.flatnonzero(after[state + 1 :] < room) + state + 1
            least = np.maximum(np.ceil((before_s[others] - before_s[state]) / target_s - SLACK), 1)
            others = space.among_later(state, others[after[others] + least <= room])
            if not len(others):
                return False
            self.relaxation.budget.spend(len(others) * (_PER_PAIR if self.task.memory_bytes is None else _PER_FIT))
            total, replicas, _ = self.pairs.suffixes(state, others, target_s, after[others])
            for choice in np.argsort(total, kind="stable")[:_BREADTH]:
                if total[choice] > room or left <= 0:
                    break
                trail.append((state, int(replicas[choice])))
                if walk(int(others[choice]), room - trail[-1][1]):
                    return True
                trail.pop()
            return False

        if not walk(0, self.gpus):
            return None
        # Memory depends on all GPUs that follow, so the exact search has the last word.
        states = np.array([*(state for state, _ in trail), last])
        path = self.task.over(space.only(states, complete=False)).within(target_s)
        if path is None:
            return None
        return replace(path, states=tuple(int(states[state]) for state in path.states))

    def _polish(self) -> None:
        """Look around the best plan's cuts, as long as that finds a faster one."""
        for _ in range(ROUNDS):
            origin: StateSpace = self.best_space or self.known_space
            cuts = [origin.layers(0, state) for state in self.best.states[1:-1]]
            if not cuts or self.task.deadline.passed:
                return
            states = self.space.nearest(
                self.space.worth(self.task.model, self.gpus, self.best.seconds), cuts, NEAR_STATES
            )
            nearby = self.space.only(states, complete=False)
            better = self.task.over(nearby).best(self.best.seconds * (1 - _PRECISION), _PRECISION)
            if better is None:
                return
            self._keep(better, nearby)
