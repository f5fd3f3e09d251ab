"""Cost of duplicated shared weights. Profiles count a shared weight once, in the first layer that uses it."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from planner.cost.candidate import Candidate
from planner.cost.layer_costs import LayerCosts
from planner.cost.network.link import Buckets, buckets_of
from planner.cost.overheads import Price
from planner.cost.setting import Setting
from planner.errors import InfeasibleError
from planner.formats.plan_parts import StageMemory
from planner.formats.profile import Layer, Profile
from planner.plan.shared_weights import SharedWeight, copied_layers, shared_weights, trained_parameters
from planner.schedule.versions import lag
from planner.units import format_bytes

_OF_A_WEIGHT = ("update_s", "accumulate_s", "weight_bytes", "gradient_bytes", "optimizer_bytes")


def shared_in(layer_costs: LayerCosts, stages: Sequence[Candidate]) -> list[SharedWeight]:
    """Return the trained weights that two of the stages hold, for each pair."""
    return list(shared_weights(_names(layer_costs, stages), trained_parameters(layer_costs.profile)))


def copied_in(layer_costs: LayerCosts, stages: Sequence[Candidate]) -> list[list[Layer]]:
    """Return for each stage the layers of earlier stages whose trained weights it duplicates, as on its own device."""
    names = _names(layer_costs, stages)
    own = [layer_costs.with_options(stage.options) for stage in stages]
    copied = {costs: copied_layers(costs.profile, names) for costs in set(own)}
    return [copied[costs][number] for number, costs in enumerate(own)]


def counted_with_copies(profile: Profile) -> Profile | None:
    """Return the profile with shared weights counted in every layer that uses them; None if there are none."""
    copied = copied_layers(profile, [[layer.name] for layer in profile.layers])
    if not any(copied):
        return None
    layers = []
    for layer, again in zip(profile.layers, copied, strict=True):
        more = {name: getattr(layer, name) + sum(getattr(each, name) for each in again) for name in _OF_A_WEIGHT}
        layers.append(layer.model_copy(update=more))
    return profile.model_copy(update={"layers": tuple(layers)})


def buckets_in(layer_costs: LayerCosts, stage: Candidate, copied: Sequence[Layer]) -> Buckets:
    """Return the buckets of the stage's gradients; none without replicas."""
    if stage.replicas == 1:
        return Buckets((), ())
    order, known = sorted(stage.layers), layer_costs.with_options(stage.options).profile.layers
    # Groups that recompute right before their own backward are part of it, but for one with which it begins.
    layers = [known[index] for index in order]
    again_s = {
        order.index(max(group)): sum(known[index].forward_s for index in group)
        for group in stage.options.recompute
        if max(group) != order[-1]
    }
    return buckets_of(layers, copied, again_s)


def exchanged_bytes(
    layer_costs: LayerCosts, stages: Sequence[Candidate], depths: Sequence[int] | None = None
) -> list[int]:
    """Return for each stage the bytes of shared weights' gradients that one replica holds for their exchange.

    They are the messages that it sends, one per replica of the other stage that it serves, and one that it receives.
    With `depths` of 1f1b, a stage that is ahead of others holds these and its own gradients for as many rounds more.
    """
    layers = {layer.name: layer for layer in layer_costs.profile.layers}
    found: dict[tuple[int, int], set[str]] = {}
    for weight in shared_in(layer_costs, stages):
        # The profile counts a weight in the first layer that uses it.
        found.setdefault(weight.stages, set()).add(weight.layers[0])
    held = [0] * len(stages)
    for (one, other), names in found.items():
        size = sum(layers[name].gradient_bytes for name in names)
        for own, peer in ((one, other), (other, one)):
            ahead = 0 if depths is None else lag(list(found), depths, 1, own)
            served = -(-stages[peer].replicas // stages[own].replicas)
            held[own] += size * (served * (ahead + 1) + ahead + 1)
    return held


def _names(layer_costs: LayerCosts, stages: Sequence[Candidate]) -> list[list[str]]:
    layers = layer_costs.profile.layers
    return [[layers[index].name for index in sorted(stage.layers)] for stage in stages]


def copies_fit(layer_costs: LayerCosts, stages: Sequence[Candidate], price: Price, setting: Setting) -> bool:
    with suppress(InfeasibleError):
        price_with_copies(layer_costs, stages, price, setting)
        return True
    return False


def price_with_copies(layer_costs: LayerCosts, stages: Sequence[Candidate], price: Price, setting: Setting) -> Price:
    """Return `price` with the memory and the bytes of duplicated weights; raise InfeasibleError if they do not fit."""
    schedule, memory = setting.schedule, list[StageMemory]()
    exchanged = exchanged_bytes(layer_costs, stages, price.in_flight if schedule.stashes else None)
    for number, (stage, copied) in enumerate(zip(stages, copied_in(layer_costs, stages), strict=True)):
        held, versions = price.memory[number], schedule.versions(price.in_flight[number])
        # A duplicate takes its weight's versions, its gradient twice and the optimizer's state.
        optimizer = sum(-(-layer.optimizer_bytes // stage.options.shards) for layer in copied)
        whole = {
            "weights_bytes": held.weights_bytes + versions * sum(layer.weight_bytes for layer in copied),
            "gradients_bytes": held.gradients_bytes + 2 * sum(layer.gradient_bytes for layer in copied),
            "optimizer_bytes": held.optimizer_bytes + optimizer,
            "communication_bytes": held.communication_bytes + exchanged[number],
        }
        memory.append(held.model_copy(update=whole))
        limit = setting.cluster.memory_of(stage.options.kind)
        if limit is not None and memory[number] != held and memory[number].total_bytes > limit:
            shared = next(weight for weight in shared_in(layer_costs, stages) if number in weight.stages)
            over = format_bytes(memory[number].total_bytes - limit)
            raise InfeasibleError(
                shared.sentence(f", and what stage {number} holds for that does not fit the memory by {over}"),
                hint=f"keep them in one stage: {shared.together}",
            )
    more = _sent_bytes(layer_costs, stages, divides=schedule.divides)
    return replace(price, memory=tuple(memory), communication_bytes=price.communication_bytes + more)


def _sent_bytes(layer_costs: LayerCosts, stages: Sequence[Candidate], *, divides: bool) -> float:
    """Count the bytes that all workers send per minibatch for duplicated weights.

    Replicas all-reduce the gradients of duplicates, and of all shared weights whole even where the optimizer is
    sharded. Each replica of a stage gets the gradients of the other stages with which it shares weights.
    """
    layers, shared = {layer.name: layer for layer in layer_costs.profile.layers}, shared_in(layer_costs, stages)
    sent = 0.0
    for number, (stage, copied) in enumerate(zip(stages, copied_in(layer_costs, stages), strict=True)):
        pairs = {(weight.stages, weight.layers[0]) for weight in shared if number in weight.stages}
        ring = 2 * (stage.replicas - 1) * sum(layer.gradient_bytes for layer in copied)
        if stage.options.sharded:
            ring += (stage.replicas - 1) * sum(layers[name].gradient_bytes for name in {name for _, name in pairs})
        received = stage.replicas * sum(layers[name].gradient_bytes for _, name in pairs)
        sent += (ring + received) / (1 if divides else stage.replicas)
    return sent
