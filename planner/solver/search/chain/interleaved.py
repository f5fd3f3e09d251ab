"""Search for interleaved plans: K workers with v chunks each, cut so that the workers' sums are
balanced.

The chunks of a worker lie apart, so no walk along the layers is exact. If there are few ways to
cut, all are tried. Otherwise the cuts start from equal parts and move, one or several at a time, as
long as that helps.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, islice, pairwise

import numpy as np
from numpy.typing import NDArray

from planner.cost.candidate import StageOptions, whole_stage
from planner.cost.models.interleaved import InterleavedShape, StageSeconds
from planner.cost.network.link import Link, link_of
from planner.cost.setting import Setting
from planner.cost.work import Floats, Footprint, Integers, Work, joined
from planner.formats.files import replace
from planner.solver.problem.problem import Limits
from planner.solver.problem.result import RESOLUTION, CutPath
from planner.solver.problem.states import Chain
from planner.solver.search.chain.variants import StageVariants, Variants, taken
from planner.stages.sharding import UNSHARDED


class InterleavedSearch:
    """Finds fast interleaved plans over the prefixes of the profile's order, by default on the
    slowest link.

    Attributes:
        sampled: whether plans cut at some of the states only.
    """

    def __init__(
        self, space: Chain, setting: Setting, limits: Limits, link: Link | None = None
    ) -> None:
        self.setting = setting
        self.limits = limits
        self.link = link or link_of(setting.cluster)

        # The tables of all stages grow with the square of the states.
        most_states = limits.tuning.interleaved.most_states
        self.sampled = len(space) > most_states
        self._states = space.spread(min(len(space), most_states))
        self._stages = _Stages(space.only(self._states) if self.sampled else space, limits)

    def shapes(self) -> list[InterleavedShape]:
        """Return the numbers of workers and copies worth a try, the most promising first."""
        chunks = self.setting.chunks
        gpus = self.limits.gpus
        longest = self.limits.most_stages(self._stages.space, gpus * chunks) // chunks
        shapes = [
            self._shape(workers, copies)
            for workers in range(2, longest + 1)
            for copies in range(1, gpus // workers + 1)
            if self._worth_a_try(workers, copies)
        ]

        return sorted(
            shapes, key=lambda shape: (self.bound_s(shape), shape.workers * shape.replicas)
        )

    def bound_s(self, shape: InterleavedShape) -> float:
        """Return seconds that no plan of this shape is below: the mean of what the workers
        compute.
        """
        everything = self._stages.everything
        once_s = float(everything.forward_s[0] + everything.backward_s[0])
        accumulate_s = (shape.units - 1) * float(everything.accumulate_s[0])
        update_s = float(everything.update_s[0])
        if self._stages.variants.shards:
            update_s /= shape.replicas
        return (shape.units * once_s + accumulate_s + update_s) / shape.workers

    def best(self) -> tuple[list[CutPath], float]:
        """Return the best plan of each shape, fastest first and none if none fit, and seconds that
        no plan is below.
        """
        paths: list[CutPath] = []
        bounds: list[float] = []
        fastest_s = np.inf
        for shape in self.shapes():
            bound_s = self.bound_s(shape)
            if bound_s >= fastest_s * (1 - RESOLUTION):
                break  # the bounds of all that follow are no lower
            if paths and self.limits.clock.passed:
                bounds.append(bound_s)  # the least of those that follow
                break

            path, exact = self.within(shape)
            if path is not None:
                paths.append(path)
                fastest_s = min(fastest_s, path.seconds)

            if not exact or self.sampled:
                bounds.append(bound_s)

        paths.sort(key=lambda path: (path.seconds, sum(path.replicas)))
        return paths, min([*bounds, fastest_s])

    def within(self, shape: InterleavedShape) -> tuple[CutPath | None, bool]:
        """Return the best plan of this shape if any fits, and whether no other one over the space
        is better.

        Either all stages are sharded or none are. A mixture may be better.
        """
        variants = self._stages.variants
        sharding = [False]
        if shape.replicas > 1 and variants.shards:
            if variants.always_shards:
                sharding = [True]
            else:
                sharding = [False, True]

        paths: list[CutPath] = []
        all_exact = True
        for sharded in sharding:
            cuts, exact = self._best_cuts(_Pricing(self._stages, shape, sharded))
            all_exact &= exact
            if cuts.over_bytes == 0:
                paths.append(self._path(cuts, shape, sharded))

        best = min(paths, key=lambda path: path.seconds, default=None)
        return best, all_exact and len(sharding) == 1

    def _worth_a_try(self, workers: int, copies: int) -> bool:
        microbatches = self.setting.microbatches
        gpus = self.limits.gpus
        if microbatches // copies < workers:
            return False

        few = gpus <= self.limits.tuning.interleaved.most_exhaustive_gpus
        return few or copies == min(gpus // workers, microbatches // workers)

    def _shape(self, workers: int, copies: int) -> InterleavedShape:
        setting = self.setting
        return InterleavedShape(
            setting.schedule,
            self.link,
            workers,
            setting.chunks,
            copies,
            setting.microbatches,
        )

    def _best_cuts(self, pricing: "_Pricing") -> tuple["_Cuts", bool]:
        """Return the best cuts that were found, and whether no others are better."""
        stages = pricing.shape.workers * pricing.shape.chunks
        last = len(self._stages.space) - 1
        tuning = self.limits.tuning

        # 1. Equal parts win a tie: others wait less for stages that differ less, which the cost
        #    does not see.
        equal = _equal_parts(self._stages.space, stages)
        best = pricing.least(equal[None])

        # 2. Many ways to cut are not all tried.
        if math.comb(last - 1, stages - 1) > tuning.interleaved.most_tried:
            return _descended(pricing, best), False

        # 3. Few are.
        exact = True
        inner = combinations(range(1, last), stages - 1)
        while batch := list(islice(inner, tuning.arrays.batch_cuts)):
            rows = [(0, *cuts, last) for cuts in batch]
            least = pricing.least(np.array(rows))
            exact &= least.settled
            if least.key < best.key:
                best = least

        return best, exact

    def _path(self, cuts: "_Cuts", shape: InterleavedShape, sharded: bool) -> CutPath:
        """Return the plan of the cuts. All layers of a stage recompute at once, unless the rule
        says otherwise.
        """
        space = self._stages.space
        sharding = UNSHARDED
        if sharded:
            sharding = UNSHARDED.of_optimizer_alone()

        options = []
        ends_of_stages = pairwise(cuts.states.tolist())
        for ends, recomputes in zip(ends_of_stages, cuts.recomputes, strict=True):
            groups = self._stages.variants.groups(*ends, 0)
            if not groups:
                groups = whole_stage(space.layers(*ends), bool(recomputes))
            stage = StageOptions(shape.replicas, recompute=groups)
            options.append(stage.with_sharding(sharding))

        states = self._states[cuts.states].tolist()
        return CutPath(tuple(states), tuple(options), cuts.seconds)


@dataclass(frozen=True)
class _Stages:
    """All stages of a space, a row each, in the plainest way to run them."""

    space: Chain
    limits: Limits

    @cached_property
    def variants(self) -> StageVariants:
        return StageVariants(self.space, self.limits)

    @cached_property
    def row(self) -> Integers:
        """The row of the stage from a first to a last state, by both."""
        states = len(self.space)
        rows = np.zeros((states, states), dtype=np.int64)
        first, end = np.triu_indices(states, 1)
        rows[first, end] = np.arange(len(first))
        return rows

    @cached_property
    def work(self) -> Work:
        return joined([each.work for each in self._by_first_state], self._counts)

    @cached_property
    def footprint(self) -> Footprint:
        return joined([each.footprint for each in self._by_first_state], self._counts)

    @cached_property
    def _by_first_state(self) -> list[Variants]:
        firsts = range(len(self.space) - 1)
        return [self.variants.plainest(first, self.space.after(first)) for first in firsts]

    @property
    def _counts(self) -> list[int]:
        return [len(each) for each in self._by_first_state]

    @property
    def everything(self) -> Work:
        """The work of all layers as one stage."""
        return taken(self.work, self.row[0, -1:])


@dataclass(frozen=True)
class _Cuts:
    """Cuts of a plan, and what they cost.

    Attributes:
        over_bytes: by which the workers exceed their memory, in all.
        states: at which stages begin and end.
        recomputes: which stages do.
        settled: whether no other choice of what recomputes may be better.
    """

    over_bytes: float
    seconds: float
    states: Integers
    recomputes: NDArray[np.bool_]
    settled: bool

    @property
    def key(self) -> tuple[float, float]:
        """Orders cuts: what fits the memory comes first, then what is faster."""
        return self.over_bytes, self.seconds


@dataclass(frozen=True)
class _Pricing:
    """Prices cuts of one shape, a row for each plan."""

    stages: _Stages
    shape: InterleavedShape
    sharded: bool

    def least(self, cuts: Integers) -> _Cuts:
        """Return the best of the rows; `settled` says so of all of them."""
        rows = self.stages.row[cuts[:, :-1], cuts[:, 1:]]
        work = self._work(rows)
        over_bytes, recomputes, settled = self._within_memory(rows, work)

        work = replace(work, recompute_s=np.where(recomputes, work.forward_s, 0.0))
        busy_s = self.shape.worker_s(StageSeconds.of(work, self.shape))
        seconds = np.stack(list(busy_s.values())).max(axis=(0, -1))
        pick = int(np.lexsort((seconds, over_bytes))[0])
        return _Cuts(
            float(over_bytes[pick]), float(seconds[pick]), cuts[pick], recomputes[pick], settled
        )

    def _work(self, rows: Integers) -> Work:
        work = taken(self.stages.work, rows)
        if not self.sharded:
            return work
        return work.shared_out()

    def _footprint(self, rows: Integers) -> Footprint:
        footprint = taken(self.stages.footprint, rows).divided(self.shape.microbatches)
        footprint = self.stages.space.layer_costs.replicated(footprint, self.shape.replicas)
        if not self.sharded:
            return footprint
        return footprint.shared_out(self.shape.replicas)

    def _within_memory(self, rows: Integers, work: Work) -> tuple[Floats, NDArray[np.bool_], bool]:
        """Return by row the bytes over the memory and the stages that recompute, and whether that
        choice is settled.
        """
        limits = self.stages.limits
        by_rule = self.stages.variants.recomputes
        recomputes = np.full(work.forward_s.shape, by_rule)
        if limits.memory_bytes is None:
            return np.zeros(len(rows)), recomputes, True

        # 1. What each stage holds as it is, and if it recomputes.
        footprint = self._footprint(rows)
        in_flight = np.array(self.shape.in_flight())
        plain = footprint.total_bytes(in_flight, 1)
        lean = footprint.recomputed().total_bytes(in_flight, 1)

        # 2. Which stages do.
        settled = True
        if limits.rules.recompute == "auto":
            recomputes, settled = self._choose(plain, lean, work, limits.memory_bytes)

        # 3. What workers lack. By the rule, the footprint is that of stages that recompute.
        held = plain
        if not by_rule:
            held = np.where(recomputes, lean, plain)
        excess_bytes = self.shape.total(held) - limits.memory_bytes
        over_bytes = np.maximum(excess_bytes, 0.0)
        return over_bytes.sum(axis=-1), recomputes, settled

    def _choose(
        self,
        plain: Floats,
        lean: Floats,
        work: Work,
        memory_bytes: int,
    ) -> tuple[NDArray[np.bool_], bool]:
        """Choose the chunks that each worker recomputes: the quickest choice that fits the memory;
        all if none fits.

        A worker's first chunk also delays the workers behind it. If leaving it out costs the worker
        itself more time, the choice may not be the best one.
        """
        # 1. Every choice of chunks, with what it saves and what it costs; [rows, chunks, workers].
        shape = self.shape
        masks = np.arange(2**shape.chunks)[:, None]
        choices = (masks >> np.arange(shape.chunks)) & 1
        saved = (plain - lean)[:, shape.stages]
        extra_s = work.forward_s[:, shape.stages]

        excess = shape.total(plain) - float(memory_bytes)
        saved_by_choice = np.einsum("oc,ncw->now", choices, saved)
        enough = saved_by_choice >= excess[:, None]
        extra_by_choice_s = np.einsum("oc,ncw->now", choices, extra_s)
        cost_s = np.where(enough, extra_by_choice_s, np.inf)

        # 2. The quickest; ties go to fewer chunks, and then to later ones.
        order = np.lexsort((choices[:, 0], choices.sum(axis=1)))
        pick = order[cost_s[:, order].argmin(axis=1)]
        least_s = cost_s.min(axis=1)
        fits = np.isfinite(least_s)
        pick = np.where(fits, pick, len(choices) - 1)

        # 3. Whether a choice without the first chunk may be better for those behind.
        keeps_first = choices[:, 0] == 0
        without_s = cost_s[:, keeps_first].min(axis=1)
        may_be_better = fits & np.isfinite(without_s) & (without_s > least_s)

        recomputes = np.zeros(plain.shape, dtype=bool)
        recomputes[:, shape.stages] = choices[pick].transpose(0, 2, 1)
        return recomputes, not np.any(may_be_better)


def _descended(pricing: _Pricing, start: _Cuts) -> _Cuts:
    """Move cuts as long as that helps."""
    moves = pricing.stages.limits.tuning.interleaved.moves
    best = start
    while True:
        least = pricing.least(np.array(list(_moved(best.states, moves))))
        if least.key >= best.key:
            return best
        best = least


def _equal_parts(space: Chain, stages: int) -> Integers:
    """Return cuts into parts that compute for about as long."""
    last = len(space) - 1
    done_s = space.compute_s
    cuts = np.searchsorted(done_s, done_s[-1] * np.arange(stages + 1) / stages)
    cuts[0] = 0
    cuts[-1] = last

    # Strictly increasing from the left, then from the right.
    steps = np.arange(stages + 1)
    cuts = np.maximum.accumulate(cuts - steps) + steps
    return np.asarray(np.minimum(cuts, last - steps[::-1]))


def _moved(cuts: Integers, moves: Sequence[int]) -> Iterator[Integers]:
    """Yield the cuts with one moved, or with all from one on."""
    for number in range(1, len(cuts) - 1):
        for step in moves:
            for end in (number + 1, len(cuts) - 1):
                moved = cuts.copy()
                moved[number:end] += step
                if np.all(np.diff(moved) > 0):
                    yield moved
