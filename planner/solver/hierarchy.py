"""Search on clusters of several levels: bounds for every place of a stage, then plans in the order of their bounds.

What a stage costs depends on where it and its neighbours sit. `placements` bounds it from below by its own place. Over
those bounds a dynamic programme from the last layer to the first,

    best(J, p) = min over K, r of  max( bound(J, K, p, r), best(K, p + r) ),

gives for every cut and every rank the least that the rest of a plan can cost. Best-first search (A*) then extends plans
stage by stage from the first rank on, with true loads on the links as far as they are known and `best` for the rest.
When the least bound left is no better than the best plan found, that plan is optimal; when the work allowed runs out,
the least bound is what the plan is measured against. For schedules that drain, the sum and the maximum have a programme
each.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from planner.cost import Floats, Integers, SynchronousModel
from planner.solver.placements import Places, Question, StageBounds, stage_bounds
from planner.solver.search import RESOLUTION, Path
from planner.solver.states import value_weights
from planner.topology import Loads

MOST_ENTRIES = 12_000_000  # of the tables of bounds
MOST_STEPS = 3_000  # extended plans; a fixed number rather than a time, so that the same question has the same answer
MOST_COUNTS = 16  # numbers of GPUs tried one by one where memory is limited

Seconds = Callable[[Path], float]  # the price of a path; infinite when it does not fit the memory


@dataclass(frozen=True)
class Found:
    """The best path, or None, and what no path can beat."""

    path: Path | None
    bound_s: float


@dataclass(frozen=True)
class _Rest:
    """The least that the layers after each state can cost from each rank on: (state, rank)."""

    gpus: int  # that the whole plan has, where memory is limited; that it may have otherwise
    sum_s: Floats
    max_s: Floats


@dataclass(order=True)
class _Partial:
    """A plan's first stages, in the order of the least that they may become."""

    bound_s: float
    number: int  # makes the order total, and so the answer repeatable
    rest: _Rest = field(compare=False)
    states: tuple[int, ...] = field(compare=False)
    replicas: tuple[int, ...] = field(compare=False)
    recompute: tuple[bool, ...] = field(compare=False)
    sum_s: float = field(compare=False)
    max_s: float = field(compare=False)
    links: _Links = field(compare=False)
    ways: _Ways | None = field(compare=False, default=None)  # to go on, once they were looked at

    @property
    def rank(self) -> int:
        """The first rank of the next stage."""
        return sum(self.replicas)


@dataclass(frozen=True)
class _Links:
    """What is known of the links of a plan's first stages.

    Attributes:
        loads: transfers among these stages, and their all-reduces.
        scale: what a rank's load counts for in its stage's part of the maximum.
        end_s: what is added to it.
        holders: live values, and the last stage that has each.
    """

    loads: Loads
    scale: Floats
    end_s: Floats
    holders: dict[int, int]


@dataclass
class _Ways:
    """Next stages by increasing bound, and how many of them were taken."""

    bounds_s: Floats
    replicas: Integers
    columns: Integers
    taken: int = 0


