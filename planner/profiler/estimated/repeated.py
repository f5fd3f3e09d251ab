"""The profile of a model of which equal blocks were left out, with these blocks again.

A block that was left out has the layers and costs of the block that stands for it, under its own
names. It takes values of the block before it, and of what is outside the list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.formats.files import replace
from planner.formats.profile import DegreeCosts, Edge, Layer, Profile
from planner.model.capture.spared_blocks import SparedBlocks


class UnlikeBlocksError(Exception):
    """Blocks take values of others than the one before."""


def with_spared_blocks(profile: Profile, spared: SparedBlocks) -> Profile:
    """Return the profile of the whole model, which no training has the graph of.

    Raises:
        UnlikeBlocksError: where blocks take values of others than the one before, or the layers of
            one are apart or have too many operations.
    """
    if profile.uncut or profile.no_cut_after:
        raise UnlikeBlocksError
    blocks = _blocks(profile, spared)
    places = _places(profile, blocks, spared)
    layers = tuple(_layer(profile.layers[each.short], each, spared) for each in places)
    return replace(
        profile,
        graph_hash=None,
        layers=layers,
        edges=tuple(_edges(profile, blocks, places, layers)),
    )


def costs_with_spared_blocks(
    costs: DegreeCosts, whole: Profile, spared: SparedBlocks
) -> DegreeCosts:
    """Return the costs of divided layers for those of the whole model, given those of the shorter
    one.
    """
    captured: dict[str, int] = {}
    numbers = []
    for layer in whole.layers:
        block = _block_of(layer.name, spared)
        if block is None or not spared.was_spared(block):
            captured[layer.name] = len(captured)
            numbers.append(captured[layer.name])
        else:
            own = layer.name.removeprefix(f"{spared.path}.{block}")
            numbers.append(captured[f"{spared.path}.{spared.kept_as(block)}{own}"])

    return _at(costs, numbers)


@dataclass(frozen=True)
class _Place:
    """A layer of the whole model.

    Attributes:
        short: its number in the shorter model, or that of the layer that stands for it.
        block: the number of its block; None outside the list.
        offset: its number in the block.
    """

    short: int
    block: int | None = None
    offset: int = 0


def _blocks(profile: Profile, spared: SparedBlocks) -> list[range]:
    """Return the layers of each block of the shorter list."""
    numbers: dict[int, list[int]] = {}
    for number, layer in enumerate(profile.layers):
        block = _block_of(layer.name, spared)
        if block is not None:
            numbers.setdefault(block, []).append(number)

    blocks = [range(own[0], own[-1] + 1) for own in numbers.values()]
    apart = any(len(own) < own[-1] + 1 - own[0] for own in numbers.values())
    between = any(one.stop != other.start for one, other in pairwise(blocks))
    if apart or between or list(numbers) != list(range(spared.blocks - spared.count)):
        raise UnlikeBlocksError
    return blocks


def _block_of(name: str, spared: SparedBlocks) -> int | None:
    """Return the number of a layer's block; None outside the list."""
    found = re.match(re.escape(spared.path) + r"\.(\d+)(\.|$)", name)
    return None if found is None else int(found[1])


def _places(profile: Profile, blocks: Sequence[range], spared: SparedBlocks) -> list[_Place]:
    """Return the layers of the whole model in their order."""
    before = [_Place(number) for number in range(blocks[0].start)]
    inside = [
        _Place(number, block, offset)
        for block in range(spared.blocks)
        for offset, number in enumerate(blocks[spared.kept_as(block)])
    ]
    after = [_Place(number) for number in range(blocks[-1].stop, len(profile.layers))]
    return [*before, *inside, *after]


def _layer(layer: Layer, place: _Place, spared: SparedBlocks) -> Layer:
    """Return a layer under the names of its block; its values keep theirs where it was captured."""
    if place.block is None:
        return layer

    short = f"{spared.path}.{spared.kept_as(place.block)}"
    own = f"{spared.path}.{place.block}"
    values = layer.outputs
    if spared.was_spared(place.block):
        values = tuple(
            replace(value, name=f"{value.name}_of_block_{place.block}") for value in values
        )

    return replace(
        layer,
        name=own + layer.name.removeprefix(short),
        outputs=values,
        parameters=tuple(own + name.removeprefix(short) for name in layer.parameters),
    )


def _edges(
    profile: Profile,
    blocks: Sequence[range],
    places: Sequence[_Place],
    layers: Sequence[Layer],
) -> list[Edge]:
    """Return the edges of the whole model, by the layers that make the values."""
    # 1. What the layers of the shorter model take: the layers that make it, and which of their
    #    values it is.
    numbers = {layer.name: number for number, layer in enumerate(profile.layers)}
    taken: dict[int, list[tuple[int, int]]] = {}
    for edge in profile.edges:
        source = numbers[edge.source]
        values = [value.name for value in profile.layers[source].outputs]
        taken.setdefault(numbers[edge.target], []).append((source, values.index(edge.value)))

    # 2. The same for those of the whole model.
    inside = {(each.block, each.offset): number for number, each in enumerate(places)}
    outside = {each.short: number for number, each in enumerate(places) if each.block is None}
    block_of = {number: block for block, own in enumerate(blocks) for number in own}
    last = max(each.block for each in places if each.block is not None)
    made = []
    for number, place in enumerate(places):
        for source, value in taken.get(place.short, ()):
            maker = outside.get(source)
            if maker is None:
                back = _blocks_back(source, place.short, block_of, len(blocks))
                block = last if place.block is None else place.block - back
                maker = inside.get((block, source - blocks[block_of[source]].start))
            if maker is None or value >= len(layers[maker].outputs):
                raise UnlikeBlocksError
            made.append((maker, value, number))

    return [
        Edge(
            source=layers[maker].name,
            value=layers[maker].outputs[value].name,
            target=layers[number].name,
        )
        for maker, value, number in sorted(made)
    ]


def _blocks_back(source: int, target: int, block_of: Mapping[int, int], blocks: int) -> int:
    """Return how many blocks before the target's the source's is; what is behind the list takes
    values of the last one.
    """
    made = block_of[source]
    back = block_of.get(target, blocks) - made
    if back not in (0, 1):
        raise UnlikeBlocksError
    return back


def _at(costs: DegreeCosts, numbers: Sequence[int]) -> DegreeCosts:
    """Return costs for other layers, each of which has those of the layer of a number."""
    columns: dict[str, object] = {}
    for name in type(costs).model_fields:
        column = getattr(costs, name)
        if isinstance(column, tuple):
            columns[name] = tuple(column[number] for number in numbers)
        elif isinstance(column, DegreeCosts):
            columns[name] = _at(column, numbers)
    return costs.model_copy(update=columns)
