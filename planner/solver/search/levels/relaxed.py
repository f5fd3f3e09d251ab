"""Relax the search on clusters of several levels: a dynamic programme over cuts and ranks, on bounds of stages.

What a stage costs depends on its place and on those of the stages that it exchanges messages with, which a search from
one end does not know. Two things are certain, though. Its all-reduce crosses the levels that its own ranks span. And
all stages before it are on lower ranks, all after it on higher ones, so its messages travel at least to the nearest
rank outside. With those distances the bound of a stage depends only on its layers, its replicas and its first rank; and
first ranks that differ by whole groups of the second outermost level have the same bound (they have the same phase).

Over those bounds a programme from the last layer to the first,

    best(J, p) = min over K, r of  max( bound(J, K, p, r), best(K, p + r) ),

gives for every cut J and every rank p the least that the rest of a plan can cost. For synchronous schedules, the sum
and the maximum have a programme each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.candidate import StageOptions
from planner.cost.models.synchronous import SynchronousModel
from planner.cost.network.topology import Topology
from planner.cost.pricing import asynchronous_model
from planner.cost.work import Floats, Integers, Work
from planner.formats.names import CostModelName
from planner.schedule.schedule import warm_up_depth
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import RESOLUTION, CutPath
from planner.solver.problem.states import StateSpace
from planner.solver.search.chain.ways import Ways, WaysOf

# What is minimised: a cost model of the asynchronous pipeline, or the model of a synchronous one.
Objective = CostModelName | SynchronousModel
BOTH_WAYS = ((0, 1), (1, 0))  # rows of `StateSpace.sides`: activations come from earlier stages, gradients from later


def objective_of(problem: Problem) -> Objective:
    """Return the cost model whose seconds are minimised."""
    return problem.setting.cost_model if problem.schedule.stashes else problem.synchronous()


@dataclass(frozen=True)
class StageBounds:
    """Ways to run the stages that begin at one state; bounds have axes (phase of the first rank, replicas - 1, way).

    Attributes:
        ways: of the stages.
        sum_s: bound of their part of the sum; zero for the asynchronous pipeline.
        max_s: bound of their part of the maximum.
        most: by replicas - 1 and way, the microbatches that may be in flight; 0 where the replicas are not allowed.
    """

    ways: Ways
    sum_s: Floats
    max_s: Floats
    most: Integers

    @property
    def others(self) -> Integers:
        """States where they end."""
        return self.ways.others


class Places:
    """Distances for every phase of the first rank and every number of replicas."""

    def __init__(self, topology: Topology, most_replicas: int) -> None:
        self.topology = topology
        self.phases = int(topology.groups[-2]) if len(topology) > 1 else 1
        self.first = np.arange(self.phases)[:, None]
        self.replicas = np.arange(1, most_replicas + 1)
        self.end = self.first + self.replicas
        last, before = self.end - 1, self.first - 1
        level = topology.level
        self.span = level(self.first, last)
        self.before_last = level(before, last)  # from the stage's farthest rank to the nearest one outside
        self.first_after = level(self.first, self.end)
        # Levels of the messages (to earlier, to later stages) of the first replica, and of the last one.
        self.sides = (
            (np.broadcast_to(level(self.first, before), self.span.shape), self.first_after),
            (self.before_last, level(last, self.end)),
        )

        # Mean slowness and latency from a replica to the nearest rank before and after the stage.
        self.path_left, self.latency_left = self._means(before)
        self.path_right, self.latency_right = self._means(self.end)

    def at(self, per_level: Sequence[Floats], levels: Integers) -> Floats:
        """Pick, from arrays (replicas, stages) per level, those of the given levels: (phases, replicas, stages)."""
        return np.stack(per_level)[levels, np.arange(len(self.replicas))]

    def _means(self, outside: Integers) -> tuple[Floats, Floats]:
        """Return the mean seconds per byte and latency over the ways from each replica to a rank outside."""
        outside = np.broadcast_to(outside, self.span.shape)
        levels = np.stack([self.topology.level(self.first + i, outside) for i in range(len(self.replicas))])
        own = np.arange(len(self.replicas))

        def mean(per_level: Floats) -> Floats:
            return np.asarray(np.cumsum(per_level[levels], axis=0)[own, :, own].T / self.replicas)

        return mean(1 / self.topology.path_bytes_per_s), mean(self.topology.latency_s)

    def groups_inside(self, size: int) -> list[tuple[NDArray[np.bool_] | Integers, ...]]:
        """Return groups of `size` ranks that hold part of the stage: its first group, its last, and one in the middle.

        For each: the replicas in it, whether all earlier stages are outside, and whether all later stages are.
        """
        head, tail = self.first // size, (self.end - 1) // size
        # A group in the middle is full of the stage, with earlier and later stages outside.
        full = (self.end // size - -(-self.first // size) >= 1) * size
        return [
            (
                np.minimum(self.replicas, size - self.first % size),
                np.broadcast_to(self.first % size == 0, full.shape),
                self.end // size > head,
            ),
            (
                np.minimum(self.replicas, (self.end - 1) % size + 1),
                (self.first - 1) // size < tail,
                self.end % size == 0,
            ),
            (full, full > 0, full > 0),
        ]


def bounds_of(ways: Ways, places: Places, objective: Objective) -> StageBounds:
    """Bound what stages cost in these ways, in every place."""
    space, limits, replicas = ways.source.space, ways.source.limits, places.replicas[:, None]
    links, footprint = _Links(ways, space, places), ways.footprint_on(replicas)
    if isinstance(objective, SynchronousModel):
        sum_s, max_s = _synchronous(ways.work, links, objective)
        footprint = footprint.divided(objective.microbatches)
    else:
        max_s = _asynchronous(ways.work, links, objective)
        sum_s = np.zeros_like(max_s)
    shape = (len(replicas), len(ways))
    most = np.full(shape, limits.deepest)
    if limits.memory_bytes is not None:
        stashing = not isinstance(objective, SynchronousModel)
        most = np.minimum(most, footprint.most_in_flight(limits.memory_bytes, stashing))
    return StageBounds(ways, sum_s, max_s, np.where(ways.allowed(np.broadcast_to(replicas, shape)), most, 0))


def _asynchronous(work: Work, links: _Links, name: CostModelName) -> Floats:
    places = links.places
    topology, r = places.topology, places.replicas[:, None]
    if name != "resource":
        models = [asynchronous_model(name, topology.link(level)) for level in range(len(topology))]
        busy = [model.resources_s(work, r) for model in models]
        shape = (len(r), len(work.forward_s))
        bound = places.at([each["compute"] for each in busy], places.span)
        for resource, levels in (("cut_before", places.before_last), ("cut_after", places.first_after)):
            if resource in busy[0]:
                cuts = [np.broadcast_to(each[resource], shape) for each in busy]
                bound = np.maximum(bound, places.at(cuts, levels))
        return bound
    computes = [
        asynchronous_model(name, topology.stage_link(range(int(size)))).resources_s(work, r)["compute"]
        for size in topology.groups
    ]
    ring = 2 * (r - 1) / (r * r) * links.once(work.trainable_bytes)
    own_s = links.own_s() + (1 / topology.ring_bytes_per_s)[places.span][..., None] * ring
    link_s = np.maximum(own_s, links.shared_s(ring))
    return np.maximum(places.at(computes, places.span), links.of_ways(link_s))


def _synchronous(work: Work, links: _Links, model: SynchronousModel) -> tuple[Floats, Floats]:
    places, sides = links.places, links.sides
    topology, r = places.topology, places.replicas[:, None]
    shape = (len(r), len(work.forward_s))
    placed = [
        SynchronousModel(topology.stage_link(range(int(size))), model.schedule, model.microbatches)
        for size in topology.groups
    ]
    alone = work.without_transfers()
    sums = places.at([np.broadcast_to(each.sum_s(alone, r), shape) for each in placed], places.span)
    for side, path_s, latency_s in (
        (sides[0], places.path_left, places.latency_left),
        (sides[1], places.path_right, places.latency_right),
    ):
        moved_s = (side[0] + side[1]) * path_s[..., None] + (side[2] + side[3]) * latency_s[..., None]
        sums = sums + links.of_ways(moved_s / 2)  # each end counts half of a message
    computes = [np.broadcast_to(each.resources_s(work, r)["compute"], shape) for each in placed]
    bound = places.at(computes, places.span)
    if model.schedule.pipelined:
        ends = places.at([np.broadcast_to(each.end_s(work, r), shape) for each in placed], places.span)
        more = (np.ceil(model.microbatches / r) - 1) * r
        bound = np.maximum(bound, more * links.of_ways(links.own_s()) + ends)
        shared_s = links.shared_s(np.zeros((len(r), 1)))
        bound = np.maximum(bound, (model.microbatches - 1) * links.of_ways(shared_s))
    return sums, bound


class _Links:
    """The links of stages, in every place. All ways to run a stage send the same, so each stage is computed once."""

    def __init__(self, ways: Ways, space: StateSpace, places: Places) -> None:
        self.places = places
        self._stage, self._first = ways.stage, np.flatnonzero(np.diff(ways.stage, prepend=-1))
        self.sides = space.sides(ways.state, ways.others[self._first])

    def once(self, values: Floats) -> Floats:
        """Return one of the equal values of each stage's ways."""
        return np.broadcast_to(values, self._stage.shape)[self._first]

    def of_ways(self, values: Floats) -> Floats:
        """Repeat values of each stage, along the last axis, for each of its ways."""
        if len(self._first) == len(self._stage):
            return values
        return np.asarray(np.broadcast_to(values, (*values.shape[:-1], len(self._first)))[..., self._stage])

    def own_s(self) -> Floats:
        """Return the busy time of the first or last replica's link, in its busier direction, without all-reduces."""
        (left, right), places = self.sides, self.places
        slowness, latency = 1 / places.topology.path_bytes_per_s, places.topology.latency_s
        busiest = np.zeros(1)
        for to_left, to_right in places.sides:
            for incoming, outgoing in BOTH_WAYS:
                seconds = (
                    left[incoming] * slowness[to_left][..., None]
                    + left[incoming + 2] * latency[to_left][..., None]
                    + right[outgoing] * slowness[to_right][..., None]
                    + right[outgoing + 2] * latency[to_right][..., None]
                )
                busiest = np.maximum(busiest, seconds)
        return busiest / places.replicas[:, None]

    def shared_s(self, ring: Floats) -> Floats:
        """Return the busy time of the busiest shared link of a group that holds part of the stage."""
        (left, right), places = self.sides, self.places
        busiest = np.zeros(1)
        for level, size, bandwidth, ring_bandwidth in places.topology.shared:
            crossing = (places.span >= level)[..., None] * ring / ring_bandwidth
            for inside, from_left, from_right in places.groups_inside(size):
                share_left = (inside * from_left / places.replicas / bandwidth)[..., None]
                share_right = (inside * from_right / places.replicas / bandwidth)[..., None]
                for incoming, outgoing in BOTH_WAYS:
                    busiest = np.maximum(
                        busiest, left[incoming] * share_left + right[outgoing] * share_right + crossing
                    )
        return busiest


