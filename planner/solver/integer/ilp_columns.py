"""List the candidate stages of the flow formulation: every pair of cuts, replica count and kind of GPU that fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import Candidate
from planner.cost.stage_options import StageOptions, whole_stage
from planner.cost.work import Floats, Footprint, Integers, Work
from planner.errors import InputError
from planner.formats.cluster import DeviceKind
from planner.solver.chain.states import Chain, StateSpace
from planner.solver.chain.ways import WaysOf
from planner.solver.graph.downsets import Downsets, enumerate_downsets
from planner.solver.problem import Problem

MOST_STATES = 2_000
MOST_COLUMNS = 200_000


@dataclass(frozen=True)
class Column:
    """A stage from one state to another, on GPUs of one kind, by its number.

    `sum_s` and `max_s` are its parts of the sum over the stages and of the maximum over them. Its memory allows at most
    `most_after` GPUs after it.
    """

    start: int
    end: int
    options: StageOptions
    kind: int
    sum_s: float
    max_s: float
    most_after: int
    recomputes: bool = False

    @property
    def replicas(self) -> int:
        """Workers that run the stage."""
        return self.options.replicas


@dataclass(frozen=True)
class _Stages:
    """Stages from one state to each of some others, on GPUs of one kind."""

    state: int
    others: Integers
    number: int  # of the kind
    kind: DeviceKind | None
    recomputes: bool
    work: Work
    footprint: Footprint


class Columns:
    """The states of a problem and all its candidate stages.

    Args:
        all_cuts: every cut of the graph, not only those along the profile's order.

    Raises:
        InputError: if they are too many.
    """

    def __init__(self, problem: Problem, *, all_cuts: bool) -> None:
        self.problem = problem
        self.space = _space(problem, all_cuts)
        everything = len(problem.layer_costs.profile.layers)
        sets = [frozenset(self.space.layers(0, state)) for state in range(len(self.space))]
        # States that separate no group; the empty one and the whole model never do.
        groups = problem.groups
        self.states = np.array(
            [number for number, done in enumerate(sets) if all(group <= done or not group & done for group in groups)]
        )
        self.sets = sets
        self.last = len(self.space) - 1
        assert len(sets[self.last]) == everything

    @cached_property
    def all(self) -> list[Column]:
        """Every column that is not dominated by another one with the same ends."""
        found: list[Column] = []
        for number, state in enumerate(self.states[:-1]):
            others = self.space.among_later(int(state), self.states[number + 1 :])
            if len(others):
                found.extend(self.columns_from(int(state), others))
            if len(found) > MOST_COLUMNS:
                raise InputError(
                    f"more than {MOST_COLUMNS} candidate stages are too many for an integer program",
                    hint="use `solver=search`, or forbid cuts",
                )
        return found

    def layers(self, column: Column) -> frozenset[int]:
        """Return the positions of a column's layers."""
        return self.sets[column.end] - self.sets[column.start]

    def candidate(self, column: Column) -> Candidate:
        """Return a column as a stage."""
        layers = self.layers(column)
        options = replace(column.options, recompute=whole_stage(layers, column.recomputes))
        return Candidate(self.sets[column.start], layers, options)

    def columns_from(self, state: int, others: Integers) -> Iterator[Column]:
        """Yield the candidate stages from the state to each of the others."""
        problem = self.problem
        work = self.space.work(state, others)
        footprint = self.space.footprint(state, others, work).divided(problem.microbatches)
        rules = {"auto": (False, True), "never": (False,), "always": (True,), "blocks": ()}[problem.recompute]
        known = WaysOf(self.space, problem.limits, prices_shards=problem.simulates)
        for number, kind in enumerate(problem.kinds):
            for again, sharded in product(rules, (False, True) if known.shards else (False,)):
                if again and problem.cluster.memory_of(kind) is None and problem.recompute == "auto":
                    continue  # without a limit, recomputing gains nothing
                held, works = footprint, work
                if again:
                    held, works = footprint.recomputed(), work.recomputed()
                if kind is not None:
                    works = works.at_speed(kind.speed)
                stages = _Stages(state, others, number, kind, again, works.shared_out(sharded), held)
                yield from self._replicated(stages, always_shards=known.always_shards)

    def _replicated(self, stages: _Stages, *, always_shards: bool) -> Iterator[Column]:
        """Yield the stages on every number of replicas that is not dominated by a smaller one."""
        sharded = bool(stages.work.sharded)
        smaller: list[tuple[Floats, Integers]] = []  # times and followers of smaller replica counts
        pinned = bool(self.problem.constraints.gpu_of)  # pins may need more replicas than are fastest
        for r in range(1, self._most_replicas(stages.kind) + 1):
            if (sharded and r == 1) or (always_shards and not sharded and r > 1):
                continue
            sum_s, max_s = self._seconds(stages, r)
            after = self._most_after(stages, r)
            useful = after >= 0
            if not pinned:
                for seconds, room in smaller:
                    useful &= (sum_s + max_s < seconds) | (after > room)
            smaller.append((sum_s + max_s, after))
            for n in np.flatnonzero(useful):
                end, options = int(stages.others[n]), StageOptions(r, sharded, kind=stages.kind)
                parts = float(sum_s[n]), float(max_s[n])
                yield Column(stages.state, end, options, stages.number, *parts, int(after[n]), stages.recomputes)

    def _most_replicas(self, kind: DeviceKind | None) -> int:
        problem = self.problem
        if not problem.schedule.pipelined:
            return 1
        count = problem.count(kind)
        return min(count, problem.microbatches) if problem.schedule.divides else count

    def _seconds(self, stages: _Stages, replicas: int) -> tuple[Floats, Floats]:
        """Return the stages' parts of the sum and of the maximum."""
        problem, work, count = self.problem, stages.work, len(stages.others)
        if problem.schedule.asynchronous:
            return np.zeros(count), _spread(problem.asynchronous().stage_s(work, replicas), count)
        model = problem.synchronous()
        return _spread(model.sum_s(work, replicas), count), _spread(model.max_s(work, replicas), count)

    def _most_after(self, stages: _Stages, replicas: int) -> Integers:
        """Try how many GPUs may follow at most; -1 if none may, because not even a last stage fits."""
        problem, schedule = self.problem, self.problem.schedule
        limit = problem.cluster.memory_of(stages.kind)
        footprint = stages.footprint.shared_out(replicas) if stages.work.sharded else stages.footprint
        most = np.full(len(stages.others), -1)
        # More GPUs after a stage mean more in flight, so the first number that does not fit is the last to try.
        for after in range(problem.cluster.gpus - replicas + 1):
            flying = int(schedule.in_flight(replicas, after, problem.microbatches))
            fits: NDArray[np.bool_] = most == after - 1
            fits &= schedule.versions_suffice(problem.microbatches, replicas, flying)
            fits &= flying <= problem.limits.deepest
            if limit is not None:
                fits &= footprint.total_bytes(flying, schedule.versions(flying)) <= limit
            if not fits.any():
                break
            most[fits] = after
        return most


def _space(problem: Problem, all_cuts: bool) -> StateSpace:
    chain = Chain(problem.layer_costs)
    if chain.complete or not all_cuts:
        return chain
    words = enumerate_downsets(problem.layer_costs, MOST_STATES)
    return chain if words is None else Downsets(problem.layer_costs, words, complete=True)


def _spread(values: Floats, count: int) -> Floats:
    return np.array(np.broadcast_to(values, count), dtype=np.float64)
