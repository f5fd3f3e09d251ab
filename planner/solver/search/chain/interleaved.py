"""Search for interleaved plans: K workers with v chunks each, cut so that the workers' sums are balanced.

The chunks of a worker lie apart, so no walk along the layers is exact. If there are few ways to cut, all are tried.
Otherwise the cuts start from equal parts and move, one or several at a time, as long as that helps.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, islice, pairwise

import numpy as np
from numpy.typing import NDArray

from planner.cost.candidate import StageOptions, whole_stage
from planner.cost.models.interleaved import InterleavedShape, StageSeconds
from planner.cost.network.link import Link, link_of
from planner.cost.setting import Setting
from planner.cost.work import Floats, Integers, Work, joined
from planner.solver.problem.problem import Limits
from planner.solver.problem.result import RESOLUTION, CutPath
from planner.solver.problem.states import Chain
from planner.solver.search.chain.ways import WaysOf, taken

MOST_TRIED = 20_000  # ways to cut for one K
MOST_STATES = 192  # beyond, cuts at some of them only
FEW_GPUS = 16  # up to which every number of workers and copies is tried
_BATCH = 1024
_MOVES = (1, -1, 2, -2, 5, -5)


class InterleavedSearch:
    """Finds fast interleaved plans over the prefixes of the profile's order, by default on the slowest link."""

    def __init__(self, space: Chain, setting: Setting, limits: Limits, link: Link | None = None) -> None:
        self.setting, self.limits, self.link = setting, limits, link or link_of(setting.cluster)
        # The tables of all stages grow with the square of the states.
        self.sampled = len(space) > MOST_STATES
        self._states = space.spread(min(len(space), MOST_STATES))
        self._space = space.only(self._states) if self.sampled else space
        self._ways = WaysOf(self._space, limits)
        firsts, others, self._work = self._space.every_stage
        self._row = np.zeros((len(self._space), len(self._space)), dtype=np.int64)  # by first and last state
        self._row[firsts, others] = np.arange(len(firsts))
        rows = [self._row[state, state + 1 :] for state in range(len(self._space) - 1)]
        held = [self._ways.plainest_footprint(i, others[own], taken(self._work, own)) for i, own in enumerate(rows)]
        self._footprint = joined(held, [len(own) for own in rows])

    def shapes(self) -> list[InterleavedShape]:
        """Return the numbers of workers and copies worth a try, the most promising first."""
        setting, gpus = self.setting, self.limits.gpus
        chunks, microbatches = setting.chunks, setting.microbatches
        longest = self.limits.most_stages(self._space, gpus * chunks) // chunks
        models = [
            InterleavedShape(setting.schedule, self.link, workers, chunks, copies, microbatches)
            for workers in range(2, longest + 1)
            for copies in range(1, gpus // workers + 1)
            if microbatches // copies >= workers
            and (gpus <= FEW_GPUS or copies == min(gpus // workers, microbatches // workers))
        ]
        return sorted(models, key=lambda model: (self.bound_s(model), model.workers * model.replicas))

    def bound_s(self, model: InterleavedShape) -> float:
        """Return seconds that no plan of this shape is below: the mean of what the workers compute."""
        everything = taken(self._work, self._row[0, -1:])
        once_s = float(everything.forward_s[0] + everything.backward_s[0])
        accumulate_s = (model.units - 1) * float(everything.accumulate_s[0])
        update_s = float(everything.update_s[0]) / (model.replicas if self._ways.shards else 1)
        return (model.units * once_s + accumulate_s + update_s) / model.workers

    def best(self) -> tuple[list[CutPath], float]:
        """Return the best plan of each shape, fastest first and none if none fit, and seconds that no plan is below."""
        found: list[CutPath] = []
        bounds: list[float] = []
        fastest = np.inf
        for model in self.shapes():
            if self.bound_s(model) >= fastest * (1 - RESOLUTION):
                break  # the bounds of all that follow are no lower
            if found and self.limits.clock.passed:
                bounds.append(self.bound_s(model))  # the least of those that follow
                break
            path, exact = self.within(model)
            if path is not None:
                found.append(path)
                fastest = min(fastest, path.seconds)
            if not exact or self.sampled:
                bounds.append(self.bound_s(model))
        found.sort(key=lambda path: (path.seconds, sum(path.replicas)))
        return found, min([*bounds, fastest])

    def within(self, model: InterleavedShape) -> tuple[CutPath | None, bool]:
        """Return the best plan of this shape if any fits, and whether no other one over the space is better.

        Either all stages are sharded or none are. A mixture may be better.
        """
        may = model.replicas > 1 and self._ways.shards
        tries = [True] if may and self._ways.always_shards else [False, True] if may else [False]
        answers = [self._within(model, sharded) for sharded in tries]
        found = [path for path, _ in answers if path is not None]
        exact = all(exact for _, exact in answers) and len(tries) == 1
        return min(found, key=lambda path: path.seconds, default=None), exact

    def _within(self, model: InterleavedShape, sharded: bool) -> tuple[CutPath | None, bool]:
        stages, last = model.workers * model.chunks, len(self._space) - 1
        # Equal parts win a tie: others wait less for stages that differ less, which the cost does not see.
        best = self._least(model, sharded, self._equal_parts(stages, last)[None])
        if exact := math.comb(last - 1, stages - 1) <= MOST_TRIED:
            ways = combinations(range(1, last), stages - 1)
            while batch := list(islice(ways, _BATCH)):
                found = self._least(model, sharded, np.array([(0, *inner, last) for inner in batch]))
                best, exact = min(best, found, key=lambda item: item[:2]), exact and found[3]
        else:
            while (found := self._least(model, sharded, np.array(list(_moved(best[2])))))[:2] < best[:2]:
                best = found
        cuts = best[2]
        over, seconds, again, _ = self._evaluate(model, sharded, cuts[None])
        if over[0] > 0:
            return None, exact
        states = tuple(int(self._states[cut]) for cut in cuts)
        # All layers of a stage recompute at once, unless the rule says otherwise.
        groups = [
            self._ways.groups(i, j, 0) or whole_stage(self._space.layers(i, j), bool(each))
            for (i, j), each in zip(pairwise(cuts.tolist()), again[0], strict=True)
        ]
        options = tuple(StageOptions(model.replicas, sharded, each) for each in groups)
        return CutPath(states, options, float(seconds[0])), exact

    def _least(self, model: InterleavedShape, sharded: bool, cuts: Integers) -> tuple[float, float, Integers, bool]:
        over, seconds, _, settled = self._evaluate(model, sharded, cuts)
        choice = int(np.lexsort((seconds, over))[0])
        return float(over[choice]), float(seconds[choice]), cuts[choice], settled

    def _equal_parts(self, stages: int, last: int) -> Integers:
        done = self._space.compute_s
        cuts = np.searchsorted(done, done[-1] * np.arange(stages + 1) / stages)
        cuts[0], cuts[-1] = 0, last
        steps = np.arange(stages + 1)
        # Strictly increasing from the left, then from the right.
        cuts = np.maximum.accumulate(cuts - steps) + steps
        return np.asarray(np.minimum(cuts, last - steps[::-1]))

    def _evaluate(
        self, model: InterleavedShape, sharded: bool, cuts: Integers
    ) -> tuple[Floats, Floats, NDArray[np.bool_], bool]:
        """Return per row of cuts: bytes over the memory, seconds, recomputing stages, and if that choice is best."""
        rows = self._row[cuts[:, :-1], cuts[:, 1:]]
        work, footprint = taken(self._work, rows), taken(self._footprint, rows).divided(model.microbatches)
        footprint = self._space.layer_costs.replicated(footprint, model.replicas)
        if sharded:
            work, footprint = work.shared_out(), footprint.shared_out(model.replicas)
        again = np.full(work.forward_s.shape, self._ways.recomputes)
        settled = True
        over = np.zeros(len(cuts))
        if self.limits.memory_bytes is not None:
            in_flight = np.array(model.in_flight())
            plain = footprint.total_bytes(in_flight, 1)
            lean = footprint.recomputed().total_bytes(in_flight, 1)
            if self.limits.rules.recompute == "auto":
                again, settled = self._choose(model, plain, lean, work)
            by_rule = self._ways.recomputes  # then the footprint is that of stages that recompute
            held = model.total(np.where(again & (not by_rule), lean, plain))
            over = np.maximum(held - self.limits.memory_bytes, 0.0).sum(axis=-1)
        work = replace(work, recompute_s=np.where(again, work.forward_s, 0.0))
        busy_s = np.stack(list(model.worker_s(StageSeconds.of(work, model)).values()))
        return over, np.asarray(busy_s.max(axis=(0, -1))), again, settled

    def _choose(
        self, model: InterleavedShape, plain: Floats, lean: Floats, work: Work
    ) -> tuple[NDArray[np.bool_], bool]:
        """Choose the chunks that each worker recomputes: the quickest choice that fits the memory; all if none fits.

        A worker's first chunk also delays the workers behind it. If leaving it out costs the worker itself more time,
        the choice may not be the best one.
        """
        saved, extra = (plain - lean)[:, model.stages], work.forward_s[:, model.stages]  # [rows, chunks, workers]
        excess = model.total(plain) - float(self.limits.memory_bytes or 0)
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


def _moved(cuts: Integers) -> Iterator[Integers]:
    for number in range(1, len(cuts) - 1):
        for step in _MOVES:
            for many in (slice(number, number + 1), slice(number, len(cuts) - 1)):
                moved = cuts.copy()
                moved[many] += step
                if np.all(np.diff(moved) > 0):
                    yield moved
