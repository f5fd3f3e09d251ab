"""The lattice of a graph's downsets: every cut, and which groups of layers lead from one cut to another.

A downset covers another if it has one group of layers more. Along the covers, finding the least of any quantity over
all downsets that contain a given one takes O(covers), though there are far more pairs: take the groups from the last to
the first, and let every downset that can admit the group inherit from the one that has it (the zeta transform of a
distributive lattice: Björklund et al., "Fast zeta transforms for lattices with few irreducibles", SODA 2012).

Where a graph has too many cuts to list, those near given cuts are.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import LayerCosts
from planner.cost.work import Floats, Integers
from planner.schedule.schedule import warm_up_depth
from planner.solver.problem.bounds import Bounds
from planner.solver.problem.budget import NO_HURRY, Deadline
from planner.solver.problem.problem import Limits
from planner.solver.problem.states import StateSpace, uncut_groups
from planner.solver.search.chain.ways import WaysOf, taken


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


def around(layer_costs: LayerCosts, cuts: Sequence[Sequence[int]], most: int) -> "Words":
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
    queue, seen, found = [(0.0, start)], {start}, set[int]()
    while queue and len(found) < most:
        distance, mask = heapq.heappop(queue)
        found.add(mask)
        inside = {group for group in range(len(weights)) if mask >> group & 1}
        for group, weight in enumerate(weights):
            had, changed = group in inside, mask ^ (1 << group)
            legal = not graph.feeds[group] & inside if had else graph.needs[group] <= inside
            if legal and changed not in seen:
                seen.add(changed)
                heapq.heappush(queue, (distance + (weight if had == (group in cut) else -weight), changed))
    return found


_WORD = 64
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

    def least_above(self, values: Floats, start: int) -> int:
        """Replace each value, of states from `start` on, by the least over all from it upwards; return covers seen."""
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


NEVER = 2**30
_SLACK = 1e-13  # of the whole compute time: times that are differences of running sums are known no better
_PER_STEP = 50_000  # what a step costs besides its covers, in covers
_FIRST, _MARGIN = 16, 2  # numbers of GPUs whose work tells of the rest; how many times too much that must be


class OutOfWorkError(Exception):
    """The work that a relaxation may do is used up."""


@dataclass
class WorkLeft:
    """Work left, in covers looked at: a deterministic stand-in for time (about 10^8 a second)."""

    left: int

    def spend(self, covers: int) -> None:
        """Count work, or raise `OutOfWorkError` if nothing is left."""
        self.left -= covers
        if self.left < 0:
            raise OutOfWorkError


class Relaxation:
    """The fewest GPUs after every downset of a graph, at least.

    A stage from I to J on r replicas meets the target T only if some sums p over its layers are at most r·T (its
    compute and all-reduce; its memory likewise). So

        gpus(I) <= k + r  needs  the least p(J) over all J that contain I and have gpus(J) = k  to be  <= p(I) + r·T

    and the lattice yields that least for all I at once. This is exact if a stage's cost is only such sums and a cost of
    each cut alone, as in the published optimizer without a memory limit. Otherwise no plan meets a time that is out of
    reach here. `lattice` has the states of `space`, in its order.
    """

    def __init__(self, space: StateSpace, lattice: Lattice, model: Bounds, limits: Limits, left: WorkLeft) -> None:
        self.space, self.lattice, self.model, self.left = space, lattice, model, left
        self._deadline = limits.deadline
        self.gpus, self.memory_bytes, self.recompute = limits.gpus, limits.memory_bytes, limits.rules.recompute
        ways = WaysOf(space, limits, prices_shards=model.prices_shards)
        self.shards = ways.shards
        everything = np.arange(len(space))
        work = space.work(0, everything)
        nothing = np.asarray(0.0)
        held = space.footprint(0, everything, work)
        self._footprint = replace(held, working_bytes=nothing, updating_bytes=nothing)
        if space.layer_costs.at_work is not None:
            # Saved activations and gradients may never all exist at once, so only the activations count.
            self._footprint = replace(self._footprint, gradient_bytes=np.asarray(0.0))
        self._sums = ways.least(work)
        self.least_s = model.least_s(self._sums)  # of all GPUs together, for what comes before each state
        # Rounding, or another model than the one that ordered the states, may give a larger state less time.
        self._most_up_to_s = np.maximum.accumulate(self.least_s)
        self._least_from_s = np.minimum.accumulate(self.least_s[::-1])[::-1]
        self._slack_s = _SLACK * float(self.least_s[-1])

    def after(self, target_s: float) -> Integers:
        """Return the fewest GPUs that run the layers after each state within the target; `NEVER` if too many.

        Only states that could be on a plan that meets the target have a meaningful answer, which is a lower bound.
        """
        least_s, gpus, last = self.least_s, self.gpus, len(self.space) - 1
        around = self.model.fewest_around_cut(self.space.outputs, self.space.gradients, target_s)
        least_before, least_after = (np.maximum(gpus_there, 1) for gpus_there in around)
        after = np.full(last + 1, NEVER)
        after[last] = 0
        extent = {0: (last, last)}  # first and last state that has so many GPUs after it
        given = self.left.left
        for k in range(1, gpus + 1):
            self._check_worth(given, k)
            start, stop = self._range(least_s[-1] - k * target_s, (gpus - k) * target_s)
            open_ = (least_after[start:stop] <= k) & (least_before[start:stop] <= gpus - k) & (after[start:stop] > k)
            if start == 0:
                open_[0] = False
            for k_after, (first, final) in reversed(extent.items()):
                # Stages that compute for at most r·T.
                r = k - k_after
                if r > self.model.most_replicas or not open_.any():
                    break
                begin = max(start + int(open_.argmax()), self._range(self._least_from_s[first] - r * target_s, 0.0)[0])
                end = min(stop, final)
                if begin >= end:
                    continue
                final = min(final, self._range(0.0, self._most_up_to_s[end - 1] + r * target_s)[1] - 1)
                span = slice(begin, final + 1)
                there = (after[span] == k_after) & self.model.cut_within(self.space.outputs[span], r, target_s)
                meets = open_[begin - start : end - start].copy()
                meets &= self.model.cut_within(self.space.outputs[begin:end], r, target_s)
                for sums, limit in self._sums_within(span, r, k_after, target_s):
                    if not meets.any():
                        break
                    least = np.where(there, sums, np.inf)
                    self.left.spend(_PER_STEP + self.lattice.least_above(least, begin))
                    meets &= (least - sums)[: end - begin] <= limit
                after[begin:end][meets] = k
                open_[begin - start : end - start] &= ~meets
            found = np.flatnonzero(after[start:stop] == k)
            if len(found):
                extent[k] = (start + int(found[0]), start + int(found[-1]))
        # State 0 is left out above: cost models may charge the first stage differently.
        after[0] = self._from_the_start(after, target_s)
        return after

    def _check_worth(self, given: int, k: int) -> None:
        """Raise `OutOfWorkError` where a walk over the numbers of GPUs cannot end with the work given, or in time.

        The numbers of GPUs take more and more work each, so what the first ones took tells when the rest is too much.
        """
        hopeless = k > _FIRST and (given - self.left.left) * self.gpus > _MARGIN * given * k
        if hopeless or self._deadline.passed:
            raise OutOfWorkError

    def _range(self, least_s: float, most_s: float) -> tuple[int, int]:
        start = int(np.searchsorted(self._most_up_to_s, least_s - self._slack_s))
        return start, int(np.searchsorted(self._least_from_s, most_s + self._slack_s, side="right"))

    def _sums_within(self, span: slice, replicas: int, after: int, target_s: float) -> Iterator[tuple[Floats, float]]:
        """Yield sums over the layers of the span's states, each with the most that a stage's share may be."""
        for sums in self.model.additive_s(taken(self._sums, span), replicas):
            yield sums, replicas * target_s + replicas * self._slack_s
        if self.memory_bytes is not None:
            footprint = taken(self._footprint, span)
            footprint = footprint.shared_out(replicas) if self.shards else footprint
            flying = np.asarray(warm_up_depth(replicas, after))
            # A stage that recomputes may keep nothing but the weights.
            held = footprint.total_bytes(
                flying if self.recompute == "never" else 0, self.model.schedule.versions(flying)
            )
            yield held - footprint.message_bytes, self.memory_bytes * (1 + _SLACK)

    def _from_the_start(self, after: Integers, target_s: float) -> int:
        for total in range(1, self.gpus + 1):
            for r in range(1, min(total, self.model.most_replicas) + 1):
                ends = np.flatnonzero(after[1:] == total - r) + 1
                for sums, limit in self._sums_within(slice(None), r, total - r, target_s):
                    ends = ends[sums[ends] - sums[0] <= limit]
                if len(ends):
                    return total
        return NEVER
