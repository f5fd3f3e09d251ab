"""What people do without a planner: cuts that one can make by hand, priced like any plan.

Each baseline is a list of stages over legal cuts of the profile's order. `legal_ends` are the positions after which a
cut may be made; a baseline that wants to cut elsewhere takes the nearest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from planner.cost.layer_costs import Candidate, LayerCosts, candidates
from planner.cost.link import link_of
from planner.cost.work import Floats
from planner.formats.cluster import Cluster
from planner.solver.bounds.registry import bounds_for
from planner.solver.candidates.waits import StraightSearch, counts_to_try
from planner.solver.chain.states import Chain, column


def data_parallel(layer_costs: LayerCosts, gpus: int) -> list[Candidate]:
    """One stage with a replica on every GPU."""
    return candidates([range(len(layer_costs.profile.layers))], [gpus])


def straight(layer_costs: LayerCosts, cluster: Cluster) -> list[list[Candidate]]:
    """Pipelines of stages without replicas, whatever memory they need: for each number of GPUs the best cut.

    The best by the busiest resource of the asynchronous pipeline; which of them waits least, the simulation decides.
    """
    chain = Chain(layer_costs)
    model = bounds_for("resource", link_of(cluster))
    found = []
    for gpus in counts_to_try(min(cluster.gpus, len(chain) - 1)):
        path = StraightSearch(chain, model, gpus, None, "never").best()
        assert path is not None, "without a memory limit one stage always fits"
        if len(path.replicas) == gpus:  # else it comes again, for fewer
            found.append(candidates([chain.layers(i, j) for i, j in pairwise(path.states)], path.replicas))
    return found


def equal_layers(layer_costs: LayerCosts, gpus: int) -> list[Candidate]:
    """As many stages as GPUs, with as many layers each."""
    return _equal_shares(layer_costs, gpus, np.ones(len(layer_costs.profile.layers)))


def equal_parameters(layer_costs: LayerCosts, gpus: int) -> list[Candidate]:
    """As many stages as GPUs, with as many bytes of parameters each."""
    return _equal_shares(layer_costs, gpus, column(layer_costs, "weight_bytes"))


def equal_time(layer_costs: LayerCosts, gpus: int) -> list[Candidate]:
    """As many stages as GPUs, the slowest of which computes as little as possible.

    Block partition of the layers' times, as torchgpipe balances (Bárány & Grinberg 2015); communication does not count.
    """
    chain = Chain(layer_costs)
    sums = chain.compute_s
    stages = min(gpus, len(chain) - 1)
    # least[i]: the smallest largest stage of the first i groups, in as many stages as walked so far
    least = np.where(np.arange(len(chain)) == 0, 0.0, np.inf)
    choices = []
    for _ in range(stages):
        table = np.maximum(least[:, None], sums[None, :] - sums[:, None])
        table[np.tril_indices(len(chain))] = np.inf
        choices.append(table.argmin(axis=0))
        least = table.min(axis=0)
    ends = [len(chain) - 1]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    return candidates([chain.layers(i, j) for i, j in pairwise(reversed(ends))], [1] * stages)


def legal_ends(layer_costs: LayerCosts) -> list[int]:
    """Numbers of layers before each place where a cut may be made, 0 and all of them included."""
    chain = Chain(layer_costs)
    return [0, *(len(chain.layers(0, state)) for state in range(1, len(chain)))]


def _equal_shares(layer_costs: LayerCosts, gpus: int, amounts: Floats) -> list[Candidate]:
    """Cuts where the sum of the amounts is nearest to each equal share, one after the other."""
    ends = legal_ends(layer_costs)
    sums = np.concatenate(([0.0], np.cumsum(amounts)))[ends]
    stages = min(gpus, len(ends) - 1)
    cuts = [0]
    for number in range(1, stages):
        free = np.arange(cuts[-1] + 1, len(ends) - (stages - number))  # later stages need a place each
        cuts.append(int(free[np.argmin(np.abs(sums[free] - sums[-1] * number / stages))]))
    return candidates(_runs([ends[cut] for cut in [*cuts, len(ends) - 1]]), [1] * stages)


def _runs(ends: Sequence[int]) -> list[range]:
    return [range(first, end) for first, end in pairwise(ends)]
