"""Cuts of a graph with branches: its downsets as states of the search, instead of the first layers
in its order.
"""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import LayerCosts
from planner.cost.work import Floats, Integers
from planner.solver.problem.layer_graph import Flags, seconds_of_layers
from planner.solver.problem.states import COUNTED, FRONTS, CutSpace, column

_TICKS = 2.0**50  # units of time in a model's compute time: sums of whole numbers are exact
_WORD = 64


class Downsets(CutSpace):
    """Some downsets of a graph, among them the empty one and the whole."""

    def __init__(self, layer_costs: LayerCosts, inside: Flags) -> None:
        """Take the downsets, a row of flags each, in any order."""
        # 1. Each comes after those it contains: by compute time, then by size, then by content for
        #    repeatable answers.
        words = _words(inside)
        ticks = inside @ _ticks(layer_costs)
        sizes = inside.sum(axis=1)
        order = np.lexsort((*words.T, sizes, ticks))
        self._inside = inside[order]
        self._words = words[order]

        # 2. Sums over the layers of each, and what is live there.
        sums: dict[str, Floats] = {}
        for name in COUNTED:
            sums[name] = self._inside @ column(layer_costs, name)
        self._count_uses(layer_costs)
        live = self._made & (self._used < self._users[:, None])
        super().__init__(layer_costs, sums, self._amounts @ live)

        self.compute_s = np.maximum.accumulate(self.compute_s)  # sums are rounded
        self._contained: dict[int, Flags] = {}

    def _count_uses(self, layer_costs: LayerCosts) -> None:
        """Count, for each value and state, whether it is made there, and how many of its
        users are.
        """
        traffic = layer_costs.traffic
        layers = self._inside.shape[1]
        uses = np.zeros((len(traffic), layers))
        for number, value in enumerate(traffic):
            uses[number, list(value.users)] = 1

        producers = [value.producer for value in traffic]
        self._users = uses.sum(axis=1)
        self._used = uses @ self._inside.T
        self._made = self._inside.T[producers]

        self._amounts = np.zeros((len(FRONTS), 0))
        if traffic:
            self._amounts = np.stack([value.amounts for value in traffic], axis=1)

    def spread(self, most: int) -> Integers:
        steps = np.linspace(0, len(self._in_order) - 1, most).astype(np.int64)
        return np.asarray(self._in_order[np.unique(steps)])

    def rough(self, most: int) -> Integers | None:
        if len(self._in_order) < len(self):
            return self.spread(most)
        return None

    @cached_property
    def _in_order(self) -> Integers:
        """The states that have the first layers in the profile's order."""
        sizes = self._inside.sum(axis=1)
        last = self._inside.shape[1] - np.argmax(self._inside[:, ::-1], axis=1)
        states: Integers = np.flatnonzero((sizes == 0) | (last == sizes))
        return states

    def only(self, states: Integers) -> "Downsets":
        return Downsets(self.layer_costs, self._inside[states])

    def holds(self, layer: int) -> Flags:
        return self._inside[:, layer]

    def containing(self, state: int, ends: Integers) -> Integers:
        if state not in self._contained:
            own = self._words[state]
            self._contained[state] = ((self._words & own) == own).all(axis=1)
        return ends[self._contained[state][ends]]

    def between(self, state: int, end: int) -> Integers:
        inner = self.containing(state, np.arange(state + 1, end))
        outside = self._words[inner] & ~self._words[end]
        within: Flags = ~outside.any(axis=1)
        return inner[within]

    def cuts_at(self, targets_s: Floats) -> list[int] | None:
        cuts = list[int]()
        last = len(self) - 1
        for target_s in targets_s:
            between = self.between(cuts[-1] if cuts else 0, last)
            if not len(between):
                return None
            distances_s = np.abs(self.compute_s[between] - target_s)
            cuts.append(int(between[distances_s.argmin()]))

        return cuts

    def state_of(self, layers: frozenset[int]) -> int | None:
        flags = np.zeros((1, self._inside.shape[1]), dtype=bool)
        flags[0, list(layers)] = True
        same = np.flatnonzero((self._words == _words(flags)).all(axis=1))
        return int(same[0]) if len(same) else None

    def span(self, state: int, end: int) -> tuple[int, ...]:
        return tuple(np.flatnonzero(self._inside[end] & ~self._inside[state]).tolist())

    def passing(self, state: int, ends: Integers) -> Floats | None:
        """Sum what is live at the state and has as many users in each other one."""
        used = self._used[:, state]
        live = np.flatnonzero(self._made[:, state] & (used < self._users))
        if not len(live):
            return None

        unused = self._used[np.ix_(live, ends)] == used[live, None]
        return np.asarray(self._amounts[:, live] @ unused)

    def _working(self, state: int, ends: Integers) -> tuple[Floats, Floats, Floats]:
        """Compute what `planner.cost.work.working_bytes` does, of stages with gaps in the profile's
        order.
        """
        at_work = self.layer_costs.at_work
        if at_work is None:
            nothing = np.asarray(0.0)
            return nothing, nothing, nothing

        # By stage and layer: what is kept up to a layer, and the gradients of those before it.
        saved, gradients, workspaces, updates = at_work
        members = self._inside[ends] & ~self._inside[state]
        kept = np.cumsum(members * saved, axis=1)
        own_gradients = members * gradients
        missing = np.cumsum(own_gradients, axis=1) - own_gradients

        def peak(bytes_: Floats, nothing: float = -np.inf) -> Floats:
            """Return the most bytes while a layer of each stage is at work."""
            of_members = np.where(members, bytes_, nothing)
            return np.asarray(of_members.max(axis=1))

        total = kept[:, -1]
        working = peak(kept + workspaces - missing) - total
        accumulating = peak(kept + workspaces + gradients) - total
        return working, accumulating, peak(updates, 0.0)


def _words(flags: Flags) -> NDArray[np.uint64]:
    """Return rows of flags as rows of 64-bit words."""
    packed = np.packbits(flags, axis=1, bitorder="little")
    missing = -packed.shape[1] % (_WORD // 8)
    padded = np.ascontiguousarray(np.pad(packed, ((0, 0), (0, missing))))
    return padded.view(np.uint64)


def _ticks(layer_costs: LayerCosts) -> Floats:
    """Return each layer's share of the compute time as a whole number, so that sums are the same in
    any order.
    """
    layers_s = seconds_of_layers(layer_costs)
    return np.asarray(np.rint(layers_s / max(layers_s.sum(), np.finfo(float).tiny) * _TICKS))
