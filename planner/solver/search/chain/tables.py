"""Tabulate how many replicas all stages of a small model need, instead of many short computations over arrays.

A row is a way to run a stage. In each, so many units in flight fit the memory, whatever the time, and so many replicas
meet the time, whatever the memory: the fewest that do both are found without trying any. Where nothing is sharded, the
rows of a stage are its choices of what recomputes, as far as they have room for more units in flight than quicker ones.
Where replicas may divide the optimizer's state, what fits depends on them, and there is the plainest way alone.

The fewest replicas that meet a target depend on the GPUs after a stage only under 2bw, and even then those seldom
matter. So they are tabulated for one target at a time, and computed again where they are too few for these GPUs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from planner.cost.work import IMPOSSIBLE, Floats, Footprint, Integers, fewest_to_hold, joined
from planner.options.solving import UNLIMITED
from planner.schedule.schedule import warm_up_depth
from planner.solver.problem.bounds import Bounds
from planner.solver.problem.problem import Limits
from planner.solver.problem.states import StateSpace
from planner.solver.search.chain.ways import WaysOf, taken


class StageTables:
    """Replicas of all stages between the states of `space`."""

    def __init__(self, space: StateSpace, model: Bounds, limits: Limits, ways: WaysOf) -> None:
        self._space, self._model, self._limits, self._ways = space, model, limits, ways
        self._chooses = ways.chooses and not ways.shards
        self._last: tuple[float, Integers] | None = None  # the last target, and the replicas of all rows that meet it
        firsts, others, self._work = space.every_stage
        # First row of each stage, and how many it has, by first and last state.
        self._first, self._count = np.zeros((2, len(space), space.ends), dtype=np.int64)
        self._first[firsts, others], self._count[firsts, others] = np.arange(len(firsts)), 1
        self._listed = (self._count == 0) | (not self._chooses)  # whether all rows of use are there
        # Units in flight with which each row fits the memory, and on several replicas if that is less.
        self._most: list[Integers] | None = None
        if limits.memory_bytes is not None:
            chunks = np.split(np.arange(len(firsts)), np.flatnonzero(np.diff(firsts)) + 1)
            held = [self._held(int(firsts[own[0]]), others[own]) for own in chunks]
            self._most = [np.concatenate(each) for each in zip(*held, strict=True)]
        self._work = ways.plainest_work(self._work)

    def fewest_alone(self, target_s: float) -> Integers:
        """Return the fewest replicas that meet the target in the plainest way, by first and last state.

        GPUs after a stage, and memory, do not count.
        """
        return np.where(self._count > 0, self._alone(target_s)[self._first], IMPOSSIBLE)

    def fewest(
        self, state: int, others: Integers, target_s: float, after: Integers, most: Integers
    ) -> tuple[Integers, NDArray[np.bool_]]:
        """Return the fewest replicas of the stages from `state` to `others`, and whether all ways with them recompute.

        Args:
            state: at which the stages begin.
            others: at which they end.
            target_s: to meet.
            after: GPUs after each stage.
            most: replicas of each stage. Where it needs more, the answer is any larger number.
        """
        rows, place, plain = self._first[state, others], np.arange(len(others)), np.full(len(others), IMPOSSIBLE)
        if self._chooses:
            unlisted = ~self._listed[state, others]
            if unlisted.any():
                unlisted &= (self._alone(target_s)[rows] <= most) & self.tight(state, others, after)
                if unlisted.any():
                    self._list(state, target_s)
            rows, place = self._rows(state, others)
            possible = self._alone(target_s)[rows] <= most[place]
            rows, place = rows[possible], place[possible]
        alone, behind = self._alone(target_s)[rows], after[place]

        def fewest(held: Integers) -> Integers:
            r = np.maximum(alone, held)
            enough = r == alone
            if self._model.counts_gpus_after:
                enough &= self._model.enough_before(r, behind)
            few = np.flatnonzero(~enough & (r <= most[place]))
            if len(few):
                work = taken(self._work, rows[few])
                late = self._model.stage_s(work, r[few]) > target_s
                late |= ~self._model.enough_before(r[few], behind[few])
                if late.any():
                    work, few = taken(work, np.flatnonzero(late)), few[late]
                    r[few] = self._model.fewest_replicas(work, target_s, r[few], behind[few])
            return np.asarray(r)

        held = None if self._most is None else [each[rows] for each in self._most]
        r, _ = closed_form(held, behind, self._limits.deepest, fewest)
        if not self._chooses:
            return r, np.full(len(others), self._ways.recomputes)
        found = plain.copy()
        if len(rows):
            begins = np.flatnonzero(np.diff(place, prepend=-1))
            found[place[begins]] = np.minimum.reduceat(r, begins)
            plainest = rows == self._first[state, others[place]]
            plain[place[plainest]] = r[plainest]
        return found, plain > found

    def seconds(self, states: Integers, others: Integers, replicas: Integers, after: Integers) -> Floats:
        """Return the seconds of stages that fit the memory, in their quickest ways that do."""
        rows, place = self._rows(states, others)
        r, fits = replicas[place], np.ones(len(rows), dtype=bool)
        if self._most is not None:
            most = np.where(r > 1, self._most[-1][rows], self._most[0][rows])
            fits = np.asarray(warm_up_depth(r, after[place])) <= most
        seconds = np.where(fits, self._model.stage_s(taken(self._work, rows), r), np.inf)
        return np.minimum.reduceat(seconds, np.flatnonzero(np.diff(place, prepend=-1)))

    def tight(self, state: int, others: Integers, after: Integers) -> NDArray[np.bool_]:
        """Return which stages need several replicas in their plainest way for their memory, with so many GPUs after."""
        if self._most is None:
            return np.zeros(len(others), dtype=bool)
        return np.asarray(fewest_to_hold(self._most[-1][self._first[state, others]], after) > 1)

    def _alone(self, target_s: float) -> Integers:
        """Return the fewest replicas that meet the target, of each row."""
        if self._last is None or self._last[0] != target_s:
            self._last = target_s, self._model.fewest_replicas(self._work, target_s)
        return self._last[1]

    def _rows(self, state: int | Integers, others: Integers) -> tuple[Integers, Integers]:
        """Return the rows of the stages from the state to each of others, and the place of each row's stage."""
        first, counts = self._first[state, others], self._count[state, others]
        before = np.cumsum(counts) - counts
        return np.arange(counts.sum()) + np.repeat(first - before, counts), np.repeat(np.arange(len(others)), counts)

    def _held(self, state: int, others: Integers) -> list[Integers]:
        """Return the units in flight with which the stages fit in their plainest way."""
        footprint = self._ways.plainest_footprint(state, others, self._space.work(state, others))
        assert self._limits.memory_bytes is not None
        if self._chooses:  # and may fit
            least = most_in_flight(self._space, self._model, footprint.least(), self._limits.memory_bytes)[0]
            self._listed[state, others[least < 1]] = True
        return most_in_flight(self._space, self._model, footprint, self._limits.memory_bytes)

    def _list(self, state: int, target_s: float) -> None:
        """List the choices of the stages from the state that may meet the target, as far as they are of use."""
        gpus, memory_bytes, alone = self._limits.gpus, self._limits.memory_bytes, self._alone(target_s)
        assert memory_bytes is not None
        assert self._most is not None
        others = np.flatnonzero(~self._listed[state] & (alone[self._first[state]] <= gpus))
        ways = self._ways.all(state, others, np.ones(len(others), dtype=bool))
        most = most_in_flight(self._space, self._model, ways.footprint, memory_bytes)
        useful = np.zeros(len(ways), dtype=bool)
        for each in most:  # more than all quicker ones, as far as there are GPUs after the stage
            room = np.minimum(each, gpus + 1) + ways.stage * (gpus + 2)
            useful |= np.diff(np.maximum.accumulate(room), prepend=-1) > 0
        rows = np.flatnonzero(useful)
        work, known = taken(ways.work, rows), len(alone)
        self._work = joined((self._work, work), (known, len(rows)))
        self._most = [np.concatenate((all_, each[rows])) for all_, each in zip(self._most, most, strict=True)]
        self._last = target_s, np.concatenate((alone, self._model.fewest_replicas(work, target_s)))
        self._first[state, others] = known + np.searchsorted(ways.stage[rows], np.arange(len(others)))
        self._count[state, others] = np.bincount(ways.stage[rows])
        self._listed[state, others] = True


