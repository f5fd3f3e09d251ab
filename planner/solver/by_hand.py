"""Baselines: plans that people make by hand without a planner, over legal cuts of the profile's
order.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np

from planner.cost.candidate import Candidate, candidates
from planner.cost.kinds import everything_on, fastest_ranks
from planner.cost.layer_costs import LayerCosts
from planner.cost.recomputation import units_of
from planner.formats.files import replace
from planner.plan.blocks import blocks_of
from planner.solver.clock import NO_LIMIT, Clock
from planner.solver.problem.problem import Problem
from planner.solver.problem.states import Chain, uncut_groups
from planner.stages.replicas import most_replicas
from planner.units import SLACK


def replicated(problem: Problem) -> Candidate:
    """Return data parallelism on as many GPUs as have a microbatch, the fastest first."""
    count = most_replicas(problem.schedule, problem.microbatches, problem.cluster.gpus)
    ranks = fastest_ranks(problem.layer_costs, problem.cluster, count)
    return everything_on(problem.layer_costs, problem.cluster, ranks)


def equal_blocks(layer_costs: LayerCosts, stages: int) -> list[Candidate]:
    """Return so many stages with equally many blocks each, the first ones with one more if need be.

    Where there are fewer blocks than stages, each block is a stage.
    """
    blocks = blocks_of(layer_costs.profile)
    counts = equal_counts(len(blocks), min(stages, len(blocks)))
    legal = np.array(legal_ends(layer_costs))

    # The last block of a stage ends at the nearest place where a stage may.
    ends = {0}
    for count in accumulate(counts):
        end = blocks[count - 1].stop
        distances = np.abs(legal - end)
        ends.add(int(legal[distances.argmin()]))

    layers = [range(first, end) for first, end in pairwise(sorted(ends))]
    return candidates(layers, [1] * len(layers))


def equal_time(layer_costs: LayerCosts, gpus: int) -> list[Candidate]:
    """Return as many stages as GPUs, the slowest of which computes as little as possible.

    torchgpipe balances by this block partition (Bárány & Grinberg 2015). Communication does not
    count.
    """
    return next(equal_times(layer_costs, [gpus]))


def equal_times(
    layer_costs: LayerCosts, counts: Iterable[int], clock: Clock = NO_LIMIT
) -> Iterator[list[Candidate]]:
    """Yield the partition of `equal_time` for each number of stages; after the deadline, only for
    the first.
    """
    chain = Chain(layer_costs)
    sums = chain.compute_s.tolist()
    for number, count in enumerate(counts):
        if number and clock.passed:
            return
        ends = _balanced_ends(sums, min(count, len(sums) - 1))
        layers = [chain.layers(i, j) for i, j in pairwise(ends)]
        yield candidates(layers, [1] * len(layers))


def _balanced_ends(sums: Sequence[float], stages: int) -> list[int]:
    """Return where stages end, by the bisected time of the slowest one.

    `sums[i]` are the seconds of what is before cut i.
    """
    low_s = max(end_s - first_s for first_s, end_s in pairwise(sums))
    high_s = sums[-1]
    while high_s - low_s > SLACK * high_s:
        middle_s = (low_s + high_s) / 2
        if _greedy_ends(sums, stages, middle_s)[-1] == len(sums) - 1:
            high_s = middle_s
        else:
            low_s = middle_s

    return _greedy_ends(sums, stages, high_s)


def _greedy_ends(sums: Sequence[float], stages: int, most_s: float) -> list[int]:
    """Return where stages end that each take as much as they can within `most_s`, which is enough
    for any layer.
    """
    last = len(sums) - 1
    ends = [0]
    for later in reversed(range(stages)):  # each of which needs a place to end
        end = bisect_right(sums, sums[ends[-1]] + most_s * (1 + SLACK)) - 1
        if end >= last - later:
            return [*ends, *range(last - later, last + 1)]
        ends.append(end)
    return ends


def recomputing(layer_costs: LayerCosts, stages: Sequence[Candidate]) -> list[Candidate]:
    """Return the stages with every block running its forward again before its backward, as
    checkpointing does.
    """
    again = []
    for stage in stages:
        units = units_of(layer_costs, sorted(stage.layers))
        blocks = tuple(map(frozenset, units))
        again.append(replace(stage, options=replace(stage.options, recompute=blocks)))

    return again


def equal_counts(blocks: int, stages: int) -> list[int]:
    """Divide blocks over stages; the first ones have one more if need be."""
    shorter, longer = divmod(blocks, stages)
    return [shorter + (number < longer) for number in range(stages)]


def legal_ends(layer_costs: LayerCosts) -> list[int]:
    """Return how many layers are before each legal cut, 0 and all of them included."""
    return [0, *accumulate(map(len, uncut_groups(layer_costs)))]
