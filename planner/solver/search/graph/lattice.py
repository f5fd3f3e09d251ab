"""The lattice of a graph's downsets: every cut, and which groups of layers lead from one cut to another.

A downset covers another if it has one group of layers more. Along the covers, finding the least of any quantity over
all downsets that contain a given one takes O(covers), though there are far more pairs: take the groups from the last to
the first, and let every downset that can admit the group inherit from the one that has it (the zeta transform of a
distributive lattice: Björklund et al., "Fast zeta transforms for lattices with few irreducibles", SODA 2012).

Where a graph has too many cuts to list, those near given cuts are.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import LayerCosts
from planner.cost.work import Floats, Integers
from planner.solver.problem.budget import NO_HURRY, Deadline
from planner.solver.problem.states import uncut_groups


class Groups:
    """The graph of a profile's uncut groups of layers."""

    def __init__(self, layer_costs: LayerCosts) -> None:
        self.layers = uncut_groups(layer_costs)
        self.group_of = {layer: number for number, group in enumerate(self.layers) for layer in group}
        self.needs: list[set[int]] = [set() for _ in self.layers]
        self.feeds: list[set[int]] = [set() for _ in self.layers]
        for value in layer_costs.traffic:
            producer = self.group_of[value.producer]
            users = {self.group_of[user] for user in value.users} - {producer}
            self.feeds[producer] |= users
            for user in users:
                self.needs[user].add(producer)


