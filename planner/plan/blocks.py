"""Recognise a model's repeated blocks, as transformers have, by the names of layers and their equal
costs.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from statistics import median

from planner.formats.profile import Layer, Profile

# "model.layers.3.mlp.up_proj" belongs to "model.layers.3": the outermost element of a list of
# modules.
_EXPERTS = re.compile(r"(^|\.)experts(\.|_\d|$)")
BLOCK = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")


def blocks_of(profile: Profile) -> list[range]:
    """Divide the layers into the elements of the model's lists of modules; others belong to the
    block before.
    """
    return _blocks([layer.name for layer in profile.layers])


def units_of_stage(
    layers: Sequence[str], recompute: Iterable[Sequence[str]]
) -> list[tuple[str, ...]]:
    """Divide a stage's layers, by name, into groups that recompute together, and the blocks between
    these.
    """
    block_of: dict[str, object] = {
        name: number
        for number, block in enumerate(_blocks(layers))
        for name in layers[block.start : block.stop]
    }
    block_of |= {name: tuple(group) for group in recompute for name in group}
    return [tuple(unit) for _, unit in groupby(layers, key=block_of.__getitem__)]


def sharded_units(
    layers: Sequence[str], recompute: Iterable[Sequence[str]]
) -> list[tuple[str, ...]]:
    """Divide a stage's layers, by name, into the units whose weights `fully_shard` gathers at once:
    those of `units_of_stage`, but a block's experts, with what follows them in it, are a unit of
    their own. They have most of its weights, and so less is gathered at a time.
    """
    again = {tuple(group) for group in recompute}
    units = []
    for unit in units_of_stage(layers, again):
        first = next((place for place, name in enumerate(unit) if _EXPERTS.search(name)), 0)
        if unit in again or first == 0:
            units.append(unit)
        else:
            units += [unit[:first], unit[first:]]

    return units


def recomputes_parts(layers: Sequence[str], recompute: Iterable[Sequence[str]]) -> bool:
    """Return whether of what a stage has of some block a part recomputes, and the rest does not;
    layers outside of lists of modules do not count.
    """
    again = {name for group in recompute for name in group}
    blocks: dict[str | None, list[str]] = defaultdict(list)
    for block, name in zip(_block_names(layers), layers, strict=True):
        blocks[block].append(name)
    blocks.pop(None, None)
    return any(again.intersection(each) and not again.issuperset(each) for each in blocks.values())


def _blocks(layers: Sequence[str]) -> list[range]:
    keys = _block_names(layers)
    before = next((key for key in keys if key is not None), None)
    for position, key in enumerate(keys):
        before = keys[position] = key or before
    return [block for _, block in _runs(keys)]


def _block_names(layers: Sequence[str]) -> list[str | None]:
    matches = [BLOCK.match(name) for name in layers]
    return [None if match is None else match[0] for match in matches]


def _runs(keys: Sequence[str | None]) -> Iterator[tuple[str | None, range]]:
    stop = 0
    for key, group in groupby(keys):
        start = stop
        stop = stop + len(list(group))
        yield key, range(start, stop)


FEWEST_REPEATS = 4  # equal blocks that make a repetition
FEWEST_LAYERS = 4  # of a block: a shorter one is a layer rather than a block
# share of the model's computation in repeated blocks, from which on blocks are what it is made of
MOST_OF_IT = 0.5
# by how much the times of equal blocks may differ from their median: measurements vary
ALIKE = 0.25


def block_ends(profile: Profile) -> frozenset[int]:
    """Return the positions of the layers after which a block, or what is before, between or behind
    blocks, ends.
    """
    ends = {end - 1 for block in repeated_blocks(profile) for end in (block.start, block.stop)}
    return frozenset(ends) - {-1, len(profile.layers) - 1}


def repeated_blocks(profile: Profile) -> list[range]:
    """Return the positions of the layers of each block; none for a model that is not mostly
    repeated blocks.
    """
    keys = _block_names([layer.name for layer in profile.layers])
    before = None
    for position, key in enumerate(keys):
        # A layer that belongs to no module, such as an addition, is in the block around it.
        following = next((each for each in keys[position:] if each is not None), None)
        before = keys[position] = key or (before if before == following else None)

    blocks = [block for key, block in _runs(keys) if key is not None]
    if _share(profile.layers, blocks) >= MOST_OF_IT:
        return blocks
    return []


def _share(layers: Sequence[Layer], blocks: Sequence[range]) -> float:
    """Return the share of the layers' time that equal blocks of several layers take."""
    total_s = sum(map(_seconds, layers))
    if total_s <= 0:
        return 0.0

    alike: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for block in blocks:
        if len(block) >= FEWEST_LAYERS:
            inside = layers[block.start : block.stop]
            alike[tuple(map(kind_of, inside))].append(sum(map(_seconds, inside)))

    repeated_s = 0.0
    for times_s in alike.values():
        middle_s = median(times_s)
        equal = [each for each in times_s if abs(each - middle_s) <= ALIKE * middle_s]
        if len(equal) >= FEWEST_REPEATS:
            repeated_s += sum(equal)

    return repeated_s / total_s


def kind_of(layer: Layer) -> tuple[object, ...]:
    """Return the layer's operation and shapes: what equal layers have in common."""
    # Without what it saves: a value that all blocks use is saved once, by the first of them.
    outputs = tuple((value.output_bytes, value.gradient_bytes) for value in layer.outputs)
    return layer.op, layer.weight_bytes, layer.gradient_bytes, outputs


def _seconds(layer: Layer) -> float:
    return layer.forward_s + layer.backward_s
