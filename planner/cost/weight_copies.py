"""Cost of duplicated shared weights. Profiles count a shared weight once, in the first layer that
uses it.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from planner.cost.candidate import Candidate
from planner.cost.layer_costs import LayerCosts
from planner.cost.network.link import Buckets, buckets_of
from planner.formats.files import replace
from planner.formats.profile import DegreeCosts, Layer, Profile
from planner.plan.shared_weights import (
    SharedWeight,
    copied_layers,
    shared_weights,
    trained_parameters,
)
from planner.schedule.versions import lag

NumberT = TypeVar("NumberT", int, float)


def shared_in(layer_costs: LayerCosts, stages: Sequence[Candidate]) -> list[SharedWeight]:
    """Return the trained weights that two of the stages hold, for each pair."""
    return list(
        shared_weights(_names(layer_costs, stages), trained_parameters(layer_costs.profile))
    )


def copied_in(layer_costs: LayerCosts, stages: Sequence[Candidate]) -> list[list[Layer]]:
    """Return for each stage the layers of earlier stages whose trained weights it duplicates, as on
    its own device.
    """
    names = _names(layer_costs, stages)
    own = [layer_costs.with_options(stage.options) for stage in stages]
    copied = {costs: copied_layers(costs.profile, names) for costs in set(own)}
    return [copied[costs][number] for number, costs in enumerate(own)]


def counted_with_copies(
    profile: Profile, held: Sequence[tuple[int, int, int]] = ()
) -> Profile | None:
    """Return the profile with shared weights counted in every layer that uses them; None if there
    are none.

    With `held`, the buffers of a layer have the gradients of another one's weights, too, so many
    times.
    """
    copied = copied_layers(profile, [[layer.name] for layer in profile.layers])
    if not any(copied):
        return None
    place = {layer.name: number for number, layer in enumerate(profile.layers)}
    again = [
        [number, *(place[each.name] for each in layers)] for number, layers in enumerate(copied)
    ]

    def counted(column: Sequence[NumberT]) -> tuple[NumberT, ...]:
        return tuple(sum(column[n] for n in places) for places in again)

    def buffers(buffer_bytes: Sequence[int], gradient_bytes: Sequence[int]) -> tuple[int, ...]:
        total_bytes = list(buffer_bytes)
        for layer, other, times in held:
            total_bytes[layer] += times * gradient_bytes[other]
        return tuple(total_bytes)

    def counted_at(costs: DegreeCosts) -> DegreeCosts:
        return replace(
            costs,
            update_s=counted(costs.update_s),
            accumulate_s=counted(costs.accumulate_s),
            weight_bytes=counted(costs.weight_bytes),
            gradient_bytes=counted(costs.gradient_bytes),
            optimizer_bytes=counted(costs.optimizer_bytes),
            buffer_bytes=buffers(costs.buffer_bytes, costs.gradient_bytes),
            by_tokens=costs.by_tokens and counted_at(costs.by_tokens),
        )

    buffer_bytes = buffers(
        [layer.buffer_bytes for layer in profile.layers],
        [layer.gradient_bytes for layer in profile.layers],
    )
    layers = []
    for number, layer in enumerate(profile.layers):
        users = [profile.layers[n] for n in again[number]]
        counted_layer = replace(
            layer,
            update_s=sum(each.update_s for each in users),
            accumulate_s=sum(each.accumulate_s for each in users),
            weight_bytes=sum(each.weight_bytes for each in users),
            gradient_bytes=sum(each.gradient_bytes for each in users),
            optimizer_bytes=sum(each.optimizer_bytes for each in users),
            buffer_bytes=buffer_bytes[number],
        )
        layers.append(counted_layer)

    tensor = profile.tensor and tuple(map(counted_at, profile.tensor))
    return replace(profile, layers=tuple(layers), tensor=tensor)


def buckets_in(layer_costs: LayerCosts, stage: Candidate, copied: Sequence[Layer]) -> Buckets:
    """Return the buckets of the stage's gradients; none without replicas."""
    if stage.replicas == 1:
        return Buckets((), ())
    order = sorted(stage.layers)
    known = layer_costs.with_options(stage.options).profile.layers
    # Groups that recompute right before their own backward are part of it, but for one with which
    # it begins.
    layers = [known[index] for index in order]
    again_s = {
        order.index(max(group)): sum(known[index].forward_s for index in group)
        for group in stage.options.recompute
        if max(group) != order[-1]
    }
    return buckets_of(layers, copied, again_s)


def gradients_bytes(layer_costs: LayerCosts, stage: Candidate, names: Iterable[str]) -> int:
    """Return the bytes of the gradients of layers that one rank of a stage has, or would have."""
    layers = layer_costs.with_options(stage.options).profile.layers
    return sum(layers[layer_costs.position[name]].gradient_bytes for name in names)


def exchanged_bytes(
    layer_costs: LayerCosts, stages: Sequence[Candidate], depths: Sequence[int] | None = None
) -> list[int]:
    """Return for each stage the bytes of shared weights' gradients that one replica holds for their
    exchange.

    They are the messages that it sends, one per replica of the other stage that it serves, and one
    that it receives. With `depths` of 1f1b, a stage that is ahead of others holds these and its own
    gradients for as many rounds more.
    """
    found: dict[tuple[int, int], set[str]] = {}
    for weight in shared_in(layer_costs, stages):
        # The profile counts a weight in the first layer that uses it.
        found.setdefault(weight.stages, set()).add(weight.layers[0])

    held = [0] * len(stages)
    for (one, other), names in found.items():
        for own, peer in ((one, other), (other, one)):
            size = gradients_bytes(layer_costs, stages[own], names)
            ahead = 0
            if depths is not None:
                ahead = lag(list(found), depths, own)
            served = -(-stages[peer].replicas // stages[own].replicas)
            held[own] += size * (served * (ahead + 1) + ahead + 1)

    return held


def _names(layer_costs: LayerCosts, stages: Sequence[Candidate]) -> list[list[str]]:
    layers = layer_costs.profile.layers
    return [[layers[index].name for index in sorted(stage.layers)] for stage in stages]


def sent_bytes(layer_costs: LayerCosts, stages: Sequence[Candidate], *, divides: bool) -> float:
    """Count the bytes that all workers send per minibatch for duplicated weights.

    Replicas all-reduce the gradients of duplicates, and of all shared weights whole even where the
    optimizer is sharded. Each replica of a stage gets the gradients of the other stages with which
    it shares weights.
    """
    sent = 0.0
    shared = shared_in(layer_costs, stages)
    for number, (stage, copied) in enumerate(
        zip(stages, copied_in(layer_costs, stages), strict=True)
    ):
        pairs = {(weight.stages, weight.layers[0]) for weight in shared if number in weight.stages}
        ring = 2 * (stage.replicas - 1) * sum(layer.gradient_bytes for layer in copied)
        if stage.options.shards_optimizer:
            ring += (stage.replicas - 1) * gradients_bytes(
                layer_costs, stage, {name for _, name in pairs}
            )
        received = stage.replicas * gradients_bytes(layer_costs, stage, [name for _, name in pairs])
        sent += (ring + received) / (1 if divides else stage.replicas)

    return sent
