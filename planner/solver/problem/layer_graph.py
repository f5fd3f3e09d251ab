"""The graph of a model's layers, and its *downsets*: sets of layers that contain all predecessors
of their layers.

Layers that feed one another in one order have a downset for each place in it. Two branches of 10
layers side by side have 121, Inception v3 has 221,565, and NASNet more than can be listed. So they
are listed up to a limit, or those that differ least from one of them.

Two rules leave some out. The layer with the loss is in the last stage. And the users of a value, or
of a weight, are in stages in their order, so that gradients add up as in one process: see
`planner.plan.sums`. Imported profiles are never trained, and their values may have users in any
order.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import LayerCosts
from planner.cost.work import Floats
from planner.plan.shared_weights import trained_parameters
from planner.solver.problem.states import column, uncut_groups

Flags = NDArray[np.bool_]


class LayerGraph:
    """The graph of the groups of layers that no cut may separate; most groups have one layer.

    A set of groups is a number here, with a bit for each group.
    """

    def __init__(self, layer_costs: LayerCosts) -> None:
        self.layer_costs = layer_costs
        self.groups = uncut_groups(layer_costs)
        self._group_of = {
            layer: number for number, group in enumerate(self.groups) for layer in group
        }

        # By group, the set of those that it needs, and of those that it feeds.
        self._needs = [0] * len(self.groups)
        self._feeds = [0] * len(self.groups)
        for value in layer_costs.traffic:
            producer = self._group_of[value.producer]
            for user in self._groups_of(value.users):
                if user != producer:
                    self._connect(producer, user)

        # The loss comes last.
        *others, last = range(len(self.groups))
        for group in others:
            if not self._feeds[group]:
                self._connect(group, last)

        # The users of each value with several, and which of them a downset may have; and by group,
        # those of the values that it is a user of.
        self._orders: list[_Order] = []
        self._orders_of: list[list[_Order]] = [[] for _ in self.groups]
        for users in self._users_in_order():
            self._keep_order(users)

    def _connect(self, producer: int, user: int) -> None:
        self._needs[user] |= 1 << producer
        self._feeds[producer] |= 1 << user

    def _users_in_order(self) -> Iterator[list[int]]:
        """Yield groups that keep their order, ascending: see `planner.plan.sums`."""
        if self.layer_costs.profile.trainable:
            for value in self.layer_costs.traffic:
                if value.gradient_bytes:
                    yield self._groups_of(value.users)

        users: dict[str, set[int]] = {}
        for layer, weights in trained_parameters(self.layer_costs.profile).items():
            for weight in weights:
                users.setdefault(weight, set()).add(self.layer_costs.position[layer])

        for layers in users.values():
            yield self._groups_of(layers)

    def _keep_order(self, users: Sequence[int]) -> None:
        if len(users) < 2:
            return

        first = [sum(1 << user for user in users[:count]) for count in range(len(users) + 1)]
        order = _Order(first[-1], frozenset(first))
        self._orders.append(order)
        for user in users:
            self._orders_of[user].append(order)

    def _groups_of(self, layers: Iterable[int]) -> list[int]:
        return sorted({self._group_of[layer] for layer in layers})

    @property
    def everything(self) -> int:
        """The set of all groups."""
        return (1 << len(self.groups)) - 1

    def of_layers(self, layers: Iterable[int]) -> int:
        """Return the set of the groups of these layers."""
        return sum(1 << group for group in self._groups_of(layers))

    def downsets(self, most: int) -> list[int] | None:
        """Return all downsets, smaller ones first; None if there are more than `most`. O(downsets ·
        groups).
        """
        found = [0]
        level = {0: self._border_of(0)}  # those of one size
        while level:
            larger: dict[int, _Border] = {}
            for downset, border in level.items():
                for group in _members(border.may_enter):
                    changed = downset | 1 << group
                    if changed not in larger and self._keeps_order(changed, group):
                        larger[changed] = self._after_entry(border, changed, group)
                if len(found) + len(larger) > most:
                    return None

            found += larger
            level = larger

        return found

    def nearest(self, downset: int, most: int) -> set[int]:
        """Return the downsets that differ least from one, in seconds of the groups that only one of
        the two has.
        """
        queue = [(0.0, downset)]
        borders = {downset: self._border_of(downset)}
        nearest: set[int] = set()
        while queue and len(nearest) < most:
            distance_s, near = heapq.heappop(queue)
            nearest.add(near)
            border = borders[near]

            for group in _members(border.may_enter | border.may_leave):
                changed = near ^ 1 << group
                if changed in borders or not self._keeps_order(changed, group):
                    continue

                enters = _has(changed, group)
                if enters:
                    borders[changed] = self._after_entry(border, changed, group)
                else:
                    borders[changed] = self._after_leaving(border, changed, group)

                step_s = self._seconds[group]
                if enters == _has(downset, group):
                    step_s = -step_s
                heapq.heappush(queue, (distance_s + step_s, changed))

        return nearest

    def with_groups_moved(self, downset: int, most: int) -> set[int]:
        """Return the downsets that one group makes of this one, and all that must go with it: those
        that differ least.

        A group outside enters with all its predecessors, a group inside leaves with all that it
        leads to.
        """
        moved = {downset}
        for group in range(len(self.groups)):
            changed = self._with_group_moved(downset, group)
            if self._keeps_orders(changed, changed ^ downset):
                moved.add(changed)

        if len(moved) <= most:
            return moved

        every = sorted(moved)
        seconds = np.array(self._seconds)
        distances_s = self._by_group([each ^ downset for each in every]) @ seconds
        return {every[place] for place in np.argsort(distances_s, kind="stable")[:most]}

    def _with_group_moved(self, downset: int, group: int) -> int:
        if _has(downset, group):
            return downset & ~self._led_to[group]
        return downset | self._predecessors[group]

    def flags(self, downsets: Sequence[int]) -> Flags:
        """Return downsets as rows of flags, one for each layer."""
        by_group = self._by_group(downsets) > 0
        group_of = [self._group_of[layer] for layer in range(len(self._group_of))]
        return np.ascontiguousarray(by_group[:, group_of])

    def _by_group(self, downsets: Sequence[int]) -> NDArray[np.uint8]:
        count = len(self.groups)
        size = -(-count // 8)
        content = b"".join(downset.to_bytes(size, "little") for downset in downsets)
        packed = np.frombuffer(content, dtype=np.uint8).reshape(len(downsets), size)
        return np.unpackbits(packed, axis=1, bitorder="little", count=count)

    def _border_of(self, downset: int) -> "_Border":
        may_enter = 0
        may_leave = 0
        for group, needs in enumerate(self._needs):
            if _has(downset, group):
                may_leave |= (not self._feeds[group] & downset) << group
            else:
                may_enter |= (not needs & ~downset) << group

        return _Border(may_enter, may_leave)

    def _after_entry(self, border: "_Border", downset: int, group: int) -> "_Border":
        """Return the border of a downset that a group has entered."""
        own = 1 << group
        may_enter = border.may_enter & ~own
        for user in _members(self._feeds[group]):
            may_enter |= (not self._needs[user] & ~downset) << user
        return _Border(may_enter, border.may_leave & ~self._needs[group] | own)

    def _after_leaving(self, border: "_Border", downset: int, group: int) -> "_Border":
        """Return the border of a downset that a group has left."""
        own = 1 << group
        may_leave = border.may_leave & ~own
        for producer in _members(self._needs[group]):
            may_leave |= (not self._feeds[producer] & downset) << producer
        return _Border(border.may_enter & ~self._feeds[group] | own, may_leave)

    def _keeps_order(self, downset: int, group: int) -> bool:
        """Return whether the users of the values that a group uses are in order."""
        return all(order.allows(downset) for order in self._orders_of[group])

    def _keeps_orders(self, downset: int, groups: int) -> bool:
        """Return whether the users of the values that a set of groups uses are in order."""
        return all(order.allows(downset) for order in self._orders if order.users & groups)

    def seconds_led_to(self, seconds: Floats) -> Floats:
        """Return, for each group, the sum of the seconds of it and of all groups that it
        leads to.
        """
        return np.asarray(self._by_group(self._led_to) @ seconds)

    @cached_property
    def _predecessors(self) -> list[int]:
        """Each group and all that lead to it."""
        found: list[int] = []
        for group, needs in enumerate(self._needs):
            before = 1 << group
            for producer in _members(needs):
                before |= found[producer]
            found.append(before)

        return found

    @cached_property
    def _led_to(self) -> list[int]:
        """Each group and all that it leads to."""
        found = [0] * len(self.groups)
        for group in reversed(range(len(self.groups))):
            after = 1 << group
            for user in _members(self._feeds[group]):
                after |= found[user]
            found[group] = after

        return found

    @cached_property
    def _seconds(self) -> list[float]:
        """Seconds of each group, and a little more for each layer, so that those without time
        count, too.
        """
        layers_s = seconds_of_layers(self.layer_costs)
        little_s = float(layers_s.mean()) or 1.0
        return [float(np.sum(layers_s[list(group)] + little_s)) for group in self.groups]


class _Order(NamedTuple):
    """The users of a value, and the sets of them that a downset may have: the first few."""

    users: int
    possible: frozenset[int]

    def allows(self, downset: int) -> bool:
        """Return whether a downset has a possible set of them."""
        return downset & self.users in self.possible


class _Border(NamedTuple):
    """The groups that may enter a downset, and those that may leave it."""

    may_enter: int
    may_leave: int


def _has(groups: int, group: int) -> bool:
    """Return whether a set has a group."""
    return bool(groups >> group & 1)


def _members(groups: int) -> Iterator[int]:
    """Yield the groups of a set, ascending."""
    while groups:
        lowest = groups & -groups
        yield lowest.bit_length() - 1
        groups ^= lowest


def seconds_of_layers(layer_costs: LayerCosts) -> Floats:
    """Return the compute time of each layer: forward, backward and update."""
    times = [column(layer_costs, name) for name in ("forward_s", "backward_s", "update_s")]
    return np.asarray(np.sum(times, axis=0))
