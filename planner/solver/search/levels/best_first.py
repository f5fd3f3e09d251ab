"""Best-first search (A*) over plans for clusters of several levels, stage by stage from the first rank on.

A partial plan costs at least what its stages cost, with the true loads on their links as far as they are known, and
what the relaxed programme (`relaxed`) says of the rest. The partial plan with the least bound is extended first. Once
that bound is no better than the best plan found, that plan is optimal. The relaxed programme also gives plans to start
with; the search closes the gap between them and its bound, as far as the work allowed permits.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace

import numpy as np

from planner.cost.candidate import StageOptions
from planner.cost.models.synchronous import SynchronousModel
from planner.cost.network.topology import Loads
from planner.cost.work import Floats, Integers, Work
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import RESOLUTION, BoundedPath, CutPath
from planner.solver.problem.states import StateSpace
from planner.solver.search.chain.ways import taken
from planner.solver.search.levels.relaxed import Relaxed, Rest, Seconds

MOST_ENTRIES = 12_000_000  # in the tables of bounds
MOST_COUNTS = 16  # numbers of GPUs that are tried one by one where memory is limited
MOST_STEPS = 3_000  # partial plans to extend: a number, not a time, so that the same problem has the same answer


@dataclass(order=True)
class _Partial:
    """A plan's first stages, ordered by the bound of the whole plan."""

    bound_s: float
    number: int  # makes the order total, so that the answer is repeatable
    rest: Rest = field(compare=False)
    states: tuple[int, ...] = field(compare=False)
    options: tuple[StageOptions, ...] = field(compare=False)
    sum_s: float = field(compare=False)
    max_s: float = field(compare=False)
    links: _Links = field(compare=False)
    # Bounds, replicas and ways of the next stages by increasing bound, once they are known; and how many are taken.
    following: tuple[Floats, Integers, Integers] | None = field(compare=False, default=None)
    taken: int = field(compare=False, default=0)

    @property
    def rank(self) -> int:
        """The first rank of the next stage."""
        return sum(each.replicas for each in self.options)


@dataclass(frozen=True)
class _Links:
    """What is known of the links of a plan's first stages.

    Attributes:
        loads: messages among these stages, and their all-reduces.
        scale: per rank, how often its load counts in its stage's part of the maximum.
        end_s: per rank, what is added to that.
        holders: the last stage that has each live value.
    """

    loads: Loads
    scale: Floats
    end_s: Floats
    holders: dict[int, int]


