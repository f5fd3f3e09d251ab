"""Chains of made-up layers, for benchmarks that draw their models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from planner.formats.profile import Device, Edge, Layer, Profile, Provenance, Value


def layer(name: str, forward_s: float, output_bytes: int, weight_bytes: int, **more: Any) -> Layer:
    """Return a layer whose backward takes twice its forward and whose gradients have the size of
    what they are of.

    Args:
        name: of the layer, and of its output.
        forward_s: seconds.
        output_bytes: that it sends, and keeps for its backward.
        weight_bytes: of its weights.
        more: other fields of `Layer`.
    """
    fields: dict[str, Any] = {
        "backward_s": 2 * forward_s,
        "update_s": 0.0,
        "outputs": (Value(name=name, output_bytes=output_bytes, gradient_bytes=output_bytes),),
        "gradient_bytes": weight_bytes,
        "saved_bytes": output_bytes,
    }
    return Layer(
        name=name, op="op", forward_s=forward_s, weight_bytes=weight_bytes, **fields | more
    )


def chain(layers: Sequence[Layer], tool: str, **more: Any) -> Profile:
    """Return the profile of a model in which each layer feeds the next, and the last one feeds
    none.

    Args:
        layers: from `layer`.
        tool: the benchmark, for the profile's provenance.
        more: other fields of `Profile`.
    """
    *others, last = layers
    edges = tuple(
        Edge(source=one.name, value=one.name, target=other.name) for one, other in pairwise(layers)
    )
    return Profile(
        model="random",
        graph_hash="0",
        device=Device(kind="cpu", name="imagined"),
        microbatch_size=1,
        layers=(*others, last.model_copy(update={"outputs": ()})),
        edges=edges,
        provenance=Provenance(tool=tool, source="estimated"),
        **more,
    )