MOST_TRADES = 16  # answers that trade the sum against the maximum

# The seconds of a path at its true price; infinite if it does not fit the memory.
Seconds = Callable[[CutPath], float]


@dataclass(frozen=True)
class Rest:
    """The least that the layers after each state can cost from each rank on, with axes (state, rank)."""

    gpus: int  # of the whole plan: exactly where memory is limited, at most otherwise
    sum_s: Floats
    max_s: Floats


class Relaxed:
    """The bounds of all stages in all places, and the bounds of whole plans that follow.

    Raises:
        OutOfTimeError: if the deadline passes before the bounds of all stages are known, as do its methods.
    """

    def __init__(self, problem: Problem, space: StateSpace) -> None:
        self.space, self.objective, limits = space, objective_of(problem), problem.limits
        self.gpus, self.counts_gpus, self._deadline = limits.gpus, limits.counts_gpus, limits.deadline
        # More replicas than microbatches would idle, but may let the next stage begin at a server.
        self.places = Places(problem.topology, problem.cluster.gpus)
        ways = WaysOf(space, limits, prices_shards=problem.simulates)
        self.bounds = [self._bounds(ways, state) for state in range(len(space) - 1)]

    def _bounds(self, ways: WaysOf, state: int) -> StageBounds:
        self._deadline.check()
        others = self.space.among_later(state, np.arange(state + 1, len(self.space)))
        plainest = bounds_of(ways.all(state, others), self.places, self.objective)
        choosing = ways.choosing(plainest.ways, (plainest.most < self.gpus + 1).any(axis=0), len(others))
        return bounds_of(ways.all(state, others, choosing), self.places, self.objective) if choosing.any() else plainest

    def rest(self, gpus: int) -> Rest:
        """Run the dynamic programme over (state, rank), for the sum and for the maximum."""
        last, synchronous = len(self.space) - 1, isinstance(self.objective, SynchronousModel)
        sum_s, max_s = np.full((2, last + 1, self.gpus + 1), np.inf)
        sum_s[last, self._ends(gpus)] = max_s[last, self._ends(gpus)] = 0.0
        for state, rank, fits, phase, ranks in self._starts(gpus):
            bounds, after = self.bounds[state], (self.bounds[state].others[None, :], ranks[:, None])
            peaks = np.maximum(bounds.max_s[phase, : len(ranks)], max_s[after])
            max_s[state, rank] = np.min(peaks, where=fits, initial=np.inf)
            sum_s[state, rank] = 0.0
            if synchronous:
                sums = bounds.sum_s[phase, : len(ranks)] + sum_s[after]
                sum_s[state, rank] = np.min(sums, where=fits, initial=np.inf)
        return Rest(gpus, sum_s, max_s)

    def _ends(self, gpus: int) -> slice:
        """Return the ranks at which a plan may end.

        Where what is in flight is limited, a plan must use exactly so many GPUs: the stages before rely on it.
        """
        return slice(gpus, gpus + 1) if self.counts_gpus else slice(0, gpus + 1)

    def _starts(self, gpus: int) -> Iterator[tuple[int, int, NDArray[np.bool_], int, Integers]]:
        """Yield states from the last, with every rank: which (replicas, way) fit, its phase, and the ranks after."""
        for state in range(len(self.space) - 2, -1, -1):
            self._deadline.check()
            for rank in range(gpus):
                replicas = self.places.replicas[: gpus - rank]
                fits = self.fits(self.bounds[state], gpus, rank, len(replicas))
                yield state, rank, fits, rank % self.places.phases, rank + replicas

    def fits(self, bounds: StageBounds, gpus: int, rank: int, counts: int) -> NDArray[np.bool_]:
        """Return which (replicas, way) are allowed and fit the memory if the plan has so many GPUs in all."""
        most = bounds.most[:counts]
        if not self.counts_gpus:
            return np.asarray(most > 0)
        r = self.places.replicas[:counts, None]
        after = np.maximum(gpus - rank - r, 0)
        if isinstance(self.objective, SynchronousModel):
            return np.asarray(self.objective.in_flight(r, after) <= most)
        return np.asarray(warm_up_depth(r, after) <= most)

    def paths(self, rest: Rest) -> Iterator[CutPath]:
        """Yield paths that are best by the bounds; for synchronous schedules, those that trade sum against maximum.

        The maximum of each is the limit for the next, as in the search for a flat cluster.
        """
        synchronous = isinstance(self.objective, SynchronousModel)
        limit_s = np.inf if synchronous else float(rest.max_s[0, 0])
        for _ in range(MOST_TRADES if synchronous else 1):
            answer = self._least_sum(rest.gpus, limit_s) if np.isfinite(rest.max_s[0, 0]) else None
            if answer is None:
                return
            yield answer[0]
            limit_s = answer[1] * (1 - RESOLUTION)

    def _least_sum(self, gpus: int, limit_s: float) -> tuple[CutPath, float] | None:
        """Return the path of least sum whose stages are within the limit, by the bounds, and its maximum."""
        last = len(self.space) - 1
        sums = np.full((last + 1, self.gpus + 1), np.inf)
        sums[last, self._ends(gpus)] = 0.0
        choice = np.zeros((last, self.gpus + 1), dtype=np.int64)  # of replicas - 1 and way, as one number
        for state, rank, fits, phase, ranks in self._starts(gpus):
            bounds = self.bounds[state]
            usable = fits & (bounds.max_s[phase, : len(ranks)] <= limit_s)
            totals = bounds.sum_s[phase, : len(ranks)] + sums[bounds.others[None, :], ranks[:, None]]
            totals = np.where(usable, totals, np.inf)
            choice[state, rank] = np.argmin(totals)
            sums[state, rank] = totals.flat[choice[state, rank]]
        if not np.isfinite(sums[0, 0]):
            return None
        states, options, rank, peak_s = [0], list[StageOptions](), 0, 0.0
        while (state := states[-1]) < last:
            bounds = self.bounds[state]
            row, way = divmod(int(choice[state, rank]), len(bounds.ways))
            peak_s = max(peak_s, float(bounds.max_s[rank % self.places.phases, row, way]))
            states.append(int(bounds.others[way]))
            options.append(bounds.ways.options(way, row + 1))
            rank += row + 1
        return CutPath(tuple(states), tuple(options), float(sums[0, 0])), peak_s
