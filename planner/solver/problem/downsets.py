"""Cuts of a graph with branches: sets of layers that contain all predecessors of their layers, its *downsets*.

A graph whose layers feed one another in one order has a downset for each place in it. Two branches of 10 layers side
by side have 121, Inception v3 has 221,565, and NASNet more than can be listed. So they are listed up to a limit, or
those that differ least from a few of them.

A downset is a row of flags here, one for each layer.
"""

import heapq
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import LayerCosts
from planner.cost.work import Floats, Integers
from planner.solver.problem.states import COUNTED, FRONTS, CutSpace, column, uncut_groups

Flags = NDArray[np.bool_]

_TICKS = 2.0**50  # units of time in a model's compute time: sums of whole numbers are exact
_WORD = 64


class LayerGraph:
    """The graph of the groups of layers that no cut may separate; most groups have one layer.

    A set of groups is a number, with a bit for each group.
    """

    def __init__(self, layer_costs: LayerCosts) -> None:
        self.layer_costs = layer_costs
        self.groups = uncut_groups(layer_costs)
        self.group_of = {layer: number for number, group in enumerate(self.groups) for layer in group}
        self.needs = [0] * len(self.groups)
        self.feeds: list[set[int]] = [set() for _ in self.groups]
        for value in layer_costs.traffic:
            producer = self.group_of[value.producer]
            users = {self.group_of[user] for user in value.users} - {producer}
            self.feeds[producer] |= users
            for user in users:
                self.needs[user] |= 1 << producer

    @property
    def everything(self) -> int:
        return (1 << len(self.groups)) - 1

    def downsets(self, most: int) -> list[int] | None:
        """Return all downsets, smaller ones first; None if there are more than `most`. O(downsets · width)."""
        found = [0]
        # Of each set of one size, the groups that it can admit.
        level = {0: tuple(group for group, need in enumerate(self.needs) if not need)}
        while level:
            larger: dict[int, tuple[int, ...]] = {}
            for downset, admitted in level.items():
                for group in admitted:
                    upper = downset | 1 << group
                    if upper in larger:
                        continue
                    opened = [other for other in self.feeds[group] if not self.needs[other] & ~upper]
                    larger[upper] = (*(other for other in admitted if other != group), *opened)
                if len(found) + len(larger) > most:
                    return None
            found += larger
            level = larger
        return found

    def nearest(self, downset: int, most: int) -> set[int]:
        """Return the downsets that differ least from one, in seconds of the groups that one of the two has alone."""
        distances = [(0.0, downset)]
        seen = {downset}
        nearest: set[int] = set()
        while distances and len(nearest) < most:
            distance, near = heapq.heappop(distances)
            nearest.add(near)
            for group in self._movable(near):
                changed = near ^ 1 << group
                if changed in seen:
                    continue
                seen.add(changed)
                nearer = (changed ^ downset) >> group & 1 == 0
                step_s = -self._seconds[group] if nearer else self._seconds[group]
                heapq.heappush(distances, (distance + step_s, changed))
        return nearest

    def _movable(self, downset: int) -> Iterable[int]:
        """Yield the groups that may leave or enter a downset, which is a downset after that, too."""
        for group, need in enumerate(self.needs):
            if downset >> group & 1:
                if not self._feeding[group] & downset:
                    yield group
            elif not need & ~downset:
                yield group

    @cached_property
    def _feeding(self) -> list[int]:
        """The groups that each feeds, as a set."""
        return [sum(1 << user for user in users) for users in self.feeds]

    @cached_property
    def _seconds(self) -> list[float]:
        """Seconds of each group, and a little more, so that those without time count, too."""
        layers_s = _layers_s(self.layer_costs)
        little_s = float(layers_s.mean()) or 1.0
        return [float(layers_s[list(group)].sum()) + little_s for group in self.groups]

    def of_layers(self, layers: Iterable[int]) -> int:
        """Return the set of the groups of these layers."""
        return sum(1 << group for group in {self.group_of[layer] for layer in layers})

    def flags(self, downsets: Sequence[int]) -> Flags:
        """Return downsets as rows of flags."""
        count = len(self.groups)
        size = -(-count // 8)
        content = b"".join(downset.to_bytes(size, "little") for downset in downsets)
        packed = np.frombuffer(content, dtype=np.uint8).reshape(len(downsets), size)
        by_group = np.unpackbits(packed, axis=1, bitorder="little", count=count)
        group_of = [self.group_of[layer] for layer in range(len(self.group_of))]
        return np.ascontiguousarray(by_group[:, group_of] > 0)


class Downsets(CutSpace):
    """Some downsets of a graph, among them the empty one and the whole."""

    def __init__(self, layer_costs: LayerCosts, inside: Flags) -> None:
        """Take the downsets, a row of flags each, in any order."""
        # Each comes after those it contains: by compute time, then by size, then by content for repeatable answers.
        words = _words(inside)
        ticks = inside @ _ticks(layer_costs)
        order = np.lexsort((*words.T, inside.sum(axis=1), ticks))
        self._inside = inside[order]
        self._words = words[order]

        columns = {name: column(layer_costs, name) for name in COUNTED}
        sums = {name: self._inside @ each for name, each in columns.items()}
        self._count_uses(layer_costs)
        fronts = self._amounts @ (self._made & (self._used < self._users[:, None]))
        super().__init__(layer_costs, sums, fronts)
        self.compute_s = np.maximum.accumulate(self.compute_s)  # sums are rounded
        self._contained: dict[int, Flags] = {}

    def _count_uses(self, layer_costs: LayerCosts) -> None:
        """Count, for each value and state, whether it is made there, and how many of its users are."""
        traffic = layer_costs.traffic
        uses = np.zeros((len(traffic), self._inside.shape[1]))
        for number, value in enumerate(traffic):
            uses[number, list(value.users)] = 1
        self._users = uses.sum(axis=1)
        self._used = uses @ self._inside.T
        self._made = self._inside.T[[value.producer for value in traffic]]
        amounts = [value.amounts for value in traffic]
        self._amounts = np.stack(amounts, axis=1) if amounts else np.zeros((len(FRONTS), 0))

    def spread(self, most: int) -> Integers:
        steps = np.linspace(0, len(self._in_order) - 1, most).astype(np.int64)
        return self._in_order[np.unique(steps)]

    def rough(self, most: int) -> Integers | None:
        return self.spread(most) if len(self._in_order) < len(self) else None

    @cached_property
    def _in_order(self) -> Integers:
        """The states that have the first layers in the profile's order."""
        sizes = self._inside.sum(axis=1)
        last = self._inside.shape[1] - np.argmax(self._inside[:, ::-1], axis=1)
        return np.flatnonzero((sizes == 0) | (last == sizes))

    def only(self, states: Integers) -> "Downsets":
        return Downsets(self.layer_costs, self._inside[states])

    def holds(self, layer: int) -> Flags:
        return self._inside[:, layer]

    def containing(self, state: int, others: Integers) -> Integers:
        if state not in self._contained:
            own = self._words[state]
            self._contained[state] = ((self._words & own) == own).all(axis=1)
        return others[self._contained[state][others]]

    def between(self, state: int, other: int) -> Integers:
        inner = self.containing(state, np.arange(state + 1, other))
        outside = self._words[inner] & ~self._words[other]
        return inner[~outside.any(axis=1)]

    def state_of(self, layers: frozenset[int]) -> int | None:
        flags = np.zeros((1, self._inside.shape[1]), dtype=bool)
        flags[0, list(layers)] = True
        same = np.flatnonzero((self._words == _words(flags)).all(axis=1))
        return int(same[0]) if len(same) else None

    def span(self, state: int, other: int) -> tuple[int, ...]:
        return tuple(np.flatnonzero(self._inside[other] & ~self._inside[state]).tolist())

    def passing(self, state: int, others: Integers) -> Floats | None:
        """Sum what is live at the state and has as many users in each other one."""
        used = self._used[:, state]
        live = np.flatnonzero(self._made[:, state] & (used < self._users))
        if not len(live):
            return None
        unused = self._used[np.ix_(live, others)] == used[live, None]
        return np.asarray(self._amounts[:, live] @ unused)

    def _working(self, state: int, others: Integers) -> tuple[Floats, Floats, Floats]:
        """Compute what `planner.cost.work.working_bytes` does, of stages with gaps in the profile's order."""
        at_work = self.layer_costs.at_work
        if at_work is None:
            nothing = np.asarray(0.0)
            return nothing, nothing, nothing
        own = self._inside[others] & ~self._inside[state]
        saved, gradients, workspaces, updates = at_work
        kept = np.cumsum(own * saved, axis=1)
        missing = np.cumsum(own * gradients, axis=1) - own * gradients
        peaks = np.where(own, kept + workspaces - missing, -np.inf)
        accumulating = np.where(own, kept + workspaces + gradients, -np.inf)
        total = kept[:, -1]
        return (
            peaks.max(axis=1) - total,
            accumulating.max(axis=1) - total,
            np.where(own, updates, 0.0).max(axis=1),
        )


def _words(flags: Flags) -> NDArray[np.uint64]:
    """Return rows of flags as rows of 64-bit words."""
    packed = np.packbits(flags, axis=1, bitorder="little")
    missing = -packed.shape[1] % (_WORD // 8)
    padded = np.ascontiguousarray(np.pad(packed, ((0, 0), (0, missing))))
    return padded.view(np.uint64)


def _layers_s(layer_costs: LayerCosts) -> Floats:
    times = [column(layer_costs, name) for name in ("forward_s", "backward_s", "update_s")]
    return np.asarray(np.sum(times, axis=0))


def _ticks(layer_costs: LayerCosts) -> Floats:
    """Return each layer's share of the compute time as a whole number, so that sums are the same in any order."""
    layers_s = _layers_s(layer_costs)
    return np.asarray(np.rint(layers_s / max(layers_s.sum(), np.finfo(float).tiny) * _TICKS))
