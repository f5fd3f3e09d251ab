"""The candidate stages of the flow formulation: every pair of cuts, replica count and kind of GPU that fits at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import Candidate
from planner.cost.link import link_of
from planner.cost.models.synchronous import SynchronousModel
from planner.cost.stage_options import StageOptions
from planner.cost.work import Floats, Footprint, Integers, Work
from planner.errors import InputError
from planner.formats.cluster import DeviceKind
from planner.solver.bounds.registry import bounds_for
from planner.solver.chain.states import Chain, StateSpace
from planner.solver.graph.downsets import Downsets, enumerate_downsets
from planner.solver.integer.request import Request

MOST_STATES = 2_000
MOST_COLUMNS = 200_000


@dataclass(frozen=True)
class Column:
    """A stage from one state to another, on GPUs of one kind, by its number.

    `sum_s` and `max_s` are its parts of the sum over the stages and of the maximum over them. At most `most_after` GPUs
    may follow it, for its memory.
    """

    start: int
    end: int
    options: StageOptions
    kind: int
    sum_s: float
    max_s: float
    most_after: int

    @property
    def replicas(self) -> int:
        """GPUs in use."""
        return self.options.replicas


class Columns:
    """The states of a request and all its candidate stages.

    Args:
        all_cuts: every cut of the graph, rather than those along the profile's order.

    Raises:
        InputError: when they are too many to write down.
    """

    def __init__(self, request: Request, *, all_cuts: bool) -> None:
        self.request = request
        self.space = _space(request, all_cuts)
        everything = len(request.layer_costs.profile.layers)
        sets = [frozenset(self.space.layers(0, state)) for state in range(len(self.space))]
        # States that separate no group; the empty one and the whole never do.
        groups = request.groups
        self.states = np.array(
            [number for number, done in enumerate(sets) if all(group <= done or not group & done for group in groups)]
        )
        self.sets = sets
        self.last = len(self.space) - 1
        assert len(sets[self.last]) == everything

    @cached_property
    def all(self) -> list[Column]:
        """Every column that is no worse than all others with the same ends."""
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
        """Positions of the layers of a column."""
        return self.sets[column.end] - self.sets[column.start]

    def candidate(self, column: Column) -> Candidate:
        """A column as a stage."""
        return Candidate(self.sets[column.start], self.layers(column), column.options)

    def columns_from(self, state: int, others: Integers) -> Iterator[Column]:
        """Yield the candidate stages from the state to each of the others."""
        request = self.request
        work = self.space.work(state, others)
        footprint = self.space.footprint(state, others, work).divided(request.microbatches)
        rules = {"auto": (False, True), "never": (False,), "always": (True,)}[request.recompute]
        for number, kind in enumerate(request.kinds):
            limited = request.cluster.memory_of(kind) is not None
            for again in rules:
                if again and not limited and request.recompute == "auto":
                    continue  # nothing to gain
                options = StageOptions(recompute=again, kind=kind)
                base = Column(state, 0, options, number, 0.0, 0.0, 0)
                yield from self._variants(base, others, work.under(options), footprint.under(options))

    def _variants(self, base: Column, others: Integers, work: Work, footprint: Footprint) -> Iterator[Column]:
        """Yield the columns like `base` to each of the others, for every useful number of replicas."""
        limit = self.request.cluster.memory_of(base.options.kind)
        smaller: list[tuple[Floats, Integers]] = []  # times and followers of smaller replica counts
        pinned = bool(self.request.constraints.gpu_of)  # may ask for more replicas than are fastest
        for r in range(1, self._most_replicas(base.options.kind) + 1):
            sum_s, max_s = self._seconds(work, r, len(others))
            after = self._most_after(footprint, r, len(others), limit)
            useful = after >= 0
            if not pinned:
                for seconds, room in smaller:
                    useful &= (sum_s + max_s < seconds) | (after > room)
            smaller.append((sum_s + max_s, after))
            for column in np.flatnonzero(useful):
                yield replace(
                    base,
                    end=int(others[column]),
                    options=replace(base.options, replicas=r),
                    sum_s=float(sum_s[column]),
                    max_s=float(max_s[column]),
                    most_after=int(after[column]),
                )

    def _most_replicas(self, kind: DeviceKind | None) -> int:
        request = self.request
        if not request.schedule.pipelined:
            return 1
        count = request.count(kind)
        return min(count, request.microbatches) if request.schedule.divides else count

    def _seconds(self, work: Work, replicas: int, count: int) -> tuple[Floats, Floats]:
        request = self.request
        link = link_of(request.cluster)
        if request.schedule.asynchronous:
            model = bounds_for(request.model, link, request.schedule, request.microbatches)
            return np.zeros(count), _spread(model.stage_s(work, replicas), count)
        drained = SynchronousModel(link, request.schedule, request.microbatches)
        return _spread(drained.sum_s(work, replicas), count), _spread(drained.max_s(work, replicas), count)

    def _most_after(self, footprint: Footprint, replicas: int, count: int, limit: int | None) -> Integers:
        """Most GPUs that may follow; -1 where none may, since not even the last stage fits. By trying each number."""
        request = self.request
        gpus = request.cluster.gpus - replicas
        most = np.full(count, -1)
        for after in range(gpus + 1):
            flying = self._in_flight(replicas, after)
            fits: NDArray[np.bool_] = most == after - 1
            fits &= request.schedule.versions_suffice(request.microbatches, replicas, flying)
            if limit is not None:
                fits &= footprint.total_bytes(flying, request.schedule.versions(flying)) <= limit
            if not fits.any():
                break
            most[fits] = after
        return most

    def _in_flight(self, replicas: int, after: int) -> int:
        request = self.request
        return int(request.schedule.in_flight(replicas, after, request.microbatches))


def _space(request: Request, all_cuts: bool) -> StateSpace:
    chain = Chain(request.layer_costs)
    if chain.complete or not all_cuts:
        return chain
    words = enumerate_downsets(request.layer_costs, MOST_STATES)
    return chain if words is None else Downsets(request.layer_costs, words, complete=True)


def _spread(values: Floats, count: int) -> Floats:
    return np.array(np.broadcast_to(values, count), dtype=np.float64)
