"""What stages exchange: values, and the gradients of weights that several of them train."""

from __future__ import annotations

from collections.abc import Sequence

from planner.cost.layer_costs import Candidate, LayerCosts, messages
from planner.cost.weight_copies import shared_in
from planner.formats.plan import Shared, Transfer
from planner.formats.shared_weights import SharedWeight


def transfers(layer_costs: LayerCosts, stages: Sequence[Candidate]) -> tuple[Transfer, ...]:
    """What each stage sends to which (see `messages`)."""
    return tuple(
        Transfer(
            source=source,
            target=target,
            values=tuple(value.name for value in values),
            output_bytes=sum(value.output_bytes for value in values),
            gradient_bytes=sum(value.gradient_bytes for value in values),
        )
        for (source, target), values in sorted(messages(layer_costs, stages).items())
    )


def shared_between(layer_costs: LayerCosts, stages: Sequence[Candidate]) -> tuple[Shared, ...]:
    """The weights that two stages train, for each two of them."""
    layers = {layer.name: layer for layer in layer_costs.profile.layers}
    found: dict[tuple[int, int], list[SharedWeight]] = {}
    for weight in shared_in(layer_costs, stages):
        found.setdefault(weight.stages, []).append(weight)
    return tuple(
        Shared(
            stages=ends,
            weights=tuple(weight.name for weight in weights),
            # A weight is counted in the first layer that has it.
            gradient_bytes=sum(layers[name].gradient_bytes for name in {weight.layers[0] for weight in weights}),
        )
        for ends, weights in sorted(found.items())
    )
