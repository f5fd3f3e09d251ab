"""Searches for plans of restricted kinds, which may wait less than the best plan by the cost model.

The exact search minimises the busy time of the busiest resource; waiting shows only in the simulation. Whatever is
proposed for up to `DENSE` GPUs is proposed for more GPUs as well, so more GPUs never make the answer worse.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from planner.cost.network.link import Link
from planner.cost.work import Integers
from planner.options.solving import ShardRule
from planner.solver.evaluate.pipelines import MOST_WORKERS
from planner.solver.problem.bounds import Bounds
from planner.solver.problem.problem import Limits
from planner.solver.problem.result import RESOLUTION, CutPath
from planner.solver.problem.states import CutSpace
from planner.solver.search.chain.search import Search
from planner.units import SLACK

DENSE = 16  # every number of GPUs up to this is tried; larger pipelines take longer to simulate
NEAR = 4  # above, this many numbers are tried from the cluster's down, and some below
# Alternatives for slower links: the factor between them, how many, and for how many GPUs.
SLOWER, SLOWER_STEPS = 2**0.5, 2
FEW = 8


class FrontSearch(Search):
    """Finds plans in which only the first stage has replicas."""

    def most_replicas(self, state: int, others: Integers) -> Integers:
        return np.full(len(others), self.limits.most_replicas if state == 0 else 1)


class EndsSearch(FrontSearch):
    """Finds plans in which only the first stage and the last, with the scores of a large vocabulary, have replicas."""

    def most_replicas(self, state: int, others: Integers) -> Integers:
        return np.where((state == 0) | (others == len(self.space) - 1), self.limits.most_replicas, 1)


class StraightSearch(Search):
    """Finds plans without replicas."""

    def __init__(self, space: CutSpace, model: Bounds, limits: Limits) -> None:
        super().__init__(space, model, replace(limits, most_replicas=1))


class DataParallelSearch(Search):
    """Finds plans of one stage, which wait for nothing."""

    def best(self, below_s: float | None = None, precision: float = RESOLUTION) -> CutPath | None:
        most = min(self.gpus, self.model.most_replicas, self.limits.most_replicas)
        path = self._data_parallel(np.arange(1, most + 1))
        return path if path is not None and (below_s is None or path.seconds < below_s) else None


KINDS: tuple[type[Search], ...] = (DataParallelSearch, StraightSearch, FrontSearch, EndsSearch, Search)

# A kind of plan: the search for it, for which link, and within which limits.
Kind = tuple[type[Search], Link, Limits]


def families(limits: Limits) -> list[Limits]:
    """Return the limits within which to look for every kind of plans.

    Plans of simpler stages fill the memory less, and leave room for the deeper pipelines that wait less.
    """
    if limits.memory_bytes is None or limits.rules.recompute != "auto":
        return [limits]
    unsharded: ShardRule = "never" if limits.rules.shard_optimizer == "auto" else limits.rules.shard_optimizer
    return [replace(limits, rules=replace(limits.rules, shard_optimizer=unsharded), whole_stages=True), limits]


def kinds_of_plans(link: Link, limits: Limits, link_unit: float) -> Iterator[Kind]:
    """Yield kinds of plans to propose, each with the most GPUs to propose it for.

    Slower links are counted from `link_unit`, which belongs to the model: similar clusters get the same proposals.
    """
    for kind in KINDS:
        yield kind, link, replace(limits, gpus=min(limits.gpus, MOST_WORKERS))
    few = replace(limits, gpus=min(limits.gpus, FEW))
    for bandwidth in steps_below(link.bandwidth_bytes_per_s, link_unit, SLOWER, SLOWER_STEPS):
        yield Search, slowed(link, link.bandwidth_bytes_per_s / bandwidth), few


def slowed(link: Link, times: float) -> Link:
    """Return the link, so many times slower."""
    ring = link.all_reduce_bandwidth_bytes_per_s
    reduced = None if ring is None else ring / times
    return replace(
        link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / times, all_reduce_bandwidth_bytes_per_s=reduced
    )


def counts_to_try(gpus: int) -> list[int]:
    """Return numbers of GPUs to try, descending: the highest few, then a fixed series with all small numbers."""
    # A series that does not depend on the cluster: with more GPUs, all plans on fewer GPUs are proposed again.
    steps = [*range(1, DENSE), *(DENSE * part // 4 << octave for octave in range(16) for part in range(4, 8))]
    return sorted({*range(max(1, gpus - NEAR + 1), gpus + 1), *(n for n in steps if n <= gpus)}, reverse=True)


def steps_below(value: float, unit: float, step: float, count: int) -> list[float]:
    """Return the highest `count` of the numbers unit·step^k that are below the value."""
    # A value that is one of the numbers, up to rounding, is not below itself.
    highest = math.ceil(math.log(value / unit, step) - SLACK) - 1
    return [unit * step**power for power in range(highest, highest - count, -1)]
