"""All cuts of a branching model: the downsets of its graph, and the exact search's space over those worth a look.

A model with branches has far more cuts than layers (some 200,000 for Inception-v3), most of them hopeless: they cross
too many bytes, or divide the work so that GPUs must idle longer than a known plan leaves them time for. Both show from
the cut alone, so hopeless ones are dropped before stages are considered, and the search over the rest still decides
whether anything beats the known plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel, Floats, Integers
from planner.pricing import Ledger, Traffic
from planner.solver.states import COUNTED, StateSpace, column, uncut_groups, value_weights

_WORD = 64
_BLOCK = 16_384
_SLACK = 1e-9
Words = NDArray[np.uint64]


class Downsets(StateSpace):
    """Some downsets of the graph, among them the empty one and the whole."""

    def __init__(self, ledger: Ledger, words: Words, complete: bool) -> None:
        """Args:
        words: a downset per row, as a bit set of layer positions.
        complete: whether no downset that matters is missing.
        """
        count = len(ledger.profile.layers)
        bits = to_bits(words, count)
        # By size, so that every downset stands after those it contains; then by content, for repeatable answers.
        order = np.lexsort((*words.T, bits.sum(axis=1)))
        self._words = words[order]
        self._columns = np.ascontiguousarray(bits[order].T)  # a row of zeros and ones per layer
        quantities = np.stack([column(ledger, name) for name in COUNTED])
        sums = dict(zip(COUNTED, self._weighted(quantities), strict=True))
        fronts = np.zeros((4, len(words)))
        for value in ledger.traffic:
            weights = value_weights(value.output_bytes, value.gradient_bytes)
            fronts[:, self._live(value)] += weights[:, None]
        super().__init__(ledger, sums, fronts)
        self.complete = complete
        self._producers = [value.producer for value in ledger.traffic]
        self._users = to_words([value.users for value in ledger.traffic], count)
        self._weights = [value_weights(value.output_bytes, value.gradient_bytes) for value in ledger.traffic]

    def among_later(self, state: int, others: Integers) -> Integers:
        """Supersets, by their bits."""
        own = self._words[state]
        contains = np.ones(len(others), dtype=bool)
        for word in np.flatnonzero(own):
            contains &= (self._words[others, word] & own[word]) == own[word]
        return others[contains]

    def passing(self, state: int, others: Integers) -> Floats | None:
        """Live values none of whose users stands between the state and the others."""
        by = np.zeros((len(self._fronts), len(others)))
        own = self._words[state]
        needed = ((own & self._users) != self._users).any(axis=1) & (self._columns[self._producers, state] > 0)
        for number in np.flatnonzero(needed):
            users = self._users[number]
            untouched = np.ones(len(others), dtype=bool)
            for word in np.flatnonzero(users):
                untouched &= (self._words[others, word] & users[word]) == (own[word] & users[word])
            by += untouched * self._weights[number][:, None]
        return by

    def layers(self, state: int, other: int) -> tuple[int, ...]:
        """By their bits."""
        return tuple(int(index) for index in np.flatnonzero(self._columns[:, other] > self._columns[:, state]))

    def worth(self, model: CostModel, gpus: int, target_s: float) -> Integers:
        """The states at which a plan for `gpus` within the target may cut."""
        before_s = model.least_s(self.work(0, np.arange(len(self))))
        before, after = model.fewest_around_cut(self._outputs, self._gradients, target_s)
        before = np.maximum(before, np.ceil(before_s / target_s - _SLACK))
        after = np.maximum(after, np.ceil((before_s[-1] - before_s) / target_s - _SLACK))
        keep = np.maximum(before, 1) + np.maximum(after, 1) <= gpus
        keep[[0, -1]] = True
        return np.flatnonzero(keep)

    def nearest(self, states: Integers, cuts: Sequence[Sequence[int]], most: int) -> Integers:
        """Of the states, about `most` that differ least from one of the cuts (layers before it), and both ends.

        Layers count by their compute time, and a little by themselves.
        """
        layers_s = sum(column(self.ledger, name) for name in ("forward_s", "backward_s", "update_s"))
        weights = np.asarray(layers_s / np.mean(layers_s) + 1.0)
        chosen = {0, len(self) - 1}
        for cut in cuts:
            sign = np.ones(len(weights))
            sign[list(cut)] = -1
            distance = self._weighted((weights * sign)[None, :])[0][states]
            chosen.update(states[np.argsort(distance, kind="stable")[: most // len(cuts)]].tolist())
        return np.array(sorted(chosen))

    def only(self, states: Integers, complete: bool) -> Downsets:
        """A space of these states, which must include both ends."""
        return Downsets(self.ledger, self._words[states], complete)

    def _weighted(self, weights: Floats) -> Floats:
        """Sums over each state's layers, for each row of weights; in blocks, since bits become floats for it."""
        sums = np.empty((len(weights), self._columns.shape[1]))
        for start in range(0, sums.shape[1], _BLOCK):
            block = slice(start, start + _BLOCK)
            sums[:, block] = weights @ self._columns[:, block].astype(np.float64)
        return sums

    def _live(self, value: Traffic) -> NDArray[np.bool_]:
        """The downsets at which a value is made and still needed."""
        used = np.bitwise_and.reduce(self._columns[list(value.users)], axis=0)
        return np.asarray(self._columns[value.producer] > used)


