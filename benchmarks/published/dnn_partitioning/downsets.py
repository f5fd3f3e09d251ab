"""The cuts of a graph: its downsets, the sets of layers that contain all predecessors of their
layers.

A downset is a bit set of layer positions, a row of 64-bit words. The product's plans have cuts
along the profile's order alone; the published workloads ask for the best of all cuts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import LayerCosts
from planner.cost.work import Floats
from planner.solver.problem.states import column, uncut_groups

Words = NDArray[np.uint64]
_WORD = 64
_TICKS = 2.0**50  # units of time in a model's compute time: sums of whole numbers are exact


def enumerate_downsets(layer_costs: LayerCosts, most: int) -> Words | None:
    """Return every downset that ends at no forbidden place, smaller ones first; None if there are
    more than `most`.

    O(downsets · width).
    """
    groups = uncut_groups(layer_costs)
    group_of = {layer: number for number, group in enumerate(groups) for layer in group}
    needs, feeds = [0] * len(groups), [set[int]() for _ in groups]
    for value in layer_costs.traffic:
        producer = group_of[value.producer]
        for user in {group_of[user] for user in value.users} - {producer}:
            needs[user] |= 1 << producer
            feeds[producer].add(user)
    masks = [0]
    # groups that each can admit
    level = {0: tuple(number for number, need in enumerate(needs) if not need)}
    while level:
        larger: dict[int, tuple[int, ...]] = {}
        # Level by level: a downset is found again by its bits, whichever of its groups was added
        # last.
        for mask, can in level.items():
            for group in can:
                upper = mask | 1 << group
                if upper not in larger:
                    opened = [other for other in feeds[group] if needs[other] & ~upper == 0]
                    larger[upper] = (*(other for other in can if other != group), *opened)
        masks += larger
        if len(masks) > most:
            return None
        level = larger
    if len(group_of) > len(groups):  # from bit sets of groups to bit sets of layers
        layers = [sum(1 << layer for layer in group) for group in groups]
        masks = [
            sum(bits for number, bits in enumerate(layers) if mask >> number & 1) for mask in masks
        ]
    return _words_of_masks(masks, len(group_of))


def to_words(sets: Sequence[Sequence[int]], count: int) -> Words:
    """Convert sets of positions below `count` to bit sets, a row each."""
    return _words_of_masks([sum(1 << index for index in each) for each in sets], count)


def to_bits(words: Words, count: int) -> NDArray[np.uint8]:
    """Convert bit sets to rows of zeros and ones."""
    return np.unpackbits(words.view(np.uint8), axis=1, bitorder="little", count=count)


def ticks(layer_costs: LayerCosts) -> Floats:
    """Return each layer's share of the compute time as a whole number, so that sums are the same in
    any order.
    """
    layers_s = np.sum(
        [column(layer_costs, name) for name in ("forward_s", "backward_s", "update_s")], axis=0
    )
    return np.asarray(np.rint(layers_s / max(layers_s.sum(), np.finfo(float).tiny) * _TICKS))


def _words_of_masks(masks: Sequence[int], count: int) -> Words:
    words = (count + _WORD - 1) // _WORD
    content = b"".join(mask.to_bytes(words * (_WORD // 8), "little") for mask in masks)
    return np.frombuffer(content, dtype="<u8").reshape(len(masks), words).astype(np.uint64)
