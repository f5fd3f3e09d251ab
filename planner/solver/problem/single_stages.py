"""A bound on plans of a single stage, whose replicas each run the whole model.

Of m microbatches, r replicas run n = ceil(m / r) each. With c the seconds of all layers and f(r)
the least seconds of the forwards that must run again for the replica's memory, such a plan takes at
least

    n * (c + f(r))

and no less than its price without recomputation. What r replicas divide, by the sharding level: the
optimizer's state (1), and here gradients and weights (2 and 3).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.cost.candidate import StageOptions
from planner.cost.layer_costs import LayerCosts
from planner.cost.overheads import Price
from planner.cost.recomputation import units_of
from planner.cost.work import Floats
from planner.formats.files import replace
from planner.solver.problem.group_totals import GroupTotals, least_recomputation_s
from planner.solver.problem.problem import Problem


@dataclass(frozen=True)
class _Blocks:
    """The model's blocks, which recompute one by one: all at once save nothing at the peak."""

    layers: tuple[tuple[int, ...], ...]
    forward_s: Floats
    saved_bytes: Floats
    gains_bytes: Floats  # saved, less the values that enter this block alone, which it keeps
    largest_entry_bytes: int  # of the values that enter a block

    @classmethod
    def of(cls, costs: LayerCosts) -> "_Blocks":
        """Add up the layers of each block."""
        blocks = units_of(costs, range(len(costs.block_of)))
        layers = costs.profile.layers

        def total(block: Sequence[int], name: str) -> float:
            return float(sum(getattr(layers[layer], name) for layer in block))

        def size_bytes(values: Iterable[int]) -> int:
            return sum(costs.traffic[value].output_bytes for value in values)

        # What enters one block alone is kept by that block.
        entering = [costs.entering(block) for block in blocks]
        users = Counter(value for values in entering for value in values)
        own_bytes = []
        for values in entering:
            own = [value for value in values if users[value] == 1]
            own_bytes.append(size_bytes(own))

        saved_bytes = np.array([total(block, "saved_bytes") for block in blocks])
        return cls(
            layers=blocks,
            forward_s=np.array([total(block, "forward_s") for block in blocks]),
            saved_bytes=saved_bytes,
            gains_bytes=saved_bytes - own_bytes,
            largest_entry_bytes=max(map(size_bytes, entering)),
        )


def single_stage_s(
    problem: Problem,
    totals: GroupTotals,
    below_s: float,
    *,
    divides_gradients: bool = False,
) -> float:
    """Return the least seconds of a single stage, or of one that divides gradients, or `below_s` if
    that is less.
    """
    blocks = _Blocks.of(problem.layer_costs)
    possible = problem.sharding._replace(always=False)

    for replicas in range(totals.most_replicas, 0, -1):
        share = -(-problem.microbatches // replicas)
        if share * totals.once_s >= below_s:
            break  # fewer replicas run more microbatches each

        even = problem.microbatches % replicas == 0
        for sharding in possible.of_replicas(replicas, whole=even):
            if divides_gradients and not sharding.divides_gradients:
                continue

            options = StageOptions(replicas).with_sharding(sharding)
            again_s = _again_s(problem, totals, blocks, options)
            least_s = share * (totals.once_s + again_s)
            if least_s >= below_s or not _may_fit(problem, blocks, options, again_s):
                continue

            price_s = _price(problem, options).seconds_per_minibatch
            below_s = min(below_s, max(least_s, price_s))

    return below_s


def _again_s(
    problem: Problem,
    totals: GroupTotals,
    blocks: _Blocks,
    options: StageOptions,
) -> float:
    """Return the least seconds of forwards that run again, so that a replica fits."""
    optimizer_bytes = totals.optimizer_bytes.sum()
    kept_bytes = totals.kept_bytes.sum()
    optimizer_bytes = optimizer_bytes / options.shards
    if options.shards_gradients:
        kept_bytes = kept_bytes / options.shards

    state_bytes = optimizer_bytes + kept_bytes
    if state_bytes > totals.memory_bytes:
        return np.inf

    excess_bytes = state_bytes + blocks.saved_bytes.sum() - totals.memory_bytes
    return least_recomputation_s(problem, excess_bytes, blocks.gains_bytes, blocks.forward_s)


def _may_fit(problem: Problem, blocks: _Blocks, options: StageOptions, again_s: float) -> bool:
    """Return whether the stage may fit the memory if it recomputes what `again_s` says."""
    memory_bytes = problem.cluster.memory_bytes
    if again_s == 0 or memory_bytes is None:
        return True

    lean = replace(options, recompute=tuple(map(frozenset, blocks.layers)))
    (held_bytes,) = _price(problem, lean).gpu_bytes

    # A block that does not recompute keeps no values that enter it, and all else.
    return held_bytes - blocks.largest_entry_bytes <= memory_bytes


def _price(problem: Problem, options: StageOptions) -> Price:
    """Return the price of all layers as one stage."""
    return problem.price([replace(problem.layer_costs.single_stage, options=options)])
