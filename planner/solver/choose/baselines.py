"""Baselines: plans that people make by hand without a planner.

Each baseline is a list of stages over legal cuts of the profile's order. `legal_ends` are the positions after which a
cut is legal; a baseline that wants to cut elsewhere takes the nearest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from planner.cost.candidate import Candidate, candidates
from planner.cost.layer_costs import LayerCosts
from planner.cost.network.link import link_of
from planner.cost.recomputation import units_of
from planner.cost.work import Floats, Integers
from planner.formats.cluster import Cluster
from planner.options.solving import StageRules
from planner.plan.blocks import blocks_of
from planner.solver.problem.bounds import bounds_for
from planner.solver.problem.budget import NO_HURRY, Deadline, OutOfTimeError
from planner.solver.problem.problem import Limits
from planner.solver.problem.states import Chain, column, uncut_groups
from planner.solver.search.restricted import StraightSearch, counts_to_try


def data_parallel(layer_costs: LayerCosts, gpus: int) -> list[Candidate]:
    """Return one stage with a replica on every GPU."""
    return candidates([range(len(layer_costs.profile.layers))], [gpus])


def straight(layer_costs: LayerCosts, cluster: Cluster, deadline: Deadline = NO_HURRY) -> list[list[Candidate]]:
    """Return the best pipeline without replicas for each number of GPUs, whatever memory it needs.

    The best is the one whose busiest resource is least busy under 1f1b. Simulation decides which of them waits least.
    After the deadline, only what was found is returned.
    """
    chain, model = Chain(layer_costs), bounds_for("resource", link_of(cluster))
    found = []
    for gpus in counts_to_try(min(cluster.gpus, len(chain) - 1)):
        try:
            path = StraightSearch(chain, model, Limits(gpus, None, StageRules("never"), deadline)).best()
        except OutOfTimeError:
            break
        assert path is not None, "without a memory limit one stage always fits"
        if len(path.replicas) == gpus:  # otherwise it is the best for fewer GPUs, too
            found.append(candidates([chain.layers(i, j) for i, j in pairwise(path.states)], path.replicas))
    return found


def equal_layers(layer_costs: LayerCosts, gpus: int) -> list[Candidate]:
    """Return as many stages as GPUs, with equally many layers each."""
    return _equal_shares(layer_costs, gpus, np.ones(len(layer_costs.profile.layers)))


def equal_parameters(layer_costs: LayerCosts, gpus: int) -> list[Candidate]:
    """Return as many stages as GPUs, with equally many bytes of parameters each."""
    return _equal_shares(layer_costs, gpus, column(layer_costs, "weight_bytes"))


def equal_blocks(layer_costs: LayerCosts, stages: int) -> list[Candidate]:
    """Return so many stages with equally many blocks each, as most training frameworks divide a model.

    The first ones have a block more where the blocks cannot be divided evenly. Where there are fewer blocks than
    stages, each block is a stage.
    """
    blocks = blocks_of(layer_costs.profile)
    legal = np.array(legal_ends(layer_costs))
    wanted = (blocks[taken - 1].stop for taken in accumulate(equal_counts(len(blocks), min(stages, len(blocks)))))
    return _one_replica_each(sorted({0, *(int(legal[np.argmin(np.abs(legal - end))]) for end in wanted)}))


def equal_time(layer_costs: LayerCosts, gpus: int) -> list[Candidate]:
    """Return as many stages as GPUs, the slowest of which computes as little as possible.

    This is the block partition by which torchgpipe balances (Bárány & Grinberg 2015). Communication does not count.
    """
    return next(equal_times(layer_costs, [gpus]))


def equal_times(
    layer_costs: LayerCosts, counts: Iterable[int], deadline: Deadline = NO_HURRY
) -> Iterator[list[Candidate]]:
    """Yield the partition of `equal_time` for each of some ascending numbers of stages. O(stages · L log L) for all.

    After the deadline, no more are found than the first.
    """
    chain = Chain(layer_costs)
    sums, states = chain.compute_s, np.arange(len(chain))
    # least[i]: time of the slowest stage in the best partition of the first i groups into the stages so far
    least = np.where(states == 0, 0.0, np.inf)
    choices: list[Integers] = []
    for stages in (min(count, len(chain) - 1) for count in counts):
        while len(choices) < stages:
            if len(choices) > 1 and deadline.passed:
                return
            choices.append(_last_cuts(least, sums, len(choices)))
            least = np.maximum(least[choices[-1]], sums - sums[choices[-1]])
            least[: len(choices)] = np.inf
        ends = [len(chain) - 1]
        for choice in reversed(choices[:stages]):
            ends.append(int(choice[ends[-1]]))
        yield candidates([chain.layers(i, j) for i, j in pairwise(reversed(ends))], [1] * stages)


def _last_cuts(least: Floats, sums: Floats, stages: int) -> Integers:
    """Return, for each state, the first cut that makes the slower of the last stage and those before it fastest.

    Args:
        least: time of the slowest of so many stages before each state, which grows with the state.
        sums: compute time before each state.
        stages: before the cut.
    """
    states = np.arange(len(sums))
    final = np.maximum(states - 1, stages)
    if stages == 0:
        return np.zeros(len(sums), dtype=np.int64)  # the first stage begins at the beginning
    # The last stage gets shorter with a later cut, and those before it get longer: the best cut is where these cross.
    cross = _first(lambda cut: least[cut] >= sums - sums[cut], np.full(len(sums), stages), final)
    before = np.maximum(cross - 1, stages)
    longer_s = np.maximum(least[before], sums - sums[before])
    shorter_s = np.maximum(least[cross], sums - sums[cross])
    # Cuts between layers that take no time are equally good.
    earliest = _first(lambda cut: sums - sums[cut] <= longer_s, np.full(len(sums), stages), before)
    return np.where(longer_s <= shorter_s, earliest, cross)


def _first(holds: Callable[[Integers], NDArray[np.bool_]], low: Integers, high: Integers) -> Integers:
    """Return the first number from `low` on for which a condition holds that holds from there on; `high` if none."""
    while (low < high).any():
        middle = (low + high) // 2
        here = holds(middle)
        low, high = np.where(here | (low >= high), low, middle + 1), np.where(here & (low < high), middle, high)
    return low


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


def _equal_shares(layer_costs: LayerCosts, gpus: int, amounts: Floats) -> list[Candidate]:
    """Cut where the sum of the amounts is nearest to each equal share, one after the other."""
    ends = legal_ends(layer_costs)
    sums = np.concatenate(([0.0], np.cumsum(amounts)))[ends]
    stages = min(gpus, len(ends) - 1)
    cuts = [0]
    for number in range(1, stages):
        free = np.arange(cuts[-1] + 1, len(ends) - (stages - number))  # every later stage needs a place to end
        cuts.append(int(free[np.argmin(np.abs(sums[free] - sums[-1] * number / stages))]))
    return _one_replica_each([ends[cut] for cut in [*cuts, len(ends) - 1]])


def _one_replica_each(ends: Sequence[int]) -> list[Candidate]:
    return candidates([range(first, end) for first, end in pairwise(ends)], [1] * (len(ends) - 1))
