"""Recognise a model's repeated blocks: runs of layers with equal operations, shapes and costs, as transformers have.

The names of layers say where a block begins: "model.layers.3.mlp.up_proj" belongs to "model.layers.3". Where names say
nothing, the shortest sequence of layers that repeats itself over most of the model is its block, and begins where the
fewest bytes cross.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import median

import numpy as np

from planner.formats.profile import Layer, Profile

# "model.layers.3.mlp.up_proj" belongs to "model.layers.3": the outermost element of a list of modules.
BLOCK = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")


def blocks_of(profile: Profile) -> list[range]:
    """Divide the layers into the model's blocks, by position: the elements of its lists of modules.

    Layers between two blocks belong to the earlier one, and those before the first block to the first. So an embedding
    runs with the first block and the head with the last, as in most training frameworks. A model without lists is a
    single block.
    """
    keys = _block_names(profile.layers)
    before = next((key for key in keys if key is not None), None)
    for position, key in enumerate(keys):
        before = keys[position] = key or before
    return [block for _, block in _runs(keys)]


def _block_names(layers: Sequence[Layer]) -> list[str | None]:
    matches = [BLOCK.match(layer.name) for layer in layers]
    return [None if match is None else match[0] for match in matches]


def _runs(keys: Sequence[str | None]) -> Iterator[tuple[str | None, range]]:
    """Yield each run of equal keys with its positions."""
    stop = 0
    for key, group in groupby(keys):
        start, stop = stop, stop + len(list(group))
        yield key, range(start, stop)


FEWEST_REPEATS = 4  # equal blocks that make a repetition
FEWEST_LAYERS = 4  # of a block: a shorter one is a layer rather than a block
MOST_OF_IT = 0.5  # share of the model's computation in repeated blocks, from which on blocks are what it is made of
ALIKE = 0.25  # by how much the times of equal blocks may differ from their median: measurements vary


def block_ends(profile: Profile) -> frozenset[int]:
    """Return the positions of the layers after which a block ends or the next begins; none without repeated blocks.

    What stands before, between and behind the blocks (an embedding, a head) is divided from them as well.
    """
    ends = {end - 1 for block in repeated_blocks(profile) for end in (block.start, block.stop)}
    return frozenset(ends) - {-1, len(profile.layers) - 1}


def repeated_blocks(profile: Profile) -> list[range]:
    """Return the positions of the layers of each block; none for a model that is not mostly repeated blocks.

    Blocks that are named alike count even where they differ from the others, as T5's first ones do.
    """
    if not profile.trainable:  # other orders of an imported graph are cuts as well
        return []
    for blocks in (_by_names(profile.layers), _by_kinds(profile)):
        if _share(profile.layers, blocks) >= MOST_OF_IT:
            return blocks
    return []


def _by_names(layers: Sequence[Layer]) -> list[range]:
    """Return the runs of layers that belong to the same element of a list of modules."""
    keys = _block_names(layers)
    before: str | None = None
    for position, key in enumerate(keys):
        # A layer that belongs to no module, such as an addition, is in the block around it.
        following = next((each for each in keys[position:] if each is not None), None)
        before = keys[position] = key or (before if before == following else None)
    return [block for key, block in _runs(keys) if key is not None]


def _by_kinds(profile: Profile) -> list[range]:
    """Return the repetitions of the shortest sequence of kinds of layers that covers most layers.

    Where whole blocks are single layers, that is one layer: several of them are no block.
    """
    numbers: dict[object, int] = {}
    kinds = np.array([numbers.setdefault(kind_of(layer), len(numbers)) for layer in profile.layers])
    best_start, best_stop, best_period = 0, 0, 1
    for period in range(1, len(kinds) // FEWEST_REPEATS + 1):
        start = 0
        for same, group in groupby((kinds[:-period] == kinds[period:]).tolist()):
            count = len(list(group))
            if same and count + period > best_stop - best_start + period // 2:
                best_start, best_stop, best_period = start, start + count + period, period
            start += count
    crossing = _crossing_bytes(profile)
    first = min(range(best_start, best_start + best_period), key=lambda position: (crossing[position], position))
    count = (best_stop - first) // best_period
    return [range(first + number * best_period, first + (number + 1) * best_period) for number in range(count)]


def _crossing_bytes(profile: Profile) -> list[int]:
    """Return, for each position, the bytes that cross a cut before it."""
    position = {layer.name: number for number, layer in enumerate(profile.layers)}
    last_user: dict[tuple[str, str], int] = defaultdict(int)
    for edge in profile.edges:
        key = edge.source, edge.value
        last_user[key] = max(last_user[key], position[edge.target])
    changes = [0] * (len(profile.layers) + 1)
    for number, layer in enumerate(profile.layers):
        for value in layer.outputs:
            if (layer.name, value.name) in last_user:
                changes[number + 1] += value.output_bytes
                changes[last_user[layer.name, value.name] + 1] -= value.output_bytes
    return [int(total) for total in np.cumsum(changes)]


def _share(layers: Sequence[Layer], blocks: Sequence[range]) -> float:
    """Return the share of the computation in blocks that equal enough others."""
    alike: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for block in blocks:
        if len(block) >= FEWEST_LAYERS:
            inside = layers[block.start : block.stop]
            alike[tuple(map(kind_of, inside))].append(sum(map(_seconds, inside)))
    repeated_s = 0.0
    for times_s in alike.values():
        middle_s = median(times_s)
        equal = [each for each in times_s if abs(each - middle_s) <= ALIKE * middle_s]
        repeated_s += sum(equal) if len(equal) >= FEWEST_REPEATS else 0.0
    total_s = sum(map(_seconds, layers))
    return repeated_s / total_s if total_s > 0 else 0.0


def kind_of(layer: Layer) -> tuple[object, ...]:
    """Return the layer's operation and shapes: what equal layers have in common.

    What it saves is left out: a value that all blocks use is saved once, by the first of them.
    """
    outputs = tuple((value.output_bytes, value.gradient_bytes) for value in layer.outputs)
    return layer.op, layer.weight_bytes, layer.gradient_bytes, outputs


def _seconds(layer: Layer) -> float:
    return layer.forward_s + layer.backward_s
