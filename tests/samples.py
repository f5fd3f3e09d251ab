"""Small profiles with round numbers, for tests that check by hand."""

from __future__ import annotations

from itertools import pairwise

from planner.formats.profile import Device, Edge, Layer, Profile, Provenance, Value


def layer(
    name: str,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    output_bytes: int = 0,
    weight_bytes: int = 0,
    update_s: float = 0.0,
    saved_bytes: int = 0,
    gradient: bool = True,
) -> Layer:
    """A layer with one output, called as the layer, where it has bytes."""
    value = Value(
        name=name, output_bytes=output_bytes, gradient_bytes=output_bytes if gradient else 0
    )
    return Layer(
        name=name,
        op="op",
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=update_s,
        outputs=(value,) if output_bytes else (),
        weight_bytes=weight_bytes,
        gradient_bytes=weight_bytes,
        saved_bytes=saved_bytes,
    )


def profile(
    *layers: Layer,
    edges: list[tuple[str, str]] | None = None,
    no_cut_after: tuple[str, ...] = (),
    microbatch_size: int = 4,
) -> Profile:
    """A profile of a chain, or with the given edges."""
    if edges is None:
        edges = [(one.name, other.name) for one, other in pairwise(layers) if one.outputs]
    return Profile(
        model="sample",
        graph_hash="0123",
        device=Device(kind="cpu", name="imagined", threads=1),
        dtype="float32",
        microbatch_size=microbatch_size,
        layers=layers,
        edges=tuple(Edge(source=source, value=source, target=target) for source, target in edges),
        no_cut_after=no_cut_after,
        provenance=Provenance(tool="tests", source="estimated"),
    )