class HierarchySearch:
    """Finds the fastest plan on ranks that are not equally far apart."""

    def __init__(self, question: Question) -> None:
        self.space, self.topology, self.objective = question.space, question.topology, question.objective
        self.gpus, self.memory_bytes, self._question = question.gpus, question.memory_bytes, question
        self._places = Places(question.topology, _most_replicas(question))
        self._bounds = [stage_bounds(question, state, self._places) for state in range(len(question.space) - 1)]

    @staticmethod
    def states_that_fit(question: Question) -> int:
        """How many states a space may have for its tables to be of a reasonable size."""
        groups = question.topology.groups
        phases = int(groups[-2]) if len(groups) > 1 else 1
        return int((2 * MOST_ENTRIES / (phases * _most_replicas(question))) ** 0.5)

    def best(self, price: Seconds, known: Path | None) -> Found:
        """The best path by its true price, starting from a known one."""
        best = known
        counts = self._counts()
        roots = [self._rest(gpus) for gpus in counts]
        for rest in roots:
            for path in self._relaxed_paths(rest):
                best = better(best, path, price)
        found = self._best_first(roots, price, best)
        if self.memory_bytes is None or len(counts) == self.gpus:
            return found
        # Not every number of GPUs was tried: what none of them can beat is told without the memory.
        unlimited = HierarchySearch(replace(self._question, memory_bytes=None))._rest(self.gpus)
        return replace(found, bound_s=min(found.bound_s, float(unlimited.sum_s[0, 0] + unlimited.max_s[0, 0])))

    def _counts(self) -> list[int]:
        """Numbers of GPUs that a plan may have in all: what a stage holds depends on how many come after it."""
        if self.memory_bytes is None:
            return [self.gpus]
        if self.gpus <= MOST_COUNTS:
            return list(range(1, self.gpus + 1))
        return sorted({int(count) for count in np.geomspace(1, self.gpus, MOST_COUNTS)} | {self.gpus})

    def _rest(self, gpus: int) -> _Rest:
        """The dynamic programme over (state, rank), for the sum and for the maximum."""
        last = len(self.space) - 1
        sum_s, max_s = np.full((2, last + 1, self.gpus + 1), np.inf)
        ends = slice(gpus, gpus + 1) if self.memory_bytes is not None else slice(0, gpus + 1)
        sum_s[last, ends] = max_s[last, ends] = 0.0
        for state in range(last - 1, -1, -1):
            bounds = self._bounds[state]
            for rank, fits, phase, ranks in self._starts(bounds, gpus):
                others = bounds.others[None, :]
                after = ranks[:, None]
                peaks = np.maximum(bounds.max_s[phase, : len(ranks)], max_s[others, after])
                max_s[state, rank] = np.min(peaks, where=fits, initial=np.inf)
                if isinstance(self.objective, SynchronousModel):
                    sums = bounds.sum_s[phase, : len(ranks)] + sum_s[others, after]
                    sum_s[state, rank] = np.min(sums, where=fits, initial=np.inf)
                else:
                    sum_s[state, rank] = 0.0
        return _Rest(gpus, sum_s, max_s)

    def _starts(
        self, bounds: StageBounds, gpus: int
    ) -> Iterator[tuple[int, NDArray[np.bool_], int, NDArray[np.int64]]]:
        """For every first rank: which (replicas, stage) fit, its phase, and the ranks after each replica count."""
        for rank in range(gpus):
            replicas = self._places.replicas[: gpus - rank]
            yield rank, self._fits(bounds, gpus, rank, len(replicas)), rank % self._places.phases, rank + replicas

    def _fits(self, bounds: StageBounds, gpus: int, rank: int, counts: int) -> NDArray[np.bool_]:
        """Which (replicas, stage) fit the memory when the plan has so many GPUs in all."""
        if self.memory_bytes is None:
            return np.ones((counts, len(bounds.others)), dtype=bool)
        r = self._places.replicas[:counts, None]
        after = np.maximum(gpus - rank - r, 0)
        if isinstance(self.objective, SynchronousModel):
            return np.asarray(self.objective.in_flight(r, after) <= bounds.most)
        return np.asarray(1 + -(-after // r) <= bounds.most)

    def _relaxed_paths(self, rest: _Rest) -> Iterator[Path]:
        """Paths that are best by the bounds; for a sum and a maximum, along the answers that trade one for the other.

        The maximum of each is the limit for the next, as in the search for a flat cluster.
        """
        if not np.isfinite(rest.max_s[0, 0]):
            return
        if not isinstance(self.objective, SynchronousModel):
            yield self._traced(rest.gpus, rest.max_s, rest.max_s[0, 0])
            return
        limit_s = np.inf
        for _ in range(MOST_COUNTS):
            answer = self._least_sum(rest.gpus, limit_s)
            if answer is None:
                return
            path, peak_s = answer
            yield path
            limit_s = peak_s * (1 - RESOLUTION)

    def _traced(self, gpus: int, max_s: Floats, limit_s: float) -> Path:
        """A path within the limit, with few GPUs."""
        states, replicas, recompute, rank = [0], [], [], 0
        while states[-1] < len(self.space) - 1:
            bounds = self._bounds[states[-1]]
            counts = self._places.replicas[: gpus - rank]
            fits = self._fits(bounds, gpus, rank, len(counts))
            peaks = np.maximum(
                bounds.max_s[rank % self._places.phases, : len(counts)],
                max_s[bounds.others[None, :], (rank + counts)[:, None]],
            )
            row, column = np.argwhere(fits & (peaks <= limit_s))[0]
            states.append(int(bounds.others[column]))
            recompute.append(bool(bounds.recompute[column]))
            replicas.append(int(counts[row]))
            rank += int(counts[row])
        return Path(tuple(states), tuple(replicas), float(limit_s), tuple(recompute))

    def _least_sum(self, gpus: int, limit_s: float) -> tuple[Path, float] | None:
        """The path of least sum whose stages keep the limit, by the bounds; and its largest stage."""
        last = len(self.space) - 1
        sums = np.full((last + 1, self.gpus + 1), np.inf)
        sums[last, slice(gpus, gpus + 1) if self.memory_bytes is not None else slice(0, gpus + 1)] = 0.0
        choice = np.zeros((last, self.gpus + 1, 2), dtype=np.int64)
        for state in range(last - 1, -1, -1):
            bounds = self._bounds[state]
            for rank, fits, phase, ranks in self._starts(bounds, gpus):
                usable = fits & (bounds.max_s[phase, : len(ranks)] <= limit_s)
                totals = bounds.sum_s[phase, : len(ranks)] + sums[bounds.others[None, :], ranks[:, None]]
                totals = np.where(usable, totals, np.inf)
                best = int(np.argmin(totals))
                sums[state, rank] = totals.flat[best]
                choice[state, rank] = np.unravel_index(best, totals.shape)
        if not np.isfinite(sums[0, 0]):
            return None
        states, replicas, recompute, rank, peak_s = [0], [], [], 0, 0.0
        while states[-1] < last:
            bounds, (row, column) = self._bounds[states[-1]], choice[states[-1], rank]
            peak_s = max(peak_s, float(bounds.max_s[rank % self._places.phases, row, column]))
            states.append(int(bounds.others[column]))
            recompute.append(bool(bounds.recompute[column]))
            replicas.append(int(row) + 1)
            rank += int(row) + 1
        return Path(tuple(states), tuple(replicas), float(sums[0, 0]), tuple(recompute)), peak_s

    def _best_first(self, roots: list[_Rest], price: Seconds, best: Path | None) -> Found:
        """Extend the partial plan of the least bound until it is no better than the best plan."""
        ranks = np.zeros(self.topology.gpus)
        nothing = _Links(Loads(self.topology), ranks, ranks, {})
        queue = [
            _Partial(float(rest.sum_s[0, 0] + rest.max_s[0, 0]), -number, rest, (0,), (), (), 0.0, 0.0, nothing)
            for number, rest in enumerate(roots)
        ]
        heapq.heapify(queue)
        last = len(self.space) - 1
        for step in range(MOST_STEPS):
            limit_s = np.inf if best is None else best.seconds * (1 - RESOLUTION)
            if not queue or queue[0].bound_s >= limit_s:
                queue.clear()
                break
            partial = queue[0]
            longer = self._next(partial, limit_s, step)
            if partial.ways is not None and partial.ways.taken < len(partial.ways.bounds_s):
                partial.bound_s = max(partial.bound_s, float(partial.ways.bounds_s[partial.ways.taken]))
                heapq.heapreplace(queue, partial)
            else:
                heapq.heappop(queue)
            if longer is None:
                continue
            if longer.states[-1] == last:
                best = better(best, Path(longer.states, longer.replicas, longer.bound_s, longer.recompute), price)
            elif longer.bound_s < limit_s:
                heapq.heappush(queue, longer)
        known_s = np.inf if best is None else best.seconds
        return Found(best, min(queue[0].bound_s, known_s) if queue else known_s)

    def _next(self, partial: _Partial, limit_s: float, number: int) -> _Partial | None:
        """The partial plan with its most promising stage not taken yet; None when there is none."""
        if partial.ways is None:
            partial.ways = self._ways(partial, limit_s)
        ways = partial.ways
        if ways.taken == len(ways.bounds_s):
            return None
        bound_s, r, column = (each[ways.taken] for each in (ways.bounds_s, ways.replicas, ways.columns))
        ways.taken += 1
        bounds, phase = self._bounds[partial.states[-1]], partial.rank % self._places.phases
        target = int(bounds.others[column])
        links, late_s, busy_s = self._linked(partial, target, int(r))
        sum_s = partial.sum_s + float(bounds.sum_s[phase, r - 1, column]) + late_s
        max_s = max(partial.max_s, float(bounds.max_s[phase, r - 1, column]), busy_s)
        rest, rank = partial.rest, partial.rank + int(r)
        bound_s = max(float(bound_s), sum_s + rest.sum_s[target, rank] + max(max_s, rest.max_s[target, rank]))
        states, replicas = (*partial.states, target), (*partial.replicas, int(r))
        recompute = (*partial.recompute, bool(bounds.recompute[column]))
        return _Partial(bound_s, number, rest, states, replicas, recompute, sum_s, max_s, links)

    def _ways(self, partial: _Partial, limit_s: float) -> _Ways:
        """All stages that may come next and keep the plan below the limit."""
        bounds, rest, rank = self._bounds[partial.states[-1]], partial.rest, partial.rank
        phase, replicas = rank % self._places.phases, self._places.replicas[: max(rest.gpus - rank, 0)]
        others, after = bounds.others[None, :], (rank + replicas)[:, None]
        peaks = np.maximum(bounds.max_s[phase, : len(replicas)], rest.max_s[others, after])
        sums = partial.sum_s + bounds.sum_s[phase, : len(replicas)] + rest.sum_s[others, after]
        totals = sums + np.maximum(peaks, partial.max_s)
        rows, columns = np.nonzero(self._fits(bounds, rest.gpus, rank, len(replicas)) & (totals < limit_s))
        order = np.argsort(totals[rows, columns], kind="stable")
        return _Ways(totals[rows, columns][order], replicas[rows[order]], columns[order])

    def _linked(self, partial: _Partial, target: int, r: int) -> tuple[_Links, float, float]:
        """What the next stage adds to the links: also the seconds of transfers that the bounds do not count yet, and
        the busiest that a link comes to."""
        state, rank, stage = partial.states[-1], partial.rank, len(partial.replicas)
        ranks = range(rank, rank + r)
        links, loads = partial.links, partial.links.loads.copy()
        holders, received = self._exchanged(links.holders, state, target, stage)
        starts = np.cumsum((0, *partial.replicas))
        late_s = 0.0
        for source, exchange in received.items():
            first = int(starts[source])
            theirs = range(first, first + partial.replicas[source])
            late_s += loads.add_transfer(theirs, ranks, exchange) - self._counted_s(theirs, ranks, exchange)
        model = self.objective
        work = self.space.work(state, np.array([target]))
        scale, end_s, times = links.scale.copy(), links.end_s.copy(), 1
        if isinstance(model, SynchronousModel):
            placed = SynchronousModel(self.topology.stage_link(ranks), model.schedule, model.microbatches)
            scale[rank : rank + r] = (-(-model.microbatches // r) - 1) * r
            end_s[rank : rank + r] = float(placed.end_s(work, r)[0])
            times = model.microbatches - 1
            if model.schedule == "naive":
                scale[:], end_s[:], times = 0.0, 0.0, 0
        else:
            scale[rank : rank + r] = 1.0
            late_s = 0.0
            if model == "resource":
                loads.add_ring(ranks, float(work.trainable_bytes[0]))
            else:
                scale[:], times = 0.0, 0  # the bounds of the published models are exact
        own_s = float(np.max(np.maximum(loads.into, loads.out) * scale + end_s))
        busy_s = max(own_s, loads.busiest_shared()[0] * times)
        return _Links(loads, scale, end_s, holders), max(late_s, 0.0), busy_s

    def _counted_s(self, source: range, target: range, exchange: Floats) -> float:
        """What the bounds count for a transfer: half for each end, to the nearest rank outside."""
        places, total = self._places, 0.0
        for path_s, latency_s, ranks in (
            (places.path_right, places.latency_right, source),
            (places.path_left, places.latency_left, target),
        ):
            at = (ranks.start % places.phases, len(ranks) - 1)
            total += (exchange[0] + exchange[1]) * path_s[at] + (exchange[2] + exchange[3]) * latency_s[at]
        return float(total / 2)

    def _exchanged(
        self, holders: dict[int, int], state: int, target: int, stage: int
    ) -> tuple[dict[int, int], dict[int, Floats]]:
        """Who has which live value after the next stage, and what the stage gets from which earlier one."""
        layers = set(self.space.layers(state, target))
        done = set(self.space.layers(0, target))
        traffic = self.space.ledger.traffic
        received: dict[int, Floats] = {}
        after = dict(holders)
        for number, holder in holders.items():
            value = traffic[number]
            if layers.intersection(value.users):
                amounts = value_weights(value.output_bytes, value.gradient_bytes)
                received[holder] = received.get(holder, 0.0) + amounts
                after[number] = stage
        after.update((number, stage) for number, value in enumerate(traffic) if value.producer in layers)
        return {number: by for number, by in after.items() if not done.issuperset(traffic[number].users)}, received


def _most_replicas(question: Question) -> int:
    """More replicas than microbatches would idle."""
    if isinstance(question.objective, SynchronousModel):
        return min(question.gpus, question.objective.microbatches)
    return question.gpus


def better(best: Path | None, path: Path, price: Seconds) -> Path | None:
    """The faster of the two; of equally fast ones the one with fewer GPUs, then fewer stages."""
    seconds = price(path)
    if not np.isfinite(seconds):
        return best
    priced = replace(path, seconds=seconds)
    if best is None or seconds < best.seconds * (1 - RESOLUTION):
        return priced
    if seconds <= best.seconds * (1 + RESOLUTION) and (path.gpus, len(path.replicas)) < (best.gpus, len(best.replicas)):
        return priced
    return best