def enumerate_downsets(ledger: Ledger, most: int) -> Words | None:
    """Every downset that cuts no forbidden place; None when there are more than `most`.

    Each is reached once, by the order in which a depth-first walk admits groups: O(downsets · width).
    """
    groups = uncut_groups(ledger)
    group_of = {layer: number for number, group in enumerate(groups) for layer in group}
    needs = [0] * len(groups)
    for value in ledger.traffic:
        for user in value.users:
            if group_of[user] != group_of[value.producer]:
                needs[group_of[user]] |= 1 << group_of[value.producer]
    found = {0}
    level = [0]  # downsets of equal size
    feeds: list[list[int]] = [[] for _ in groups]
    for number, need in enumerate(needs):
        for other in range(number):
            if need >> other & 1:
                feeds[other].append(number)
    ready = {0: frozenset(number for number, need in enumerate(needs) if not need)}
    while level:
        following: dict[int, frozenset[int]] = {}
        for downset in level:
            for number in ready[downset]:
                larger = downset | 1 << number
                if larger not in following:
                    opened = {other for other in feeds[number] if needs[other] & ~larger == 0}
                    following[larger] = ready[downset] - {number} | opened
        ready = following
        level = list(following)
        found.update(level)
        if len(found) > most:
            return None
    masks = sorted(found)
    layers = [sum(1 << layer for layer in group) for group in groups]
    if all(len(group) == 1 for group in groups):
        return _words_of_masks(masks, len(ledger.profile.layers))
    expanded = [sum(bits for number, bits in enumerate(layers) if mask >> number & 1) for mask in masks]
    return _words_of_masks(expanded, len(ledger.profile.layers))


def to_words(sets: Sequence[Sequence[int]], count: int) -> Words:
    """Bit sets of positions below `count`, a row of 64-bit words each."""
    return _words_of_masks([sum(1 << index for index in each) for each in sets], count)


def to_bits(words: Words, count: int) -> NDArray[np.uint8]:
    """The rows of bit sets as rows of zeros and ones."""
    return np.unpackbits(words.view(np.uint8), axis=1, bitorder="little", count=count)


def _words_of_masks(masks: Sequence[int], count: int) -> Words:
    words = (count + _WORD - 1) // _WORD
    content = b"".join(mask.to_bytes(words * (_WORD // 8), "little") for mask in masks)
    return np.frombuffer(content, dtype="<u8").reshape(len(masks), words).astype(np.uint64)
