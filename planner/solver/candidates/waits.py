"""Of the plans that the search proposes, the one that is fastest once its waits are counted.

The search minimises the busy time of the busiest resource. What workers wait for messages and for each other shows only
when the schedule is simulated, and then a plan on fewer GPUs, or one without replicas behind its first stage, can win.
So where the search's plan waits, others are simulated too: data parallelism, the best plans whose later stages have one
replica each, the best plans on ever fewer GPUs, and on few GPUs those for slower links and less memory, until none of
them could win even without waiting. What is proposed for up to `DENSE` GPUs is proposed for more GPUs as well, so that
more of them never make the answer worse; for links and memory, which have no smallest step, that holds mostly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import Candidate, LayerCosts
from planner.cost.link import Link, link_of
from planner.cost.rounding import SLACK
from planner.cost.stage_options import RecomputeRule
from planner.cost.work import IMPOSSIBLE, Integers
from planner.formats.cluster import Cluster
from planner.solver.bounds.registry import bounds_for
from planner.solver.candidates.pipelines import MOST_WORKERS, too_large
from planner.solver.candidates.trials import SETTLED, Priced, Trials
from planner.solver.chain.search import RESOLUTION, Path, Search, stages_along
from planner.solver.chain.states import StateSpace

BestOn = Callable[[int, float], Priced | None]

DENSE = 16  # up to so many GPUs each number is tried; simulating takes the longer, the more there are
NEAR = 4  # above, so many numbers are tried from the cluster's down, and some below
# Plans for slower links and less memory than there are: factors between them, how many, and for how many GPUs
SLOWER, SLOWER_STEPS = 2**0.5, 2
SLOWED = 1.15  # how much worse than the best a plan's bound may be on the slower link, to be proposed
LEANER, LEANER_STEPS = 1.15, 4
FEW = 8
LENIENT = 2  # times that of a single stage: a first plan that seems farther from it is not deepened


class FrontSearch(Search):
    """Plans in which only the first stage has replicas."""

    def suffixes(
        self, state: int, others: Integers, target_s: float, after: Integers
    ) -> tuple[Integers, Integers, NDArray[np.bool_]]:
        total, replicas, again = super().suffixes(state, others, target_s, after)
        if state == 0:
            return total, replicas, again
        return np.where(replicas > 1, IMPOSSIBLE, total), replicas, again

    def _rough(self, below_s: float | None) -> Path | None:
        """None: the plans of the unrestricted search are no start for this one."""
        return None


class EndsSearch(FrontSearch):
    """Plans in which only the first stage and the last, with the scores of a large vocabulary, have replicas."""

    def suffixes(
        self, state: int, others: Integers, target_s: float, after: Integers
    ) -> tuple[Integers, Integers, NDArray[np.bool_]]:
        total, replicas, again = Search.suffixes(self, state, others, target_s, after)
        if state == 0:
            return total, replicas, again
        return np.where((replicas > 1) & (others < len(self.space) - 1), IMPOSSIBLE, total), replicas, again


class StraightSearch(FrontSearch):
    """Plans without replicas."""

    def suffixes(
        self, state: int, others: Integers, target_s: float, after: Integers
    ) -> tuple[Integers, Integers, NDArray[np.bool_]]:
        total, replicas, again = super().suffixes(state, others, target_s, after)
        return np.where(replicas > 1, IMPOSSIBLE, total), replicas, again

    def _data_parallel(self, replicas: Integers) -> Path | None:
        """That without replicas."""
        return super()._data_parallel(replicas[:1])


class DataParallelSearch(Search):
    """Plans of one stage, which wait for nobody."""

    def best(self, below_s: float | None = None, precision: float = RESOLUTION) -> Path | None:
        """The fastest plan."""
        path = self._data_parallel(np.arange(1, min(self.gpus, self.model.most_replicas) + 1))
        return path if path is not None and (below_s is None or path.seconds < below_s) else None


PROPOSED: tuple[type[Search], ...] = (DataParallelSearch, StraightSearch, FrontSearch, EndsSearch, Search)


def questions(
    gpus: int, link: Link, memory_bytes: int | None, link_unit: float, memory_unit: float
) -> Iterator[tuple[type[Search], int, Link, int | None]]:
    """Kinds of plans to propose: the search for them, and for how many GPUs at most, which link and which memory.

    Args:
        gpus: of the cluster.
        link: of the cluster.
        memory_bytes: of the cluster.
        link_unit: a bandwidth, and
        memory_unit: a memory, of the model's own, from which slower links and less memory are counted.
    """
    for kind in PROPOSED:
        yield kind, min(gpus, MOST_WORKERS), link, memory_bytes
    for bandwidth in steps_below(link.bandwidth_bytes_per_s, link_unit, SLOWER, SLOWER_STEPS):
        slower = link.bandwidth_bytes_per_s / bandwidth
        yield Search, min(gpus, FEW), slowed(link, slower), memory_bytes
    most = memory_unit if memory_bytes is None else min(memory_bytes, memory_unit)
    for memory in steps_below(most, memory_unit, LEANER, LEANER_STEPS):
        yield Search, min(gpus, FEW), link, max(1, int(memory))


def slowed(link: Link, times: float) -> Link:
    """The link, so many times slower."""
    ring = link.all_reduce_bandwidth_bytes_per_s
    reduced = None if ring is None else ring / times
    return replace(
        link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / times, all_reduce_bandwidth_bytes_per_s=reduced
    )


def counts_to_try(gpus: int) -> list[int]:
    """Numbers of GPUs, descending: the highest few, and below them ever the same, all of the small ones among them."""
    steps = [*range(1, DENSE), *(DENSE * part // 4 << octave for octave in range(16) for part in range(4, 8))]
    return sorted({*range(max(1, gpus - NEAR + 1), gpus + 1), *(n for n in steps if n <= gpus)}, reverse=True)


def steps_below(value: float, unit: float, step: float, count: int) -> list[float]:
    """The highest `count` of the numbers unit·step^k that are below the value."""
    highest = math.ceil(math.log(value / unit, step) - SLACK) - 1
    return [unit * step**power for power in range(highest, highest - count, -1)]


def fastest(
    layer_costs: LayerCosts, first: Priced, alone: Priced | None, kinds: Iterable[tuple[BestOn, int]], trials: Trials
) -> Priced:
    """The proposal that is fastest when it is simulated, with its price.

    Args:
        layer_costs: of the model.
        first: the plan whose busiest resource is least busy.
        alone: one of a single stage, which is quickly simulated: what is far from it need not be deepened.
        kinds: how to find the best plan of each kind, and for how many GPUs at most.
        trials: that price them.
    """
    bound_s = first[1].seconds_per_minibatch * (1 + SETTLED)
    best = _first_of(layer_costs, first, alone, trials)
    if best[1].cost_model_s is None:
        return best
    for best_on, gpus in kinds:
        used = gpus + 1
        for count in counts_to_try(gpus):
            if best[1].seconds_per_minibatch <= bound_s:
                return best
            if count >= used:
                continue  # the best plan on more GPUs left some unused
            if trials.tally.over:
                trials.tally.exhausted = False
                return best
            proposal = best_on(count, best[1].seconds_per_minibatch)
            if proposal is None:
                break
            used = sum(stage.replicas for stage in proposal[0])
            if tuple(proposal[0]) in trials.tally.seen:
                continue
            if proposal[1].seconds_per_minibatch >= best[1].seconds_per_minibatch * (1 - SLACK):
                continue  # not even without waiting
            price = trials.price(layer_costs, *proposal, best[1].seconds_per_minibatch)
            if price.cost_model_s is None:
                continue
            if price.seconds_per_minibatch < best[1].seconds_per_minibatch * (1 - SLACK):
                best = proposal[0], price
    return best


def _first_of(layer_costs: LayerCosts, first: Priced, alone: Priced | None, trials: Trials) -> Priced:
    """The faster of the two when they are simulated; the first, without that, where there is no simulation."""
    priced = math.inf
    if alone is not None and len(first[0]) > 1 and not too_large(first[0], trials.schedule, trials.microbatches):
        alone = alone[0], trials.price(layer_costs, *alone)
        priced = alone[1].seconds_per_minibatch if alone[1].cost_model_s is not None else math.inf
    best = first[0], trials.price(layer_costs, *first, LENIENT * priced)
    told = best[1].cost_model_s is not None
    faster = not told or priced < best[1].seconds_per_minibatch * (1 - SLACK)
    return alone if alone is not None and priced < math.inf and faster else best


def proposals(space: StateSpace, cluster: Cluster, recompute: RecomputeRule) -> list[list[Candidate]]:
    """The best plans of each kind on a few numbers of GPUs, by their busiest resource."""
    found = []
    model = bounds_for("resource", link_of(cluster))
    for kind in PROPOSED:
        for count in counts_to_try(cluster.gpus)[:NEAR]:
            path = kind(space, model, count, cluster.memory_bytes, recompute).best()
            if path is not None:
                found.append(stages_along(space, path))
    return found
