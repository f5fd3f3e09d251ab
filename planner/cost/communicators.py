"""Count a worker's communicators, and add what they and the other overheads take to the memory of its stages."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.cost.candidate import Candidate
from planner.cost.layer_costs import LayerCosts, messages
from planner.cost.overheads import NO_RESERVE, Reserve
from planner.cost.weight_copies import shared_in
from planner.formats.plan_parts import StageMemory


def communicators(layer_costs: LayerCosts, stages: Sequence[Candidate]) -> list[int]:
    """Return how many communicators a worker has for each of its stages.

    One for each pair of workers, pair of stages and direction, because NCCL runs the operations of one communicator in
    the order of their calls; one for the all-reduce of a replicated stage; and one for the ranks that divide its
    layers. A replica meets the replicas of another stage that take the same units in turn: lcm(r, r') / r of them.
    """
    counts = [int(stage.replicas > 1) + int(stage.options.tensor > 1) for stage in stages]
    shared = {weight.stages for weight in shared_in(layer_costs, stages)}
    for first, second in [*messages(layer_costs, stages), *shared]:
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
    layer_costs: LayerCosts, stages: Sequence[Candidate], memory: Sequence[StageMemory], workers: Sequence[int]
) -> tuple[StageMemory, ...]:
    """Return the memory of a plan's stages with the overheads of their devices.

    `workers`: of each stage, by position in the pipeline. A worker's context counts for its first stage.
    """
    if layer_costs.overheads is None:
        return tuple(memory)
    made: list[StageMemory] = []
    for number, reserve in enumerate(reserves_of(layer_costs, stages)):
        tensor_bytes = memory[number].tensor_bytes
        overhead_bytes = reserve.whole(tensor_bytes) - tensor_bytes
        if workers[number] in workers[:number]:
            overhead_bytes -= layer_costs.overheads.context_bytes
        made.append(memory[number].model_copy(update={"overhead_bytes": overhead_bytes}))
    return tuple(made)
