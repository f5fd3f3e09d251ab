"""Count a worker's communicators, and add what they and the other overheads take to the memory of
its stages.
"""

import math
from collections.abc import Sequence

from planner.cost.candidate import Candidate
from planner.cost.layer_costs import LayerCosts, messages
from planner.cost.overheads import NO_RESERVE, Reserve
from planner.cost.weight_copies import shared_in
from planner.formats.files import replace
from planner.formats.plan_parts import StageMemory


def communicators(layer_costs: LayerCosts, stages: Sequence[Candidate]) -> list[int]:
    """Return how many communicators a worker has for each of its stages.

    One for each pair of workers, pair of stages and direction, because NCCL runs the operations of
    one communicator in the order of their calls; one for the all-reduce, and one for weights that
    replicas divide, with one more for groups that repeat them; and one for the ranks that divide
    layers.
    """
    counts = []
    for stage in stages:
        options = stage.options
        own = (
            stage.replicas > 1,
            options.shards_gradients,
            options.repeats_shards,
            options.divides_layers or layer_costs.group_ranks > 1,
        )
        counts.append(sum(own))

    shared = {weight.stages for weight in shared_in(layer_costs, stages)}
    for first, second in [*messages(layer_costs, stages), *shared]:
        # A replica meets the replicas of another stage that take the same units in turn: lcm(r, r')
        # / r of them.
        met = math.lcm(stages[first].replicas, stages[second].replicas)
        for number in (first, second):
            counts[number] += 2 * met // stages[number].replicas

    return counts


def reserves_of(layer_costs: LayerCosts, stages: Sequence[Candidate]) -> list[Reserve]:
    """Return what the worker of each stage of a plan needs beside tensors."""
    if layer_costs.overheads is None:
        return [NO_RESERVE] * len(stages)
    return [layer_costs.overheads.reserve(count) for count in communicators(layer_costs, stages)]


def with_overheads(
    layer_costs: LayerCosts,
    stages: Sequence[Candidate],
    memory: Sequence[StageMemory],
    workers: Sequence[int],
) -> tuple[StageMemory, ...]:
    """Return the memory of a plan's stages, on these workers, with the overheads of their
    devices.
    """
    if layer_costs.overheads is None:
        return tuple(memory)
    made: list[StageMemory] = []
    for number, reserve in enumerate(reserves_of(layer_costs, stages)):
        tensor_bytes = memory[number].tensor_bytes
        overhead_bytes = reserve.whole(tensor_bytes) - tensor_bytes
        if workers[number] in workers[:number]:  # a worker's context counts for its first stage
            overhead_bytes -= layer_costs.overheads.context_bytes
        made.append(replace(memory[number], overhead_bytes=overhead_bytes))

    return tuple(made)