def around(layer_costs: LayerCosts, cuts: Sequence[Sequence[int]], most: int) -> Words:
    """Return both ends and about `most` downsets that differ least, in compute time, from one of the cuts."""
    graph = Groups(layer_costs)
    layers = layer_costs.profile.layers
    times = [layer.forward_s + layer.backward_s + layer.update_s for layer in layers]
    little_s = sum(times) / len(times)  # added to each layer, so that layers without time count, too
    weights = [sum(times[index] + little_s for index in group) for group in graph.layers]
    masks = {0, (1 << len(graph.layers)) - 1}
    for cut in cuts:
        masks |= _nearest(graph, weights, frozenset(graph.group_of[layer] for layer in cut), most // len(cuts))
    return words_of_groups(sorted(masks), graph.layers)


def _nearest(graph: Groups, weights: Sequence[float], cut: frozenset[int], most: int) -> set[int]:
    """Return the downsets nearest to the cut: each step adds or removes one group."""
    start = sum(1 << group for group in cut)
    addable = frozenset(g for g, needs in enumerate(graph.needs) if g not in cut and needs <= cut)
    removable = frozenset(g for g in cut if not graph.feeds[g] & cut)
    queue: list[tuple[float, int, frozenset[int], frozenset[int], frozenset[int]]] = [
        (0.0, start, cut, addable, removable)
    ]
    seen, found = {start}, set[int]()
    while queue and len(found) < most:
        distance, mask, inside, addable, removable = heapq.heappop(queue)
        found.add(mask)
        for group in addable | removable:
            if (changed := mask ^ (1 << group)) in seen:
                continue
            seen.add(changed)
            if group in addable:
                now = inside | {group}
                more = frozenset(g for g in graph.feeds[group] if graph.needs[g] <= now)
                steps = (addable - {group} | more, removable - graph.needs[group] | {group})
            else:
                now = inside - {group}
                free = frozenset(g for g in graph.needs[group] if not graph.feeds[g] & now)
                steps = (addable - graph.feeds[group] | {group}, removable - {group} | free)
            away = distance + (weights[group] if (group in addable) != (group in cut) else -weights[group])
            heapq.heappush(queue, (away, changed, now, *steps))
    return found


_WORD = 64
_FEW_STATES = 400  # up to this many, looking at all pairs is quicker than following the covers
Words = NDArray[np.uint64]


@dataclass(frozen=True)
class Covers:
    """Downsets as bit sets, and their covers: the lower downset, the upper one, and the group that it has more."""

    words: Words
    lower: Integers
    upper: Integers
    group: Integers


class Lattice:
    """The covers between states, in an order in which every state comes after those it contains."""

    def __init__(self, covers: Covers, order: Integers) -> None:
        self._states, self._groups = len(order), int(covers.group.max()) + 1
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        # Group and lower state make one number, so that a group's covers within a range of states are a range.
        keys = covers.group * len(order) + rank[covers.lower]
        sort = np.argsort(keys)
        self._keys, self._lower, self._upper = keys[sort], rank[covers.lower[sort]], rank[covers.upper[sort]]
        self._within_each: NDArray[np.bool_] | None = None  # whether the row's state is in the column's
        if self._states <= _FEW_STATES:
            words = covers.words[order]
            self._within_each = ((words[:, None] & words[None, :]) == words[:, None]).all(axis=2)

    def least_above(self, values: Floats, start: int) -> int:
        """Replace each value by the least over all states from it upwards, in place.

        Args:
            values: of the states from `start` on, as far as they matter.

        Returns:
            The number of covers looked at.
        """
        if self._within_each is not None:
            span = slice(start, start + len(values))
            values[:] = np.where(self._within_each[span, span], values[None, :], np.inf).min(axis=1)
            return values.size**2
        visited, stop, bases = 0, start + len(values), np.arange(self._groups) * self._states
        firsts, ends = np.searchsorted(self._keys, bases + start), np.searchsorted(self._keys, bases + stop)
        for group in np.flatnonzero(ends > firsts)[::-1]:
            part = slice(firsts[group], ends[group])
            lower, upper = self._lower[part] - start, self._upper[part] - start
            if int(upper.max()) >= len(values):
                inside = upper < len(values)
                lower, upper = lower[inside], upper[inside]
            values[lower] = np.minimum(values[lower], values[upper])
            visited += len(lower)
        return visited


_enumerated: WeakKeyDictionary[LayerCosts, tuple[int, Covers | None]] = WeakKeyDictionary()


def enumerate_covers(layer_costs: LayerCosts, most: int, deadline: Deadline = NO_HURRY) -> Covers | None:
    """Return every downset that ends at no forbidden place; None if there are more than `most`. O(downsets · width).

    The last answer for a model is kept as long as its costs exist, because a search may need it twice.

    Raises:
        OutOfTimeError: if the deadline passes before they are known.
    """
    if layer_costs not in _enumerated or _enumerated[layer_costs][0] != most:
        _enumerated[layer_costs] = most, _covers(layer_costs, most, deadline)
    return _enumerated[layer_costs][1]


def _covers(layer_costs: LayerCosts, most: int, deadline: Deadline) -> Covers | None:
    graph = Groups(layer_costs)
    needs, feeds = [sum(1 << other for other in needs) for needs in graph.needs], graph.feeds
    masks, lowers, uppers, admitted = [0], [], [], []
    level = {0: 0}  # downsets of equal size, with their numbers
    ready = {0: tuple(number for number, need in enumerate(needs) if not need)}  # groups that each can admit
    while level:
        deadline.check()
        larger: dict[int, int] = {}
        larger_ready: dict[int, tuple[int, ...]] = {}
        # Level by level: a downset is found again by its bits, whichever of its groups was added last.
        for mask, state in level.items():
            can = ready[mask]
            for group in can:
                upper = mask | 1 << group
                if (number := larger.get(upper)) is None:
                    number = larger[upper] = len(masks)
                    masks.append(upper)
                    opened = [other for other in feeds[group] if needs[other] & ~upper == 0]
                    larger_ready[upper] = (*(other for other in can if other != group), *opened)
                lowers.append(state)
                uppers.append(number)
                admitted.append(group)
        if len(masks) > most:
            return None
        level, ready = larger, larger_ready
    return Covers(words_of_groups(masks, graph.layers), np.array(lowers), np.array(uppers), np.array(admitted))


def words_of_groups(masks: Sequence[int], groups: Sequence[tuple[int, ...]]) -> Words:
    """Convert bit sets of groups to bit sets of layers."""
    if any(len(group) > 1 for group in groups):
        layers = [sum(1 << layer for layer in group) for group in groups]
        masks = [sum(bits for number, bits in enumerate(layers) if mask >> number & 1) for mask in masks]
    return words_of_masks(masks, sum(len(group) for group in groups))


def to_words(sets: Sequence[Sequence[int]], count: int) -> Words:
    """Convert sets of positions below `count` to bit sets, a row of 64-bit words each."""
    return words_of_masks([sum(1 << index for index in each) for each in sets], count)


def to_bits(words: Words, count: int) -> NDArray[np.uint8]:
    """Convert bit sets to rows of zeros and ones."""
    return np.unpackbits(words.view(np.uint8), axis=1, bitorder="little", count=count)


def words_of_masks(masks: Sequence[int], count: int) -> Words:
    """Convert bit sets given as integers to rows of 64-bit words."""
    words = (count + _WORD - 1) // _WORD
    content = b"".join(mask.to_bytes(words * (_WORD // 8), "little") for mask in masks)
    return np.frombuffer(content, dtype="<u8").reshape(len(masks), words).astype(np.uint64)
