"""Search the cuts of a branching model that are not along the profile's order, for a better plan and a bound."""

import contextlib
from dataclasses import replace

import numpy as np

from planner.cost.work import Integers
from planner.solver.problem.bounds import Bounds
from planner.solver.problem.budget import OutOfTimeError
from planner.solver.problem.problem import Limits
from planner.solver.problem.result import RESOLUTION, BoundedPath, CutPath
from planner.solver.problem.states import StateSpace
from planner.solver.search.chain.search import Search
from planner.solver.search.chain.ways import WaysOf
from planner.solver.search.graph.downsets import Downsets
from planner.solver.search.graph.lattice import (
    Covers,
    Lattice,
    OutOfWorkError,
    Relaxation,
    WorkLeft,
    around,
    enumerate_covers,
)
from planner.units import SLACK

MOST_DOWNSETS, FEW_DOWNSETS = 300_000, 30_000  # enumerated in a second, and where there are many GPUs
MOST_STATES = 2_000  # searched pair by pair in a second
WORK = 9 * 10**8  # covers to look at: some seconds, and always the same ones for the same problem
# GPUs beyond which it is a quarter, because the relaxation walks over their numbers and hardly ever ends.
_MANY_GPUS = 1024
_CLOSE = 0.02  # relative distance of the bounds from which on to ask for anything strictly better, too
_PRECISION = 1e-3  # gains below this are not worth another look around a plan's cuts
_SETTLED = 4e-10  # plans that are faster by less than this are not looked for
_UNSETTLED = 1e-3  # precision of the lowest time that is neither met nor ruled out
# Of the walk for a plan: states that it expands, stages that it tries from each, work of looking at one, in covers.
_EXPANSIONS, _BREADTH, _PER_PAIR = 60, 4, 20
NEAR_STATES, ROUNDS = 1_000, 4  # of the search near a plan's cuts


def search_beyond(
    space: StateSpace, model: Bounds, limits: Limits, known: CutPath, *, bound_only: bool = False
) -> BoundedPath:
    """Look for a plan over all cuts that is faster than the `known` one over `space`, and for a bound.

    When the deadline passes, the best plan so far is the answer. With `bound_only`, faster plans are not looked for
    where the cuts are too many to list.
    """
    layer_costs, many, deadline = space.layer_costs, limits.gpus > _MANY_GPUS, limits.deadline
    ways = WaysOf(space, limits, prices_shards=model.prices_shards)
    everything = ways.least(space.work(0, np.array([len(space) - 1])))
    start = BoundedPath(known, float(model.least_s(everything)[0]) / limits.gpus * (1 - RESOLUTION), space)
    try:
        covers = enumerate_covers(layer_costs, FEW_DOWNSETS if many else MOST_DOWNSETS, deadline)
    except OutOfTimeError:
        return start
    if covers is not None:
        return _Bracket(model, limits, covers, start).narrowed()
    return start if bound_only or many else _nearby(model, limits, start)


def _nearby(model: Bounds, limits: Limits, found: BoundedPath) -> BoundedPath:
    for _ in range(ROUNDS):
        best, space = found.path, found.space
        assert best is not None
        cuts = [space.layers(0, state) for state in best.states[1:-1]]
        if not cuts or best.seconds * (1 - _SETTLED) <= found.bound_s or limits.deadline.passed:
            break
        nearby = Downsets(space.layer_costs, around(space.layer_costs, cuts, NEAR_STATES), complete=False)
        if (better := Search(nearby, model, limits).best(best.seconds * (1 - _PRECISION), _PRECISION)) is None:
            break
        found = BoundedPath(better, min(found.bound_s, better.seconds), nearby)
    return found


class _Bracket:
    """The fastest plan so far and the best bound, brought together by asking what is possible at times between them."""

    def __init__(self, model: Bounds, limits: Limits, covers: Covers, start: BoundedPath) -> None:
        assert start.path is not None
        self.model, self.limits, self.gpus = model, limits, limits.gpus
        self.space = Downsets(start.space.layer_costs, covers.words, complete=True)
        lattice = Lattice(covers, self.space.order)
        self.relaxation = Relaxation(
            self.space, lattice, model, limits, WorkLeft(WORK if limits.gpus <= _MANY_GPUS else WORK // 4)
        )
        self.pairs = Search(self.space, model, limits)
        self.best, self.best_space = start.path, start.space
        self.low_s = float(self.relaxation.least_s[-1]) / self.gpus * (1 - RESOLUTION)
        # Times above this one, but below the best plan's, can be neither met nor ruled out.
        self.open_s = self.best.seconds

    def narrowed(self) -> BoundedPath:
        """Narrow the bracket as far as the work allowed and the deadline permit."""
        with contextlib.suppress(OutOfWorkError):
            self._narrow()
        if self.low_s < self._goal_s:
            return _nearby(self.model, self.limits, BoundedPath(self.best, self.low_s, self.best_space))
        return BoundedPath(self.best, self.best.seconds, self.best_space)

    @property
    def _goal_s(self) -> float:
        return self.best.seconds * (1 - _SETTLED)

    def _narrow(self) -> None:
        strict, halvings, patience = True, 0, 1
        while not self.limits.deadline.passed:
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
        """Return whether a plan meets the target, and move one end of the bracket there."""
        after = self.relaxation.after(target_s)
        if after[0] > self.gpus:
            self.low_s = target_s
            return False
        useful = np.flatnonzero(after <= self.gpus)
        if len(useful) <= MOST_STATES:
            # Few enough states for the exact search, which then decides: what it does not find, does not exist.
            space = self.space.only(np.union1d(useful, [0, len(self.space) - 1]), complete=True)
            path = Search(space, self.model, self.limits).within(target_s)
            self.low_s = target_s if path is None else self.low_s
        else:
            space, path = self.space, self._traced(after, target_s)
            self.open_s = target_s if path is None else self.open_s
        if path is not None:
            self.best, self.best_space, self.open_s = path, space, path.seconds
        return path is not None

    def _traced(self, after: Integers, target_s: float) -> CutPath | None:
        """Look for a plan that meets the target, by a depth-first walk along the relaxation's fewest GPUs."""
        space, last, left = self.space, len(self.space) - 1, _EXPANSIONS
        before_s = self.relaxation.least_s
        trail: list[int] = []

        def walk(state: int, room: int) -> bool:
            nonlocal left
            trail.append(state)
            if state == last:
                return True
            left -= 1
            others = np.flatnonzero(after[state + 1 :] < room) + state + 1
            least = np.maximum(np.ceil((before_s[others] - before_s[state]) / target_s - SLACK), 1)
            others = space.among_later(state, others[after[others] + least <= room])
            if len(others):
                self.relaxation.left.spend(len(others) * _PER_PAIR)
                total, replicas, _ = self.pairs.suffixes(state, others, target_s, after[others], room)
                for choice in np.argsort(total, kind="stable")[:_BREADTH]:
                    if total[choice] > room or left <= 0:
                        break
                    if walk(int(others[choice]), room - int(replicas[choice])):
                        return True
            trail.pop()
            return False

        if not walk(0, self.gpus):
            return None
        # The memory of a stage depends on all GPUs after it, so the exact search decides.
        path = Search(space.only(np.array(trail)), self.model, self.limits).within(target_s)
        return path and replace(path, states=tuple(trail[state] for state in path.states))
