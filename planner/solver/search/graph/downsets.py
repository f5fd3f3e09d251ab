"""Spaces of downsets: the cuts of a branching model.

A model with branches has far more cuts than layers (some 200,000 for Inception-v3). Most of them are hopeless: too many
bytes cross them, or they divide the work so that no plan is faster than a known one. Both can be seen from the cut
alone, so hopeless cuts are dropped before any stage is looked at. The search over the rest still decides whether any
plan beats the known one.
"""

import numpy as np
from numpy.typing import NDArray

from planner.cost.candidate import Traffic
from planner.cost.layer_costs import LayerCosts
from planner.cost.work import Floats, Integers
from planner.solver.problem.budget import NO_HURRY, Deadline, OutOfTimeError
from planner.solver.problem.states import COUNTED, FRONTS, StateSpace, column
from planner.solver.search.graph.lattice import Words, enumerate_covers, to_bits, to_words

_BLOCK = 16_384
_TICKS = 2.0**50  # units of time in a model's compute time: sums of whole numbers are exact


class Downsets(StateSpace):
    """Some downsets of the graph, among them the empty one and the whole."""

    def __init__(self, layer_costs: LayerCosts, words: Words, complete: bool, order: Integers | None = None) -> None:
        """Order the downsets, a row of `words` each, and sum up their layers.

        `order` is that of other costs of the same layers, so that states have the same numbers in both.
        """
        count = len(layer_costs.profile.layers)
        bits = to_bits(words, count)
        quantities = np.stack([ticks(layer_costs), *(column(layer_costs, name) for name in COUNTED)])
        sums = _weighted(quantities, bits.T)
        # Order by compute time and size, so that every downset comes after those it contains, and states within a range
        # of time are a range of numbers; then by content, so that answers are repeatable.
        by_time = np.lexsort((*words.T, bits.sum(axis=1, dtype=np.int64), sums[0]))
        self.order = by_time if order is None else order
        self._words = words[self.order]
        self._columns = np.ascontiguousarray(bits[self.order].T)  # a row of zeros and ones per layer
        fronts = np.zeros((len(FRONTS), len(words)))
        if layer_costs.traffic:
            weights = [value.amounts for value in layer_costs.traffic]
            fronts = _weighted(
                np.stack(weights, axis=1), np.array([self._live(value) for value in layer_costs.traffic])
            )
        super().__init__(layer_costs, dict(zip(COUNTED, sums[1:, self.order], strict=True)), fronts)
        self.complete = complete
        self._producers = [value.producer for value in layer_costs.traffic]
        self._users = to_words([value.users for value in layer_costs.traffic], count)
        self._weights = [value.amounts for value in layer_costs.traffic]

    def among_later(self, state: int, others: Integers) -> Integers:
        own = self._words[state]
        contains = np.ones(len(others), dtype=bool)
        for word in np.flatnonzero(own):
            contains &= (self._words[others, word] & own[word]) == own[word]
        return others[contains]

    def holds(self, layer: int) -> NDArray[np.bool_]:
        return np.asarray(self._columns[layer] > 0)

    def passing(self, state: int, others: Integers) -> Floats | None:
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
        return tuple(np.flatnonzero(self._columns[:, other] > self._columns[:, state]).tolist())

    def only(self, states: Integers, *, complete: bool = False) -> "Downsets":
        return Downsets(self.layer_costs, self._words[states], complete)

    def _live(self, value: Traffic) -> NDArray[np.bool_]:
        used = np.bitwise_and.reduce(self._columns[list(value.users)], axis=0)
        return np.asarray(self._columns[value.producer] > used)


def enumerate_downsets(layer_costs: LayerCosts, most: int, deadline: Deadline = NO_HURRY) -> Words | None:
    """Return every downset that ends at no forbidden place; None if there are more than `most`, or no time for them."""
    try:
        covers = enumerate_covers(layer_costs, most, deadline)
    except OutOfTimeError:
        return None
    return None if covers is None else covers.words


def ticks(layer_costs: LayerCosts) -> Floats:
    """Return each layer's share of the compute time as a whole number, so that sums are the same in any order."""
    layers_s = np.sum([column(layer_costs, name) for name in ("forward_s", "backward_s", "update_s")], axis=0)
    return np.asarray(np.rint(layers_s / max(layers_s.sum(), np.finfo(float).tiny) * _TICKS))


def _weighted(weights: Floats, columns: NDArray[np.uint8] | NDArray[np.bool_]) -> Floats:
    """Sum over each state's layers, for each row of weights; in blocks, because bits become floats on the way."""
    sums = np.empty((len(weights), columns.shape[-1]))
    for start in range(0, sums.shape[1], _BLOCK):
        block = slice(start, start + _BLOCK)
        sums[:, block] = weights @ columns[:, block].astype(np.float64)
    return sums
