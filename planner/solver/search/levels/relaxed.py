"""Relax the search on clusters of several levels: a dynamic programme over cuts and ranks, on bounds of stages.

All stages before a stage are on lower ranks, all after it on higher ones, so its messages travel at least to the
nearest rank outside. With those distances the bound of a stage depends only on its layers, its replicas and its first
rank; first ranks that differ by whole groups of the second outermost level have the same bound (the same phase). From
the last layer to the first,

    best(J, p) = min over K, r of  max( bound(J, K, p, r), best(K, p + r) )

is the least that the rest of a plan can cost after cut J and from rank p on; for synchronous schedules, the sum has
such a programme, too.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.cost.candidate import StageOptions
from planner.cost.models.asynchronous import AsynchronousModel
from planner.cost.models.synchronous import SynchronousModel
from planner.cost.network.topology import Topology
from planner.cost.work import Floats, Integers, Work
from planner.schedule.schedule import warm_up_depth
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import RESOLUTION, BoundedPath, CutPath
from planner.solver.problem.states import Chain
from planner.solver.search.chain.ways import Ways, WaysOf

MOST_ENTRIES = 12_000_000  # in the tables of bounds
MOST_COUNTS = 16  # numbers of GPUs that are tried one by one where memory is limited
MOST_TRADES = 16  # answers that trade the sum against the maximum

Sides = tuple[Floats, Floats]  # what stages exchange with earlier stages, and with later ones: `Chain.sides`
BOTH_WAYS = ((0, 1), (1, 0))  # their rows: activations come from earlier stages, gradients from later


def objective_of(problem: Problem) -> SynchronousModel | None:
    """Return the model of a synchronous pipeline whose seconds are minimised; None for the asynchronous one."""
    return None if problem.schedule.stashes else problem.synchronous()


@dataclass(frozen=True)
class StageBounds:
    """Ways to run the stages that begin at one state; bounds have axes (phase of the first rank, replicas - 1, way)."""

    ways: Ways
    sum_s: Floats  # of their part of the sum; zero for the asynchronous pipeline
    max_s: Floats  # of their part of the maximum
    most: Integers  # by replicas - 1 and way, the microbatches that may be in flight; 0 where replicas are not allowed

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


def bounds_of(ways: Ways, places: Places, objective: SynchronousModel | None) -> StageBounds:
    """Bound what stages cost in these ways, in every place."""
    limits, replicas = ways.source.limits, places.replicas[:, None]
    sides, footprint = ways.source.space.sides(ways.state, ways.others), ways.footprint_on(replicas)
    if objective is not None:
        sum_s, max_s = _synchronous(ways.work, places, sides, objective)
        footprint = footprint.divided(objective.microbatches)
    else:
        max_s = _asynchronous(ways.work, places, sides)
        sum_s = np.zeros_like(max_s)
    shape = (len(replicas), len(ways))
    most = np.full(shape, limits.deepest)
    if limits.memory_bytes is not None:
        most = np.minimum(most, footprint.most_in_flight(limits.memory_bytes, objective is None))
    return StageBounds(ways, sum_s, max_s, np.where(ways.allowed(np.broadcast_to(replicas, shape)), most, 0))


def _asynchronous(work: Work, places: Places, sides: Sides) -> Floats:
    topology, r = places.topology, places.replicas[:, None]
    computes = [
        AsynchronousModel(topology.stage_link(range(int(size)))).resources_s(work, r)["compute"]
        for size in topology.groups
    ]
    ring = 2 * (r - 1) / (r * r) * work.trainable_bytes
    own_s = _own_link_s(places, sides) + (1 / topology.ring_bytes_per_s)[places.span][..., None] * ring
    link_s = np.maximum(own_s, _shared_link_s(places, sides, ring))
    return np.maximum(places.at(computes, places.span), link_s)


def _synchronous(work: Work, places: Places, sides: Sides, model: SynchronousModel) -> tuple[Floats, Floats]:
    topology, r = places.topology, places.replicas[:, None]
    shape = (len(r), len(work.forward_s))
    placed = [
        SynchronousModel(topology.stage_link(range(int(size))), model.schedule, model.microbatches)
        for size in topology.groups
    ]
    alone = work.without_transfers()
    sums = places.at([np.broadcast_to(each.sum_s(alone), shape) for each in placed], places.span)
    for side, path_s, latency_s in (
        (sides[0], places.path_left, places.latency_left),
        (sides[1], places.path_right, places.latency_right),
    ):
        moved_s = (side[0] + side[1]) * path_s[..., None] + (side[2] + side[3]) * latency_s[..., None]
        sums = sums + moved_s / 2  # each end counts half of a message
    computes = [np.broadcast_to(each.resources_s(work, r)["compute"], shape) for each in placed]
    bound = places.at(computes, places.span)
    ends = places.at([np.broadcast_to(each.end_s(work, r), shape) for each in placed], places.span)
    more = (np.ceil(model.microbatches / r) - 1) * r
    bound = np.maximum(bound, more * _own_link_s(places, sides) + ends)
    shared_s = _shared_link_s(places, sides, np.zeros((len(r), 1)))
    return sums, np.maximum(bound, (model.microbatches - 1) * shared_s)


def _own_link_s(places: Places, sides: Sides) -> Floats:
    """Return the busy time of the first or last replica's link, in its busier direction, without all-reduces."""
    left, right = sides
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