def closed_form(
    most: list[Integers] | None, after: Integers, deepest: int, fewest: Callable[[Integers], Integers]
) -> tuple[Integers, NDArray[np.bool_]]:
    """Return the fewest replicas of stages that run in one way, and which need several for their memory.

    Args:
        most: units in flight with which they fit the memory; and on several replicas, if that is less.
        after: GPUs after each stage.
        deepest: units in flight that any stage may have.
        fewest: that meet the target and are at least as many.
    """
    one = np.ones(1, dtype=np.int64)
    held, *more = [one] if most is None else [fewest_to_hold(each, after) for each in most]
    several = more[0] if more else held
    at_least = np.where(held > 1, np.maximum(several, 2), 1) if more else held
    if deepest < UNLIMITED:
        at_least = np.maximum(at_least, fewest_to_hold(deepest, after))
    r = fewest(at_least)
    if more and ((r > 1) & (r < several)).any():
        r = fewest(np.where(r > 1, np.maximum(at_least, several), at_least))
    return r, np.broadcast_to(several > 1, r.shape)


def most_in_flight(space: StateSpace, model: Bounds, footprint: Footprint, memory_bytes: int) -> list[Integers]:
    """Return the most units in flight with which stages fit the memory, and on several replicas if that is less."""
    replicas = (1, 2) if space.layer_costs.counts_replicas else (1,)
    return [model.most_in_flight(space.layer_costs.replicated(footprint, r), memory_bytes) for r in replicas]
