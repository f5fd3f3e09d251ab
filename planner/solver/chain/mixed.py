"""Search for asynchronous pipelines on GPUs of several kinds: stages of one kind follow each other along the chain.

For each order of the kinds and a target time T, a walk from the last layer to the first gives every state the fewest
GPUs of the kind at work that its suffix needs beside all GPUs of the kinds behind it; a kind begins at any state that
the kinds behind it reach. Bisection finds the least T. O(kinds! · kinds · states²) per target.

Exact for plans in that form without a memory limit. With one, the walk counts the GPUs behind a stage on the way that
needs fewest of its kind. Plans in which kinds take turns, share a stage's optimizer or recompute are not sought, and
the bound is perfect balance, so the answer is `feasible` unless it meets that. On several levels there is a walk for
the links of each; the price and the simulation know the places.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations, product

import numpy as np

from planner.cost.layer_costs import Candidate
from planner.cost.stage_options import StageOptions
from planner.cost.work import IMPOSSIBLE, Integers
from planner.errors import InfeasibleError, InputError
from planner.formats.cluster import DeviceKind
from planner.solver.bounds.balance import balanced_s
from planner.solver.bounds.bounds import Bounds
from planner.solver.candidates.evaluation import fastest, priced
from planner.solver.chain.states import Chain, Coarse, StateSpace
from planner.solver.chain.ways import WaysOf
from planner.solver.problem import Problem
from planner.solver.result import Evaluation, Found

MOST_KINDS = 4  # whose orders are tried
MOST_STATES = 160  # beyond, cuts at some of them only
PRECISION = 1e-3  # of the least time of each order
MOST_HALVINGS = 60

Kinds = tuple[int, ...]  # numbers of kinds, from the first stage to the last


@dataclass(frozen=True)
class _Step:
    """A stage of a suffix, by the state where it ends."""

    end: int
    replicas: int
    kind: int


def solve_mixed(problem: Problem) -> Found:
    """Find a fast asynchronous plan on GPUs of several kinds.

    Raises:
        InputError: for more kinds than orders can be tried of.
        InfeasibleError: if no plan of the form above fits the memory.
    """
    kinds = problem.cluster.kinds
    if len(kinds) > MOST_KINDS:
        raise InputError(
            f"{len(kinds)} kinds of GPUs have too many orders to try",
            hint=f"join kinds that are much alike: up to {MOST_KINDS} are tried",
        )
    chain = Chain(problem.layer_costs)
    space: StateSpace = chain
    if len(chain) > MOST_STATES:
        space = Coarse(chain, np.unique(np.linspace(0, len(chain) - 1, MOST_STATES).astype(np.int64)))
    topology, found = problem.topology, list[Evaluation]()
    links = {problem.link, *(topology.link(level) for level in range(len(topology)))}
    ways = WaysOf(chain, problem.limits, prices_shards=problem.simulates)
    low_s = balanced_s(ways.least(problem.layer_costs.everything), problem.setting)
    for link, order in product(
        sorted(links, key=lambda each: each.bandwidth_bytes_per_s), permutations(range(len(kinds)))
    ):
        if found and problem.deadline.passed:
            break
        limit_s = min((plan.seconds for plan in found), default=np.inf)
        met = _Search(problem, space, problem.asynchronous(link)).plans(order, low_s, limit_s)
        found += [plan for plan in met if plan.fits(problem.cluster)]
    if not found:
        raise InfeasibleError(
            "no plan was found that fits the memory of the cluster's GPUs",
            hint="give the kinds of GPUs more memory_bytes, or more GPUs",
        )
    best = fastest(problem, found) if problem.simulates else min(found, key=lambda plan: plan.seconds)
    return Found(best, min(low_s, best.seconds))


class _Search:
    """Walks over one space by one cost model."""

    def __init__(self, problem: Problem, space: StateSpace, model: Bounds) -> None:
        self._problem, self._space, self._model = problem, space, model
        self._kinds: tuple[DeviceKind, ...] = problem.cluster.kinds

    def plans(self, order: Kinds, low_s: float, limit_s: float) -> list[Evaluation]:
        """Return the fastest plan of the order that the bisection meets, if one may take less than the limit."""
        high_s = limit_s * (1 - PRECISION)
        if np.isinf(high_s):
            high_s = max(low_s, np.finfo(float).tiny)
            for _ in range(MOST_HALVINGS):  # doublings, here
                if self._within(order, high_s) is not None:
                    break
                high_s *= 2
        best = self._within(order, high_s)
        while best is not None and high_s - low_s > PRECISION * high_s and not self._problem.deadline.passed:
            middle_s = (low_s + high_s) / 2
            better = self._within(order, middle_s)
            best, low_s, high_s = (best, middle_s, high_s) if better is None else (better, low_s, middle_s)
        return [] if best is None else [self._priced(best)]

    def _within(self, order: Kinds, target_s: float) -> list[_Step] | None:
        """Return stages within the target, from the first to the last; None if the walk finds none."""
        last = len(self._space) - 1
        total = np.full(last + 1, IMPOSSIBLE, dtype=np.int64)  # GPUs of the suffix from each state on
        total[last] = 0
        steps: dict[int, _Step] = {}
        for number in reversed(order):
            # Where the kinds behind reach, this kind may begin with none of its own.
            used = np.where(total < IMPOSSIBLE, 0, IMPOSSIBLE)
            for state in range(last - 1, -1, -1):
                if used[state] == 0:
                    continue
                others = np.flatnonzero(used[state + 1 :] < self._kinds[number].count) + state + 1
                if not len(others):
                    continue
                replicas = self._fewest(state, others, target_s, total[others], self._kinds[number])
                needed = used[others] + np.minimum(replicas, IMPOSSIBLE)
                pick = int(np.argmin(needed))
                if needed[pick] <= self._kinds[number].count:
                    end, r = int(others[pick]), int(replicas[pick])
                    used[state], total[state] = needed[pick], total[end] + r
                    steps[state] = _Step(end, r, number)
        if total[0] >= IMPOSSIBLE:
            return None
        path, state = [], 0
        while state < last:
            path.append(steps[state])
            state = steps[state].end
        return path

    def _fewest(self, state: int, others: Integers, target_s: float, after: Integers, kind: DeviceKind) -> Integers:
        work = self._space.work(state, others)
        memory_bytes = self._problem.cluster.memory_of(kind)
        at_least = (
            1
            if memory_bytes is None
            else self._model.fewest_for_memory(self._space.footprint(state, others, work), after, memory_bytes)
        )
        return self._model.fewest_replicas(work.at_speed(kind.speed), target_s, at_least, after)

    def _priced(self, path: list[_Step]) -> Evaluation:
        """Price a path on the first ranks of each kind, in the order of the stages."""
        free = [iter(ranks) for ranks in self._problem.cluster.kind_ranks]
        stages = []
        for start, step in zip((0, *(step.end for step in path)), path, strict=False):
            ranks = tuple(next(free[step.kind]) for _ in range(step.replicas))
            options = StageOptions(step.replicas, kind=self._kinds[step.kind])
            layers = frozenset(self._space.layers(start, step.end))
            stages.append(Candidate(frozenset(self._space.layers(0, start)), layers, options, ranks))
        return priced(self._problem, stages)