def _shared_link_s(places: Places, sides: Sides, ring: Floats) -> Floats:
    """Return the busy time of the busiest shared link of a group that holds part of the stage."""
    left, right = sides
    busiest = np.zeros(1)
    for level, size, bandwidth, ring_bandwidth in places.topology.shared:
        crossing = (places.span >= level)[..., None] * ring / ring_bandwidth
        for inside, from_left, from_right in places.groups_inside(size):
            share_left = (inside * from_left / places.replicas / bandwidth)[..., None]
            share_right = (inside * from_right / places.replicas / bandwidth)[..., None]
            for incoming, outgoing in BOTH_WAYS:
                busiest = np.maximum(busiest, left[incoming] * share_left + right[outgoing] * share_right + crossing)
    return busiest


# The seconds of a path at its true price; infinite if it does not fit the memory.
Seconds = Callable[[CutPath], float]


class Relaxed:
    """The bounds of all stages in all places, and the bounds of whole plans that follow, or `OutOfTimeError`."""

    def __init__(self, problem: Problem, space: Chain) -> None:
        self.space, self.objective, limits = space, objective_of(problem), problem.limits
        self.gpus, self.counts_gpus, self._deadline = limits.gpus, limits.counts_gpus, limits.deadline
        self._synchronous = isinstance(self.objective, SynchronousModel)
        # More replicas than microbatches would idle, but may let the next stage begin at a server.
        self.places = Places(problem.topology, problem.cluster.gpus)
        ways = WaysOf(space, limits)
        self.bounds = [self._bounds(ways, state) for state in range(len(space) - 1)]

    @staticmethod
    def states_that_fit(problem: Problem) -> int:
        """Return how many states a space may have so that its tables have a reasonable size."""
        groups = problem.topology.groups
        phases = int(groups[-2]) if len(groups) > 1 else 1
        return int((2 * MOST_ENTRIES / (phases * problem.cluster.gpus)) ** 0.5)

    def best(self, price: Seconds, known: CutPath | None) -> BoundedPath:
        """Return the best by its true price of the known path and those that are best by the bounds, and a bound."""
        best, bound_s = known, np.inf
        # Where memory is limited, a stage must know how many GPUs come after it, hence how many there are in all.
        counts = [self.gpus]
        if self.counts_gpus:
            counts = sorted({int(count) for count in np.geomspace(1, self.gpus, MOST_COUNTS)} | {self.gpus})
            counts = list(range(1, self.gpus + 1)) if self.gpus <= MOST_COUNTS else counts
        for gpus in counts:
            least_s, paths = self._traded(gpus)
            bound_s = min(bound_s, least_s)
            for path in paths:
                best = better(best, path, price)
        if self.counts_gpus and len(counts) < self.gpus:
            bound_s = 0.0  # which must hold for every number of GPUs
        return BoundedPath(best, bound_s if best is None else min(bound_s, best.seconds))

    def _bounds(self, ways: WaysOf, state: int) -> StageBounds:
        self._deadline.check()
        others = np.arange(state + 1, len(self.space))
        plainest = bounds_of(ways.all(state, others), self.places, self.objective)
        choosing = ways.choosing(plainest.ways, (plainest.most < self.gpus + 1).any(axis=0), len(others))
        return bounds_of(ways.all(state, others, choosing), self.places, self.objective) if choosing.any() else plainest

    def _traded(self, gpus: int) -> tuple[float, list[CutPath]]:
        """Return seconds that no plan on so many GPUs is below, and paths that trade the sum against the maximum."""
        least_s, bound_s, found = self._least_maximum_s(gpus), np.inf, list[CutPath]()
        limit_s = np.inf if self._synchronous else least_s
        while np.isfinite(least_s) and (answer := self._least_sum(gpus, limit_s)) is not None:
            path, sum_s, max_s = answer
            found.append(path)
            bound_s, limit_s = min(bound_s, sum_s + max_s), max_s * (1 - RESOLUTION)
            if not self._synchronous:
                break
            if len(found) == MOST_TRADES:
                bound_s = min(bound_s, sum_s + least_s)
                break
        return bound_s, found

    def _least_maximum_s(self, gpus: int) -> float:
        last = len(self.space) - 1
        max_s = np.full((last + 1, self.gpus + 1), np.inf)
        max_s[last, self._ends(gpus)] = 0.0
        for state, rank, fits, phase, ranks in self._starts(gpus):
            bounds = self.bounds[state]
            peaks = np.maximum(bounds.max_s[phase, : len(ranks)], max_s[bounds.others[None, :], ranks[:, None]])
            max_s[state, rank] = np.min(peaks, where=fits, initial=np.inf)
        return float(max_s[0, 0])

    def _ends(self, gpus: int) -> slice:
        # Where what is in flight is limited, a plan must use exactly so many GPUs: the stages before rely on it.
        return slice(gpus, gpus + 1) if self.counts_gpus else slice(0, gpus + 1)

    def _starts(self, gpus: int) -> Iterator[tuple[int, int, NDArray[np.bool_], int, Integers]]:
        """Yield states from the last, with every rank: which (replicas, way) fit, its phase, and the ranks after."""
        for state in range(len(self.space) - 2, -1, -1):
            self._deadline.check()
            for rank in range(gpus):
                r = self.places.replicas[: gpus - rank]
                most = self.bounds[state].most[: len(r)]
                flying: int | Integers = 1
                if self.counts_gpus:
                    after = gpus - rank - r[:, None]
                    model = self.objective
                    in_flight = model.in_flight if isinstance(model, SynchronousModel) else warm_up_depth
                    flying = in_flight(r[:, None], after)
                yield state, rank, flying <= most, rank % self.places.phases, rank + r

    def _least_sum(self, gpus: int, limit_s: float) -> tuple[CutPath, float, float] | None:
        """Return the path of least sum whose stages are within the limit, by the bounds, with its sum and maximum."""
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
        sum_s = float(sums[0, 0])
        return CutPath(tuple(states), tuple(options), sum_s + peak_s), sum_s, peak_s


def better(best: CutPath | None, path: CutPath, price: Seconds) -> CutPath | None:
    """Return the faster of the two; of equally fast ones the one with fewer GPUs, then fewer stages."""
    seconds = price(path)
    if not np.isfinite(seconds):
        return best
    priced = replace(path, seconds=seconds)
    if best is None or seconds < best.seconds * (1 - RESOLUTION):
        return priced
    if seconds <= best.seconds * (1 + RESOLUTION) and (path.gpus, len(path.replicas)) < (best.gpus, len(best.replicas)):
        return priced
    return best
