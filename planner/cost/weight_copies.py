"""Cost of duplicated shared weights. Profiles count a shared weight once, in the first layer that
uses it.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from planner.cost.candidate import Candidate
from planner.cost.layer_costs import LayerCosts
from planner.cost.network.link import Buckets, buckets_of
from planner.cost.overheads import Price
from planner.cost.setting import Setting
from planner.errors import InfeasibleError
from planner.formats.plan_parts import StageMemory
from planner.formats.profile import DegreeCosts, Layer, Profile
from planner.plan.shared_weights import (
    SharedWeight,
    copied_layers,
    shared_weights,
    trained_parameters,
)
from planner.schedule.versions import lag
from planner.units import format_bytes

_OF_A_WEIGHT = ("update_s", "accumulate_s", "weight_bytes", "gradient_bytes", "optimizer_bytes")


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

    def counted(columns: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
        more = {
            name: [sum(columns[name][n] for n in places) for places in again]
            for name in _OF_A_WEIGHT
        }
        more["buffer_bytes"] = [*columns["buffer_bytes"]]
        for layer, other, times in held:
            more["buffer_bytes"][layer] += times * columns["gradient_bytes"][other]
        return {name: tuple(column) for name, column in more.items()}

    def counted_at(costs: DegreeCosts) -> DegreeCosts:
        by_tokens = costs.by_tokens and counted_at(costs.by_tokens)
        return costs.model_copy(update={**counted(vars(costs)), "by_tokens": by_tokens})

    names = (*_OF_A_WEIGHT, "buffer_bytes")
    columns = counted({name: [getattr(layer, name) for layer in profile.layers] for name in names})
    rows = ({name: columns[name][number] for name in names} for number in place.values())
    layers = (layer.model_copy(update=row) for layer, row in zip(profile.layers, rows, strict=True))
    tensor = profile.tensor and tuple(map(counted_at, profile.tensor))
    return profile.model_copy(update={"layers": tuple(layers), "tensor": tensor})


def buckets_in(layer_costs: LayerCosts, stage: Candidate, copied: Sequence[Layer]) -> Buckets:
    """Return the buckets of the stage's gradients; none without replicas."""
    if stage.replicas == 1:
        return Buckets((), ())
    order, known = sorted(stage.layers), layer_costs.with_options(stage.options).profile.layers
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
            ahead = 0 if depths is None else lag(list(found), depths, own)
            served = -(-stages[peer].replicas // stages[own].replicas)
            held[own] += size * (served * (ahead + 1) + ahead + 1)
    return held


def _names(layer_costs: LayerCosts, stages: Sequence[Candidate]) -> list[list[str]]:
    layers = layer_costs.profile.layers
    return [[layers[index].name for index in sorted(stage.layers)] for stage in stages]


def copies_fit(
    layer_costs: LayerCosts, stages: Sequence[Candidate], price: Price, setting: Setting
) -> bool:
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
    schedule, memory = setting.schedule, list[StageMemory]()
    exchanged = exchanged_bytes(layer_costs, stages, price.in_flight if schedule.stashes else None)
    for number, (stage, copied) in enumerate(
        zip(stages, copied_in(layer_costs, stages), strict=True)
    ):
        held, versions = price.memory[number], schedule.versions(price.in_flight[number])
        # A duplicate takes its weight's versions, its gradient twice and the optimizer's state.
        optimizer = sum(-(-layer.optimizer_bytes // stage.options.shards) for layer in copied)
        whole = {
            "weights_bytes": held.weights_bytes
            + versions * sum(layer.weight_bytes for layer in copied),
            "gradients_bytes": held.gradients_bytes
            + 2 * sum(layer.gradient_bytes for layer in copied),
            "optimizer_bytes": held.optimizer_bytes + optimizer,
            "communication_bytes": held.communication_bytes + exchanged[number],
        }
        memory.append(held.model_copy(update=whole))
        limit = setting.cluster.memory_of(stage.options.kind)
        if limit is not None and memory[number] != held and memory[number].total_bytes > limit:
            shared = next(
                weight for weight in shared_in(layer_costs, stages) if number in weight.stages
            )
            over = format_bytes(memory[number].total_bytes - limit)
            raise InfeasibleError(
                shared.sentence(
                    f", and what stage {number} holds for that does not fit the memory by {over}"
                ),
                hint="give more memory or more GPUs, or train the two as weights of their own",
            )
    more = _sent_bytes(layer_costs, stages, divides=schedule.divides)
    return replace(
        price, memory=tuple(memory), communication_bytes=price.communication_bytes + more
    )


def _sent_bytes(layer_costs: LayerCosts, stages: Sequence[Candidate], *, divides: bool) -> float:
    """Count the bytes that all workers send per minibatch for duplicated weights.

    Replicas all-reduce the gradients of duplicates, and of all shared weights whole even where the
    optimizer is sharded. Each replica of a stage gets the gradients of the other stages with which
    it shares weights.
    """
    sent, shared = 0.0, shared_in(layer_costs, stages)
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
