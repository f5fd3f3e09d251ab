"""Search for interleaved plans: K workers with v chunks each, cut so that the workers' sums are balanced.

The chunks of a worker lie apart, so that a stage's cost depends on cuts far from it and no walk along the layers is
exact. Where the ways to cut are few, all are tried. Else the cuts start from equal parts and move, one or several at a
time, as long as that helps. What is left to gain is bounded by perfect balance: K workers take at least a K-th of the
work each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import combinations, islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.cost.link import Link
from planner.cost.models.interleaved import InterleavedShape, StageSeconds
from planner.cost.stage_options import RecomputeRule, StageOptions
from planner.cost.work import Floats, Footprint, Integers, Work
from planner.schedule.schedule import Schedule
from planner.solver.candidates.deadline import NO_HURRY, Deadline
from planner.solver.chain.search import RESOLUTION, Path
from planner.solver.chain.states import Chain, Coarse, StateSpace

MOST_TRIED = 20_000  # ways to cut for one K
MOST_STATES = 192  # beyond, cuts at some of them only
FEW_GPUS = 16  # up to which every number of workers and copies is tried
_BATCH = 1024
_MOVES = (1, -1, 2, -2, 5, -5)
T = TypeVar("T", Work, Footprint)


@dataclass(frozen=True)
class Found:
    """The best plan for one number of workers and copies, if any fits, and whether no cut of the space is better."""

    path: Path | None
    exact: bool


class InterleavedSearch:
    """Finds fast interleaved plans over the prefixes of the profile's order."""

    def __init__(
        self,
        space: Chain,
        schedule: Schedule,
        link: Link,
        gpus: int,
        memory_bytes: int | None,
        microbatches: int,
        chunks: int,
        recompute: RecomputeRule = "auto",
        deadline: Deadline = NO_HURRY,
    ) -> None:
        self.schedule, self.deadline = schedule, deadline
        self.link, self.gpus, self.memory_bytes = link, gpus, memory_bytes
        self.microbatches, self.chunks, self.recompute = microbatches, chunks, recompute
        self.sampled = len(space) > MOST_STATES
        self._states = np.unique(np.linspace(0, len(space) - 1, min(len(space), MOST_STATES)).astype(np.int64))
        self._space: StateSpace = Coarse(space, self._states) if self.sampled else space
        self._work, self._footprint = _matrices(self._space)

    def shapes(self) -> list[InterleavedShape]:
        """Numbers of workers and copies worth a try, the most promising first."""
        longest = min(self.gpus, (len(self._space) - 1) // self.chunks)
        models = [
            InterleavedShape(self.schedule, self.link, workers, self.chunks, copies, self.microbatches)
            for workers in range(2, longest + 1)
            for copies in range(1, self.gpus // workers + 1)
            if self.microbatches // copies >= workers
            and (self.gpus <= FEW_GPUS or copies == min(self.gpus // workers, self.microbatches // workers))
        ]
        return sorted(models, key=lambda model: (self.bound_s(model), model.workers * model.replicas))

    def bound_s(self, model: InterleavedShape) -> float:
        """Seconds below which no plan of this shape is: the mean of what the workers compute."""
        once_s = float(self._work.forward_s[0, -1] + self._work.backward_s[0, -1])
        adding_s = (model.units - 1) * float(self._work.accumulate_s[0, -1])
        return (model.units * once_s + adding_s + float(self._work.update_s[0, -1])) / model.workers

    def best(self) -> tuple[list[Path], float]:
        """The best plan of each shape, fastest first, and a bound that no plan is below; no plans where none fit."""
        found: list[Path] = []
        bounds: list[float] = []
        fastest = np.inf
        for model in self.shapes():
            if self.bound_s(model) >= fastest * (1 - RESOLUTION):
                break  # so it is for all that follow, and `fastest` is the least of their bounds
            if found and self.deadline.passed:
                bounds.append(self.bound_s(model))  # the least of those that follow
                break
            answer = self.within(model)
            if answer.path is not None:
                found.append(answer.path)
                fastest = min(fastest, answer.path.seconds)
            if not answer.exact or self.sampled:
                bounds.append(self.bound_s(model))
        found.sort(key=lambda path: (path.seconds, sum(path.replicas)))
        return found, min([*bounds, fastest])

    def within(self, model: InterleavedShape) -> Found:
        """The best plan of this shape."""
        stages, last = model.workers * model.chunks, len(self._space) - 1
        if math.comb(last - 1, stages - 1) <= MOST_TRIED:
            cuts, exact = self._all(model, last)
        else:
            cuts, exact = self._improved(model, self._equal_parts(stages, last)), False
        over, seconds, again, _ = self._evaluate(model, cuts[None])
        if over[0] > 0:
            return Found(None, exact)
        states = tuple(int(self._states[cut]) for cut in cuts)
        path = Path(states, tuple(StageOptions(model.replicas, bool(each)) for each in again[0]), float(seconds[0]))
        return Found(path, exact)

    def _all(self, model: InterleavedShape, last: int) -> tuple[Integers, bool]:
        """The best of all ways to cut, and whether what recomputes was best in all of them."""
        stages = model.workers * model.chunks
        # Equal parts win a tie: others wait less for stages that differ less, which the cost does not see.
        best, exact = self._least(model, self._equal_parts(stages, last)[None]), True
        for inner in _batches(combinations(range(1, last), stages - 1)):
            ends = np.full((len(inner), 1), last)
            cuts = np.concatenate((np.zeros_like(ends), inner.reshape(len(inner), stages - 1), ends), axis=1)
            best = min(best, found := self._least(model, cuts), key=lambda item: item[:2])
            exact = exact and found[3]
        return best[2], exact

    def _improved(self, model: InterleavedShape, cuts: Integers) -> Integers:
        """Cuts from which no move leads to better ones."""
        best = self._least(model, cuts[None])
        while True:
            around = np.array(list(_moved(best[2])))
            better = self._least(model, around)
            if better[:2] >= best[:2]:
                return best[2]
            best = better

    def _least(self, model: InterleavedShape, cuts: Integers) -> tuple[float, float, Integers, bool]:
        over, seconds, _, settled = self._evaluate(model, cuts)
        choice = int(np.lexsort((seconds, over))[0])
        return float(over[choice]), float(seconds[choice]), cuts[choice], settled

    def _equal_parts(self, stages: int, last: int) -> Integers:
        """Cuts that divide the computation evenly, with at least one step between them."""
        done = self._work.compute_s[0]
        cuts = np.searchsorted(done, done[-1] * np.arange(stages + 1) / stages)
        cuts[0], cuts[-1] = 0, last
        steps = np.arange(stages + 1)
        # Strictly increasing from the left, then from the right.
        cuts = np.maximum.accumulate(cuts - steps) + steps
        return np.asarray(np.minimum(cuts, last - steps[::-1]))

    def _evaluate(self, model: InterleavedShape, cuts: Integers) -> tuple[Floats, Floats, NDArray[np.bool_], bool]:
        """For each row of cuts: bytes beyond the memory, seconds, what recomputes, and whether that choice is best."""
        work = _pick(self._work, cuts)
        footprint = _pick(self._footprint, cuts).divided(model.microbatches)
        again = np.full(work.forward_s.shape, self.recompute == "always")
        settled = True
        over = np.zeros(len(cuts))
        if self.memory_bytes is not None:
            in_flight = np.array(model.in_flight())
            plain = footprint.total_bytes(in_flight, 1)
            lean = footprint.recomputed().total_bytes(in_flight, 1)
            if self.recompute == "auto":
                again, settled = self._choose(model, plain, lean, work)
            held = model.worker_bytes(np.where(again, lean, plain))
            over = np.maximum(held - self.memory_bytes, 0.0).sum(axis=-1)
        work = _with_recompute(work, again)
        return over, model.seconds(StageSeconds.of(work, model)), again, settled

    def _choose(
        self, model: InterleavedShape, plain: Floats, lean: Floats, work: Work
    ) -> tuple[NDArray[np.bool_], bool]:
        """What each worker recomputes: the chunks that take least time of those that suffice; all where none do.

        A worker's first chunk also delays the workers behind it. Where leaving it out takes the worker itself longer,
        the choice may not be the best one.
        """
        saved, extra = (plain - lean)[:, model.stages], work.forward_s[:, model.stages]  # [rows, chunks, workers]
        excess = model.worker_bytes(plain) - float(self.memory_bytes or 0)
        options = np.array([[mask >> chunk & 1 for chunk in range(model.chunks)] for mask in range(2**model.chunks)])
        enough = np.einsum("oc,ncw->now", options, saved) >= excess[:, None]
        cost = np.where(enough, np.einsum("oc,ncw->now", options, extra), np.inf)
        # Ties go to fewer chunks, and then to later ones.
        order = np.lexsort((options[:, 0], options.sum(axis=1)))
        pick = order[cost[:, order].argmin(axis=1)]
        least = cost.min(axis=1)
        pick = np.where(np.isfinite(least), pick, len(options) - 1)
        without = cost[:, options[:, 0] == 0].min(axis=1)
        settled = not np.any(np.isfinite(least) & np.isfinite(without) & (without > least))
        chosen = np.zeros(plain.shape, dtype=bool)
        chosen[:, model.stages] = options[pick].transpose(0, 2, 1)
        return chosen, settled


def _matrices(space: StateSpace) -> tuple[Work, Footprint]:
    """Work and footprint of every stage, by the states it begins and ends at; zero where it would end first."""
    count = len(space)
    work: dict[str, Floats] = {each.name: np.zeros((count, count)) for each in fields(Work)}
    footprint: dict[str, Floats] = {each.name: np.zeros((count, count)) for each in fields(Footprint)}
    for state in range(count - 1):
        others = np.arange(state + 1, count)
        row = space.work(state, others)
        for name, values in work.items():
            values[state, others] = getattr(row, name)
        held = space.footprint(state, others, row)
        for name, values in footprint.items():
            values[state, others] = getattr(held, name)
    return Work(**{**work, "is_first": work["is_first"].astype(bool)}), Footprint(**footprint)


def _pick(matrices: T, cuts: Integers) -> T:
    """The stages between neighbouring cuts."""
    return type(matrices)(
        **{each.name: getattr(matrices, each.name)[cuts[:, :-1], cuts[:, 1:]] for each in fields(matrices)}
    )


def _with_recompute(work: Work, again: NDArray[np.bool_]) -> Work:
    return Work(
        **{each.name: getattr(work, each.name) for each in fields(Work) if each.name != "recompute_s"},
        recompute_s=np.where(again, work.forward_s, 0.0),
    )


def _batches(tuples: Iterator[tuple[int, ...]]) -> Iterator[Integers]:
    while batch := list(islice(tuples, _BATCH)):
        yield np.array(batch, dtype=np.int64)


def _moved(cuts: Integers) -> Iterator[Integers]:
    """Neighbours: one cut moved, or it and all that follow."""
    for number in range(1, len(cuts) - 1):
        for step in _MOVES:
            for many in (slice(number, number + 1), slice(number, len(cuts) - 1)):
                moved = cuts.copy()
                moved[many] += step
                if np.all(np.diff(moved) > 0):
                    yield moved