class HierarchySearch:
    """Finds the fastest plan on ranks that are not equally far apart."""

    def __init__(self, problem: Problem, space: StateSpace) -> None:
        self.gpus, self.counts_gpus = problem.cluster.gpus, problem.limits.counts_gpus
        self._problem, self._numbering, self._deadline = problem, problem.numbering, problem.deadline
        self._relaxed, self.space, self.topology = Relaxed(problem, space), space, problem.topology
        self.objective = self._relaxed.objective

    @staticmethod
    def states_that_fit(problem: Problem) -> int:
        """Return how many states a space may have so that its tables have a reasonable size."""
        groups = problem.topology.groups
        phases = int(groups[-2]) if len(groups) > 1 else 1
        return int((2 * MOST_ENTRIES / (phases * problem.cluster.gpus)) ** 0.5)

    def best(self, price: Seconds, known: CutPath | None) -> BoundedPath:
        """Return the best path by its true price, starting from a known one."""
        best = known
        # Where memory is limited, a stage must know how many GPUs come after it, hence how many there are in all.
        counts = self._counts()
        roots = [self._relaxed.rest(gpus) for gpus in counts]
        for rest in roots:
            for path in self._relaxed.paths(rest):
                best = better(best, path, price)
        found = self._extended(roots, price, best)
        if not self.counts_gpus or len(counts) == self.gpus:
            return found
        # Not every number of GPUs was tried, so the bound must hold for all of them: it leaves these limits out.
        without = self._problem.with_cluster(self._problem.cluster.model_copy(update={"memory_bytes": None}))
        without = replace(without, rules=replace(without.rules, max_staleness=None))
        unlimited = Relaxed(without, self.space).rest(self.gpus)
        return replace(found, bound_s=min(found.bound_s, float(unlimited.sum_s[0, 0] + unlimited.max_s[0, 0])))

    def _counts(self) -> list[int]:
        """Return numbers of GPUs that a plan may have in all: what a stage holds depends on the GPUs after it."""
        if not self.counts_gpus:
            return [self.gpus]
        if self.gpus <= MOST_COUNTS:
            return list(range(1, self.gpus + 1))
        return sorted({int(count) for count in np.geomspace(1, self.gpus, MOST_COUNTS)} | {self.gpus})

    def _extended(self, roots: list[Rest], price: Seconds, best: CutPath | None) -> BoundedPath:
        """Extend the partial plan with the least bound, until that is no better than the best plan."""
        ranks = np.zeros(self.topology.gpus)
        nothing = _Links(Loads(self.topology), ranks, ranks, {})
        queue = [
            _Partial(float(rest.sum_s[0, 0] + rest.max_s[0, 0]), -number, rest, (0,), (), 0.0, 0.0, nothing)
            for number, rest in enumerate(roots)
        ]
        heapq.heapify(queue)
        last = len(self.space) - 1
        for step in range(MOST_STEPS):
            limit_s = np.inf if best is None else best.seconds * (1 - RESOLUTION)
            if not queue or queue[0].bound_s >= limit_s:
                queue.clear()
                break
            if self._deadline.passed:
                break
            partial = queue[0]
            if partial.following is None:
                partial.following = self._following(partial, limit_s)
            bounds_s = partial.following[0]
            longer = self._longer(partial, step) if len(bounds_s) else None
            if partial.taken < len(bounds_s):
                # The partial plan stays in the queue for its next best stage, which has a larger bound.
                partial.bound_s = max(partial.bound_s, float(bounds_s[partial.taken]))
                heapq.heapreplace(queue, partial)
            else:
                heapq.heappop(queue)
            if longer is None:
                continue
            if longer.states[-1] == last:
                best = better(best, CutPath(longer.states, longer.options, longer.bound_s), price)
            elif longer.bound_s < limit_s:
                heapq.heappush(queue, longer)
        known_s = np.inf if best is None else best.seconds
        return BoundedPath(best, min(queue[0].bound_s, known_s) if queue else known_s, self.space)

    def _longer(self, partial: _Partial, number: int) -> _Partial | None:
        """Return the partial plan with its most promising stage that is not taken yet; None if it is not allowed."""
        assert partial.following is not None
        bound_s, r, column = (each[partial.taken].item() for each in partial.following)
        partial.taken += 1
        bounds, phase = self._relaxed.bounds[partial.states[-1]], partial.rank % self._relaxed.places.phases
        target = int(bounds.others[column])
        if not self._numbering.allows_stage(self.space, len(partial.options), partial.states[-1], target):
            return None
        links, late_s, busy_s = self._linked(partial, target, r, taken(bounds.ways.work, np.array([column])))
        sum_s = partial.sum_s + float(bounds.sum_s[phase, r - 1, column]) + late_s
        max_s = max(partial.max_s, float(bounds.max_s[phase, r - 1, column]), busy_s)
        rest, rank = partial.rest, partial.rank + r
        bound_s = max(bound_s, sum_s + rest.sum_s[target, rank] + max(max_s, rest.max_s[target, rank]))
        states = *partial.states, target
        options = *partial.options, bounds.ways.options(column, r)
        return _Partial(bound_s, number, rest, states, options, sum_s, max_s, links)

    def _following(self, partial: _Partial, limit_s: float) -> tuple[Floats, Integers, Integers]:
        """Return all stages that may come next and keep the plan below the limit."""
        bounds, rest, rank = self._relaxed.bounds[partial.states[-1]], partial.rest, partial.rank
        phase, replicas = rank % self._relaxed.places.phases, self._relaxed.places.replicas[: max(rest.gpus - rank, 0)]
        others, after = bounds.others[None, :], (rank + replicas)[:, None]
        peaks = np.maximum(bounds.max_s[phase, : len(replicas)], rest.max_s[others, after])
        sums = partial.sum_s + bounds.sum_s[phase, : len(replicas)] + rest.sum_s[others, after]
        totals = sums + np.maximum(peaks, partial.max_s)
        rows, columns = np.nonzero(self._relaxed.fits(bounds, rest.gpus, rank, len(replicas)) & (totals < limit_s))
        order = np.argsort(totals[rows, columns], kind="stable")
        return totals[rows, columns][order], replicas[rows[order]], columns[order]

    def _linked(self, partial: _Partial, target: int, r: int, work: Work) -> tuple[_Links, float, float]:
        """Return the links with the next stage, the seconds of messages that bounds leave out, and the busiest link."""
        state, rank, stage = partial.states[-1], partial.rank, len(partial.options)
        ranks = range(rank, rank + r)
        links, loads = partial.links, partial.links.loads.copy()
        holders, received = self._exchanged(links.holders, state, target, stage)
        starts = np.cumsum((0, *(each.replicas for each in partial.options)))
        late_s = 0.0
        for source, exchange in received.items():
            first = int(starts[source])
            theirs = range(first, first + partial.options[source].replicas)
            # The bounds counted the nearest rank outside; the true distance can only be longer.
            late_s += loads.add_transfer(theirs, ranks, exchange) - self._counted_s(theirs, ranks, exchange)
        model = self.objective
        scale, end_s, times = links.scale.copy(), links.end_s.copy(), 1
        if isinstance(model, SynchronousModel):
            placed = SynchronousModel(self.topology.stage_link(ranks), model.schedule, model.microbatches)
            scale[rank : rank + r] = (-(-model.microbatches // r) - 1) * r
            end_s[rank : rank + r] = float(placed.end_s(work, r)[0])
            times = model.microbatches - 1
            if not model.schedule.pipelined:
                scale[:], end_s[:], times = 0.0, 0.0, 0
        else:
            scale[rank : rank + r] = 1.0
            late_s = 0.0
            if model == "resource":
                loads.add_ring(ranks, float(work.trainable_bytes[0]))
            else:
                scale[:], times = 0.0, 0  # the published models know no other links, so their bounds are exact
        own_s = float(np.max(np.maximum(loads.into, loads.out) * scale + end_s))
        busy_s = max(own_s, loads.busiest_shared()[0] * times)
        return _Links(loads, scale, end_s, holders), max(late_s, 0.0), busy_s

    def _counted_s(self, source: range, target: range, exchange: Floats) -> float:
        """Return what the bounds count for a message: half for each end, to the nearest rank outside."""
        places, total = self._relaxed.places, 0.0
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
        """Return the holders of live values after the next stage, and what it receives from which earlier stage."""
        layers = set(self.space.layers(state, target))
        done = set(self.space.layers(0, target))
        traffic = self.space.layer_costs.traffic
        received: dict[int, Floats] = {}
        after = dict(holders)
        for number, holder in holders.items():
            value = traffic[number]
            if layers.intersection(value.users):
                received[holder] = received.get(holder, 0.0) + value.amounts
                after[number] = stage
        after.update((number, stage) for number, value in enumerate(traffic) if value.producer in layers)
        return {number: by for number, by in after.items() if not done.issuperset(traffic[number].users)}, received


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
