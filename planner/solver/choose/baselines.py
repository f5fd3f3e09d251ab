"""Baselines: plans that people make by hand without a planner, over legal cuts of the profile's order."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from planner.cost.candidate import Candidate, candidates
from planner.cost.layer_costs import LayerCosts
from planner.cost.recomputation import units_of
from planner.plan.blocks import blocks_of
from planner.solver.problem.budget import NO_HURRY, Deadline
from planner.solver.problem.states import Chain, uncut_groups
from planner.units import SLACK


def equal_blocks(layer_costs: LayerCosts, stages: int) -> list[Candidate]:
    """Return so many stages with equally many blocks each, the first ones with one more if need be.

    Where there are fewer blocks than stages, each block is a stage.
    """
    blocks = blocks_of(layer_costs.profile)
    legal = np.array(legal_ends(layer_costs))
    wanted = (blocks[taken - 1].stop for taken in accumulate(equal_counts(len(blocks), min(stages, len(blocks)))))
    ends = sorted({0, *(int(legal[np.argmin(np.abs(legal - end))]) for end in wanted)})
    return candidates([range(first, end) for first, end in pairwise(ends)], [1] * (len(ends) - 1))


def equal_time(layer_costs: LayerCosts, gpus: int) -> list[Candidate]:
    """Return as many stages as GPUs, the slowest of which computes as little as possible.

    torchgpipe balances by this block partition (Bárány & Grinberg 2015). Communication does not count.
    """
    return next(equal_times(layer_costs, [gpus]))


def equal_times(
    layer_costs: LayerCosts, counts: Iterable[int], deadline: Deadline = NO_HURRY
) -> Iterator[list[Candidate]]:
    """Yield the partition of `equal_time` for each of some numbers of stages; after the deadline, only for the first.

    The time of the slowest stage is bisected, and within it each stage takes as much as it can.
    """
    chain = Chain(layer_costs)
    sums, last = chain.compute_s.tolist(), len(chain) - 1

    def ends(stages: int, most_s: float) -> list[int]:
        found = [0]
        for later in reversed(range(stages)):  # each of which needs a place to end
            end = bisect_right(sums, sums[found[-1]] + most_s * (1 + SLACK)) - 1
            found.append(min(end, last - later))
        return found

    for number, stages in enumerate(min(count, last) for count in counts):
        if number and deadline.passed:
            return
        low_s, high_s = max(end_s - first_s for first_s, end_s in pairwise(sums)), sums[-1]
        while high_s - low_s > SLACK * high_s:
            middle_s = (low_s + high_s) / 2
            low_s, high_s = (low_s, middle_s) if ends(stages, middle_s)[-1] == last else (middle_s, high_s)
        yield candidates([chain.layers(i, j) for i, j in pairwise(ends(stages, high_s))], [1] * stages)


def recomputing(layer_costs: LayerCosts, stages: Sequence[Candidate]) -> list[Candidate]:
    """Return the stages with every block running its forward again before its backward, as checkpointing does."""
    blocks = [tuple(map(frozenset, units_of(layer_costs, sorted(stage.layers)))) for stage in stages]
    again = zip(stages, blocks, strict=True)
    return [replace(stage, options=replace(stage.options, recompute=groups)) for stage, groups in again]


def equal_counts(blocks: int, stages: int) -> list[int]:
    """Divide blocks over stages; the first ones have one more if need be."""
    shorter, longer = divmod(blocks, stages)
    return [shorter + (number < longer) for number in range(stages)]


def legal_ends(layer_costs: LayerCosts) -> list[int]:
    """Return how many layers are before each legal cut, 0 and all of them included."""
    return [0, *accumulate(map(len, uncut_groups(layer_costs)))]
