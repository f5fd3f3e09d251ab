"""Prices of plans whose stages keep copies of shared weights, with what these copies hold."""

from collections.abc import Sequence
from contextlib import suppress

from planner.cost.candidate import Candidate
from planner.cost.communicators import with_overheads
from planner.cost.layer_costs import LayerCosts
from planner.cost.overheads import Price
from planner.cost.setting import Setting
from planner.cost.weight_copies import copied_in, exchanged_bytes, sent_bytes, shared_in
from planner.errors import InfeasibleError
from planner.formats.files import replace
from planner.plan.shared_weights import SharedWeight
from planner.units import format_bytes


def copies_fit(
    layer_costs: LayerCosts, stages: Sequence[Candidate], price: Price, setting: Setting
) -> bool:
    """Return whether the copies of weights that stages share fit the memory."""
    with suppress(InfeasibleError):
        price_with_copies(layer_costs, stages, price, setting)
        return True
    return False


def price_with_copies(
    layer_costs: LayerCosts, stages: Sequence[Candidate], price: Price, setting: Setting
) -> Price:
    """Return `price` with the memory and the bytes of duplicated weights; raise InfeasibleError if
    they do not fit.
    """
    schedule = setting.schedule
    exchanged = exchanged_bytes(layer_costs, stages, price.in_flight if schedule.stashes else None)
    memory = []
    for number, copied in enumerate(copied_in(layer_costs, stages)):
        held = price.memory[number]
        options = stages[number].options
        # A duplicate takes its weight's versions, its gradient twice and the optimizer's state.
        versions = schedule.versions(price.in_flight[number])
        weights_bytes = versions * sum(layer.weight_bytes for layer in copied)
        gradients_bytes = 2 * sum(layer.gradient_bytes for layer in copied)
        optimizer_bytes = sum(-(-layer.optimizer_bytes // options.shards) for layer in copied)
        whole = replace(
            held,
            weights_bytes=held.weights_bytes + weights_bytes,
            gradients_bytes=held.gradients_bytes + gradients_bytes,
            optimizer_bytes=held.optimizer_bytes + optimizer_bytes,
            communication_bytes=held.communication_bytes + exchanged[number],
        )
        memory.append(whole)

    # A share of what a GPU keeps besides tensors grows with them.
    grown = with_overheads(layer_costs, stages, memory, price.workers)
    more = sent_bytes(layer_costs, stages, divides=schedule.divides)
    with_copies = replace(price, memory=grown, communication_bytes=price.communication_bytes + more)

    # A GPU has all chunks of a worker.
    held_bytes = with_copies.gpu_bytes
    for number, (stage, before, after) in enumerate(zip(stages, price.memory, memory, strict=True)):
        limit = setting.cluster.memory_of(stage.options.kind)
        if limit is not None and after != before and held_bytes[number] > limit:
            over_bytes = held_bytes[number] - limit
            raise _too_large(shared_in(layer_costs, stages), number, over_bytes)

    return with_copies


def _too_large(weights: Sequence[SharedWeight], stage: int, over_bytes: int) -> InfeasibleError:
    shared = next(weight for weight in weights if stage in weight.stages)
    over = format_bytes(over_bytes)
    what = f", and what stage {stage} holds for that does not fit the memory by {over}"
    hint = "give more memory or more GPUs, or train the two as weights of their own"
    return InfeasibleError(shared.sentence(what), hint=hint)
