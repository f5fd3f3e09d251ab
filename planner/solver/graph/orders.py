"""Choose some cuts of a graph that has too many to list: those along a few orders, and those near given cuts."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from planner.cost.layer_costs import LayerCosts
from planner.solver.chain.states import uncut_groups
from planner.solver.graph.lattice import Words, words_of_groups


class Groups:
    """The graph of a profile's uncut groups of layers."""

    def __init__(self, layer_costs: LayerCosts) -> None:
        self.layers = uncut_groups(layer_costs)
        self.group_of = {layer: number for number, group in enumerate(self.layers) for layer in group}
        self.needs: list[set[int]] = [set() for _ in self.layers]
        self.feeds: list[set[int]] = [set() for _ in self.layers]
        # Values that groups send to others: bytes, and the groups that use them.
        self.makes: list[list[tuple[int, set[int]]]] = [[] for _ in self.layers]
        for value in layer_costs.traffic:
            producer = self.group_of[value.producer]
            users = {self.group_of[user] for user in value.users} - {producer}
            if users:
                self.makes[producer].append((value.sent_bytes + value.returned_bytes, users))
            self.feeds[producer] |= users
            for user in users:
                self.needs[user].add(producer)


def depth_first(layer_costs: LayerCosts) -> list[tuple[int, ...]]:
    """Return the groups in an order that follows each branch to its end before it begins the next."""
    opened: dict[int, int] = {}

    def latest(ready: set[int], graph: Groups, done: set[int]) -> int:
        # Groups get their number when they become ready; the last one opened belongs to the branch being followed.
        for group in sorted(ready, reverse=True):
            opened.setdefault(group, len(opened))
        return max(ready, key=lambda group: opened[group])

    return _ordered(layer_costs, latest)


def fewest_live_bytes(layer_costs: LayerCosts) -> list[tuple[int, ...]]:
    """Return the groups in an order that adds the fewest live bytes at each step."""

    def leanest(ready: set[int], graph: Groups, done: set[int]) -> int:
        def growth(group: int) -> tuple[int, int]:
            made = sum(size for size, _ in graph.makes[group])
            freed = sum(
                size
                for source in graph.needs[group]
                for size, users in graph.makes[source]
                if group in users and users - done == {group}
            )
            return made - freed, group

        return min(ready, key=growth)

    return _ordered(layer_costs, leanest)


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


def _ordered(layer_costs: LayerCosts, choose: Callable[[set[int], Groups, set[int]], int]) -> list[tuple[int, ...]]:
    graph = Groups(layer_costs)
    missing = [len(needs) for needs in graph.needs]
    ready, done, order = {group for group, needs in enumerate(missing) if not needs}, set[int](), []
    while ready:
        group = choose(ready, graph, done)
        ready.remove(group)
        done.add(group)
        order.append(graph.layers[group])
        for user in graph.feeds[group]:
            missing[user] -= 1
            if not missing[user]:
                ready.add(user)
    return order
