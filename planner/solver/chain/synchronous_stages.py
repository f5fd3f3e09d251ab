"""Tabulate the ways to run the stages of synchronous pipelines: what fits the memory, and what it takes.

What a stage holds does not depend on the links, so it is found once for all searches over a space. What a stage takes
is found once for every link.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from planner.cost.models.synchronous import SynchronousModel
from planner.cost.work import Floats, Integers
from planner.solver.candidates.budget import NO_HURRY
from planner.solver.chain.states import StateSpace
from planner.solver.chain.ways import Ways, WaysOf
from planner.solver.numbering import Numbering
from planner.solver.problem import Limits
from planner.solver.result import CutPath

_MOST_KEPT = 2**23  # entries of tables that are kept for other searches over a space, about


@dataclass(frozen=True)
class Fitting:
    """The ways to run the stages that begin at one state, as far as they are of use.

    Attributes:
        ways: the ways.
        fits: by replicas - 1 and way, whether the memory suffices, and no way that recomputes less does as well.
        after: likewise, most GPUs that may follow.
    """

    ways: Ways
    fits: NDArray[np.bool_]
    after: Integers

    def priced(self, model: SynchronousModel) -> Stages:
        """Return what the ways take."""
        replicas = np.arange(1, len(self.fits) + 1)[:, None]
        max_s = np.where(self.fits, model.max_s(self.ways.work, replicas), np.nan)
        sum_s = np.array(np.broadcast_to(model.sum_s(self.ways.work), len(self.ways)))
        return Stages(self.ways, sum_s, max_s, self.after)


@dataclass(frozen=True)
class Stages:
    """The same ways and what they take; `max_s` is by replicas - 1 and way, and not a number where they do not fit."""

    ways: Ways
    sum_s: Floats
    max_s: Floats
    after: Integers

    def in_multiples(self, number: int) -> Stages:
        """Return the same where replicas must be multiples of this number."""
        replicas = np.arange(1, len(self.max_s) + 1)[:, None]
        return self if number == 1 else replace(self, max_s=np.where(replicas % number, np.nan, self.max_s))

    @cached_property
    def by_sum(self) -> bool:
        """Whether the ways of each stage stand by their sums."""
        return bool(np.all((np.diff(self.sum_s) >= 0) | (np.diff(self.ways.stage) > 0)))


# What is known of the stages of a space, by what it depends on.
_FITTING: WeakKeyDictionary[StateSpace, dict[Hashable, list[Fitting]]] = WeakKeyDictionary()
_KNOWN: WeakKeyDictionary[StateSpace, dict[Hashable, Table]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Table:
    """The ways to run the stages from each state but the last, and the answers of searches over them, by what is asked.

    An answer is the best path and those found on the way to it.
    """

    stages: list[Stages]
    answers: dict[Hashable, tuple[CutPath | None, list[CutPath]]] = field(default_factory=dict)


def tabulated(space: StateSpace, model: SynchronousModel, limits: Limits, most_replicas: int) -> Table:
    """Return the table of the stages between the states of a space.

    Raises:
        OutOfTimeError: if the deadline passes before they are known.
    """
    alike = replace(limits, deadline=NO_HURRY, numbering=Numbering())
    holds = model.schedule.name, model.microbatches, alike, most_replicas
    tables, fitting = _KNOWN.setdefault(space, {}), _FITTING.setdefault(space, {})
    if (key := (holds, model.link.alike)) not in tables:
        if holds not in fitting:
            room = _Room(space, model, limits, most_replicas)
            fitting[holds] = [room.fitting(state) for state in range(len(space) - 1)]
        tables[key] = Table([each.priced(model) for each in fitting[holds]])
    table = tables[key]
    if sum(each.after.size for kept in tables.values() for each in kept.stages) > _MOST_KEPT:
        tables.clear()
        fitting.clear()
    return table


class _Room:
    """Finds the ways to run stages that fit the memory."""

    def __init__(self, space: StateSpace, model: SynchronousModel, limits: Limits, most_replicas: int) -> None:
        self._space, self._model, self._limits, self._memory_bytes = space, model, limits, limits.memory_bytes
        self._ways = WaysOf(space, limits)
        self._replicas = np.arange(1, most_replicas + 1)
        self._gpus = min(limits.gpus, most_replicas * (len(space) - 1))

    def fitting(self, state: int) -> Fitting:
        """Return the ways to run the stages from a state."""
        self._limits.deadline.check()
        others = self._possible(state)
        plainest = self._of_use(self._ways.all(state, others, np.zeros(len(others), dtype=bool)))
        if not self._ways.chooses:
            return plainest
        # Recomputing costs time, so it is a choice only where some number of GPUs after the stage does not fit.
        limited = (~plainest.fits | (plainest.after < self._gpus)).any(axis=0)
        roomy = plainest.ways.stage[~limited & ~plainest.ways.sharded]
        tight = ~np.isin(np.arange(len(others)), roomy)
        return self._of_use(self._ways.all(state, others, tight)) if tight.any() else plainest

    def _possible(self, state: int) -> Integers:
        """Return where a stage from this state may end so that what it holds in any case fits the memory."""
        others = self._space.among_later(state, np.arange(state + 1, len(self._space)))
        if self._memory_bytes is None or not len(others):
            return others
        footprint = self._space.footprint(state, others, self._space.work(state, others))
        shards = min(self._gpus, self._ways.most_sharded) if self._ways.shards else 1
        held = footprint.weight_bytes + footprint.fixed_weight_bytes + footprint.optimizer_bytes / shards
        held = held + (footprint.gradient_bytes if self._model.microbatches > 1 else 0.0)
        fits = np.array(np.broadcast_to(held, others.shape) <= self._memory_bytes)
        fits[0] = True  # no state is without any stage
        return others[fits]

    def _of_use(self, ways: Ways) -> Fitting:
        """Return those of the ways that fit the memory, and allow more GPUs after them than those recomputing less."""
        replicas, shape = self._replicas[:, None], (len(self._replicas), len(ways))
        fits = np.array(ways.allowed(np.broadcast_to(replicas, shape)))
        after = np.full(shape, self._gpus, dtype=np.int64)
        if self._memory_bytes is not None:
            footprint = ways.footprint_on(replicas).divided(self._model.microbatches)
            # With nothing after it a stage holds least, with everything most.
            held = footprint.total_bytes(self._model.in_flight(self._replicas, 0)[:, None], 1)
            fits &= held <= self._memory_bytes
            most = footprint.most_in_flight(self._memory_bytes, stashing=False)
            least_room = self._model.in_flight(self._replicas, self._gpus)[:, None] > most
            after = np.where(least_room, np.maximum(most - 1, 0) * replicas, after)
            fits &= ~_of_no_use(ways, fits, after)
        rows = np.flatnonzero(fits.any(axis=0))
        return Fitting(ways[rows], fits[:, rows], after[:, rows])


def _of_no_use(ways: Ways, fits: NDArray[np.bool_], after: Integers) -> NDArray[np.bool_]:
    """Return which ways, by replicas, allow no more GPUs after the stage than one that recomputes less."""
    useless = np.zeros(fits.shape, dtype=bool)
    # Numbers grow from stage to stage, so that the maximum of each begins anew.
    allowed = np.where(fits, after + 1, 0) + ways.stage * (int(after.max(initial=0)) + 2)
    for sharded in (False, True):
        rows = np.flatnonzero(ways.sharded == sharded)
        most = np.maximum.accumulate(allowed[:, rows], axis=1)
        useless[:, rows[1:]] = most[:, 1:] <= most[:, :-1]
    return useless
