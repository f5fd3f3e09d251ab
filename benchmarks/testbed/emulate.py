"""Turn a profile into an emulated model: slower, and with fewer bytes, as far as this machine
requires.

Times are multiplied by `time_factor`, bytes by `byte_factor`, and link bandwidths by byte_factor /
time_factor. So all ratios of computation to communication stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.testbed.layers import ELEMENT_BYTES, Block, write_model
from planner.formats.cluster import Cluster
from planner.formats.profile import (
    Device,
    Edge,
    Layer,
    Profile,
    Provenance,
    Value,
)
from planner.model.capture.capture import capture_file
from planner.model.capture.graph import LayerGraph
from planner.model.spec import load_model_file

LINK_BYTES_PER_S = 6e6  # of the slowest link: what 16 workers on 2 cores can sustain
LEAST_WHOLE_S = 1.0  # for a minibatch of the whole model
SHARE_S = 0.15  # for a device's share of a minibatch
MOST_BLOCKS = 48  # more are joined, because a sleep per layer costs this machine about 0.1 ms


@dataclass(frozen=True)
class Scale:
    """Emulated seconds per real second, and emulated bytes per real byte."""

    time_factor: float
    byte_factor: float

    def cluster(self, there: Cluster) -> Cluster:
        """Return the emulated links of the real cluster."""
        factor = self.byte_factor / self.time_factor
        levels = (
            level.model_copy(update={"bandwidth_bytes_per_s": level.bandwidth_bytes_per_s * factor})
            for level in there.levels
        )
        return there.model_copy(update={"levels": tuple(levels)})


@dataclass(frozen=True)
class Emulated:
    """A model file of sleeping layers, its profile, and its scale."""

    path: Path
    profile: Profile
    scale: Scale
    original: Profile


def fitting_scale(
    profile: Profile, cluster: Cluster, bytes_per_s: float = LINK_BYTES_PER_S
) -> Scale:
    """Return the scale at which late sleeps hardly matter, and the slowest link has
    `bytes_per_s`.
    """
    seconds = max(LEAST_WHOLE_S, SHARE_S * cluster.gpus)
    whole_s = sum(layer.forward_s + layer.backward_s + layer.update_s for layer in profile.layers)
    time_factor = seconds / whole_s
    return Scale(time_factor, bytes_per_s * time_factor / cluster.slowest_bandwidth_bytes_per_s)


def emulate(profile: Profile, scale: Scale, folder: Path) -> Emulated:
    """Write a model whose times and bytes are scaled.

    Args:
        profile: of a model that may have branches. Its emulated layers are a chain, and what
            crosses a cut is one tensor of as many bytes.
        scale: of times and bytes.
        folder: for the model file.
    """
    chain = joined(as_chain(profile), MOST_BLOCKS)
    size = profile.microbatch_size or 1
    blocks = [
        Block(
            forward_s=block.forward_s * scale.time_factor,
            backward_s=block.backward_s * scale.time_factor,
            update_s=block.update_s * scale.time_factor,
            weight_bytes=round(block.weight_bytes * scale.byte_factor),
            output_bytes=round(block.output_bytes * scale.byte_factor),
        )
        for block in chain
    ]
    path = write_model(blocks, size, folder)
    return Emulated(path, _profile(path, blocks, size, profile.model), scale, profile)


def as_chain(profile: Profile) -> list[Block]:
    """Return the layers in order, joined where no cut is legal; `output_bytes` crosses the cut
    after each.
    """
    position = {layer.name: index for index, layer in enumerate(profile.layers)}
    crossing = [0] * len(profile.layers)
    values = {
        (layer.name, v.name): v.output_bytes for layer in profile.layers for v in layer.outputs
    }
    last_use: dict[tuple[str, str], int] = {}
    for edge in profile.edges:
        key = edge.source, edge.value
        last_use[key] = max(last_use.get(key, 0), position[edge.target])
    for (source, value), last in last_use.items():
        for index in range(position[source], last):
            crossing[index] += values[source, value]
    chain: list[Block] = []
    open_block: Block | None = None
    for layer, output_bytes in zip(profile.layers, crossing, strict=True):
        block = Block(
            layer.forward_s,
            layer.backward_s,
            layer.update_s,
            layer.gradient_bytes,
            output_bytes,
        )
        open_block = block if open_block is None else _together(open_block, block)
        if layer.name not in profile.no_cut_after:
            chain.append(open_block)
            open_block = None
    return chain if open_block is None else [*chain, open_block]


def joined(chain: list[Block], most: int) -> list[Block]:
    """Join neighbours, one pair after the other, until there are at most `most`.

    Pairs that take little time and exchange many bytes come first, because good stages have equal
    times, and few bytes cross their cuts. Time counts more.
    """
    blocks = list(chain)
    while len(blocks) > most:
        costs = [
            (_seconds(a) + _seconds(b)) / max(1, a.output_bytes) ** 0.5 for a, b in pairwise(blocks)
        ]
        index = costs.index(min(costs))
        blocks[index : index + 2] = [_together(blocks[index], blocks[index + 1])]
    return blocks


def _together(one: Block, other: Block) -> Block:
    return Block(
        one.forward_s + other.forward_s,
        one.backward_s + other.backward_s,
        one.update_s + other.update_s,
        one.weight_bytes + other.weight_bytes,
        other.output_bytes,
    )


def _seconds(block: Block) -> float:
    return block.forward_s + block.backward_s + block.update_s


def _profile(path: Path, blocks: Sequence[Block], size: int, name: str) -> Profile:
    """Return the profile that `plan profile` would measure, from the times that the layers are
    given.
    """
    training_spec = load_model_file(str(path))
    graph = capture_file(training_spec, training_spec.example_batch(size))
    return Profile(
        model=name,
        graph_hash=graph.hash,
        device=Device(kind="cpu", name="emulated", threads=1),
        dtype="float32",
        microbatch_size=size,
        layers=tuple(_layers(graph, blocks, size)),
        edges=tuple(
            Edge(source=edge.source, value=edge.value, target=edge.target) for edge in graph.edges
        ),
        provenance=Provenance(tool="benchmarks.testbed", source="estimated"),
    )


def _layers(graph: LayerGraph, blocks: Sequence[Block], size: int) -> Iterator[Layer]:
    """Yield the layers of a captured model that sleeps; the loss behind the last takes no time."""
    parameters = dict(graph.model.named_parameters())
    loss = Block(0.0, 0.0, 0.0, 0, 0)
    for index, layer in enumerate(graph.layers):
        block = blocks[index] if index < len(blocks) else loss
        weight_bytes = sum(ELEMENT_BYTES * parameters[own].numel() for own in layer.parameters)
        made = [graph.specs[node] for node in graph.crossing if graph.owner[node] == index]
        yield Layer(
            name=layer.name,
            op=layer.op,
            forward_s=block.forward_s,
            backward_s=block.backward_s,
            update_s=block.update_s,
            outputs=tuple(
                Value(
                    name=spec.name,
                    output_bytes=spec.size_bytes(size),
                    gradient_bytes=spec.size_bytes(size) if spec.requires_grad else 0,
                )
                for spec in made
            ),
            weight_bytes=weight_bytes,
            gradient_bytes=weight_bytes,
            parameters=layer.parameters,
        )
