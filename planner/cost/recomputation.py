"""Which layers of a stage may recompute, and which choices of them are worth it.

A unit is the part of one of the model's blocks that lies in the stage. It runs its forward again
before its own backward; or the whole stage does so at once. A choice of units is worth it if some
number of microbatches in flight has none that is as quick and takes no more memory.

Of n units there are 2^n choices. Units of equal costs are of one kind: of these the first in the
stage recompute, because at their backward the later ones are already freed (or, where a unit has
more gradients than it saves, the last; or, where kinds differ by their times alone, the quickest).
So the choices are the numbers of units of each kind. Where there are still too many, units
recompute in the order of seconds per byte saved: the greedy solution of a knapsack (Dantzig 1957),
whose extra time is above the least by less than that of one unit.
"""

import math
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from hashlib import blake2b
from itertools import compress, groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.candidate import Groups, whole_stage
from planner.cost.layer_costs import LayerCosts
from planner.cost.work import Floats
from planner.formats.files import replace
from planner.options.solving import RecomputeRule

MOST_SUBSETS = 2**8  # of units that are all tried
MOST_CHOICES = 2**9  # by kinds, beyond which units recompute in the order of seconds per byte
MOST_FLYING = 64  # microbatches in flight

_Flags = NDArray[np.bool_]
_FLYING = np.arange(1.0, MOST_FLYING + 1)
_COLUMNS = ("recompute_s", "saved_bytes", "working_bytes", "accumulating_bytes", "units", "whole")


@dataclass(frozen=True)
class Choices:
    """Choices of the layers of one stage that recompute, a row each; the first recomputes least."""

    recompute_s: Floats  # of the forward that is run again
    saved_bytes: Floats  # this and the next two as in `Footprint`
    working_bytes: Floats
    accumulating_bytes: Floats
    units: _Flags  # which units recompute, each by itself; (choices, units)
    whole: _Flags  # whether the stage recomputes as one group
    layers: tuple[tuple[int, ...], ...]  # of each unit, by position

    def __len__(self) -> int:
        return len(self.recompute_s)

    def groups(self, row: int) -> Groups:
        """Return the groups of layers that a choice recomputes, each at once."""
        if self.whole[row]:
            return whole_stage(layer for unit in self.layers for layer in unit)
        return tuple(
            frozenset(unit)
            for unit, again in zip(self.layers, self.units[row], strict=True)
            if again
        )

    def worth_it(self) -> "Choices":
        """Return the choices that are worth it with up to `MOST_FLYING` microbatches in flight, the
        quickest first.
        """
        # Nothing that recomputes is worth it where nothing must, not even at no cost.
        again = self.units.any(axis=1) | self.whole
        order = np.lexsort((self.units.sum(axis=1), self.saved_bytes, self.recompute_s, again))

        # What a choice holds, a row for each number in flight, and what it saves of each.
        saved = self.saved_bytes[order]
        in_flight = _FLYING[:, None] * saved
        held = np.concatenate(
            [
                in_flight + self.working_bytes[order],
                in_flight + self.accumulating_bytes[order],
                saved[None],
            ]
        )
        less = held[:, 1:] < np.minimum.accumulate(held, axis=1)[:, :-1]
        rows = order[np.concatenate(([True], less.any(axis=0)))]
        return Choices(**{name: getattr(self, name)[rows] for name in _COLUMNS}, layers=self.layers)

    def and_(self, others: "Choices") -> "Choices":
        """Return these choices and others of the same stage."""
        columns = {
            name: np.concatenate((getattr(self, name), getattr(others, name))) for name in _COLUMNS
        }
        return Choices(**columns, layers=self.layers)


class Recomputation:
    """The choices of stages of one profile, remembered by the kinds of their units."""

    def __init__(self, layer_costs: LayerCosts, rule: RecomputeRule = "auto") -> None:
        self._costs = layer_costs
        self._rule = rule
        self._known: dict[Hashable, Choices] = {}
        self._unit = cache(partial(_Unit.of, layer_costs))

    def choices(self, layers: Collection[int]) -> Choices:
        """Return the choices of a stage of these layers."""
        parts = units_of(self._costs, layers)
        units = [self._unit(part) for part in parts]

        # Values that enter several units are kept once, so it matters which units share them.
        numbers: dict[int, int] = {}
        shared = tuple(
            tuple(numbers.setdefault(value, len(numbers)) for value in unit.entering)
            for unit in units
        )
        own = set(layers)
        arrives = tuple(self._costs.traffic[value].producer not in own for value in numbers)
        key = (tuple(unit.costs for unit in units), shared, arrives)
        if key not in self._known:
            stage = _Stage(self._costs, units, [*compress(numbers, arrives)])
            self._known[key] = stage.choices(self._rule)

        return replace(self._known[key], layers=parts)

    def several(self, stages: Sequence[tuple[int, ...]]) -> list[Choices]:
        """Return the choices of each stage."""
        return [self.choices(layers) for layers in stages]


def exact_everywhere(layer_costs: LayerCosts, *, in_order: bool = True) -> bool:
    """Return whether the choices of every stage hold its best ones: it has few units, or few kinds
    of equal ones.

    Stages have consecutive layers if they are `in_order`; otherwise any part of any unit.
    """
    layers = layer_costs.profile.layers
    parts = units_of(layer_costs, range(len(layers)))
    units = [_Unit.of(layer_costs, part) for part in parts]
    if 2 ** len(units) <= MOST_SUBSETS:
        return True
    equal = Counter(unit.costs for unit in units)
    kinds = {unit.kind for unit in units}

    # A stage may begin and end inside a unit, which makes two more kinds, if others are like that
    # and may be cut.
    cuts = {layer.name for layer in layers} - set(layer_costs.profile.no_cut_after)
    parted = [
        unit
        for unit, part in zip(units, parts, strict=True)
        if any(layers[n].name in cuts for n in part[:-1])
    ]
    if parted and not in_order:
        return False

    more = 1 if all(equal[unit.costs] == 1 for unit in parted) else 4
    choices = more * math.prod(count + 1 for count in equal.values())
    return len(equal) == len(kinds) and choices <= MOST_CHOICES


def units_of(layer_costs: LayerCosts, layers: Collection[int]) -> tuple[tuple[int, ...], ...]:
    """Return the units of a stage of these layers, each as the numbers of its layers."""
    blocks = groupby(sorted(layers), key=layer_costs.block_of.__getitem__)
    return tuple(tuple(unit) for _, unit in blocks)


class _Unit(NamedTuple):
    kind: Hashable  # what it saves and needs; equal for units that can be exchanged for each other
    forward_s: float  # of all its layers, as the next two
    saved_bytes: float
    gradient_bytes: float
    # while it runs, beyond what earlier units keep, less all gradients but those of later units
    peak_bytes: float
    # the same beyond all gradients, where several microbatches add to them
    accumulating_bytes: float
    entering: tuple[int, ...]  # the values that enter it, by their numbers in `LayerCosts.traffic`

    @classmethod
    def of(cls, layer_costs: LayerCosts, layers: tuple[int, ...]) -> "_Unit":
        """Return the unit of these layers."""
        own = [layer_costs.profile.layers[index] for index in layers]
        entering = tuple(sorted(layer_costs.entering(frozenset(layers))))
        sizes = tuple(layer_costs.traffic[value].output_bytes for value in entering)

        def bytes_of(name: str) -> Floats:
            return np.array([getattr(layer, name) for layer in own], dtype=float)

        saved = bytes_of("saved_bytes")
        gradients = bytes_of("gradient_bytes")
        workspaces = bytes_of("workspace_bytes")
        at_work = np.cumsum(saved) + workspaces

        # A digest, because a chain of many layers without blocks has a unit for each pair of ends.
        held = saved.tobytes() + gradients.tobytes() + workspaces.tobytes()
        return cls(
            kind=(blake2b(held).digest(), sizes),
            forward_s=sum(layer.forward_s for layer in own),
            saved_bytes=float(saved.sum()),
            gradient_bytes=float(gradients.sum()),
            peak_bytes=float(np.max(at_work - np.cumsum(gradients) + gradients)),
            accumulating_bytes=float(np.max(at_work + gradients)),
            entering=entering,
        )

    @property
    def costs(self) -> Hashable:
        """Equal for units of equal costs."""
        return self.kind, float(f"{self.forward_s:.12g}")  # equal layers may differ by a rounding


class _Stage:
    """The units of one stage, and what choices of them cost; `arriving` are values from other
    stages.
    """

    def __init__(self, costs: LayerCosts, units: Sequence[_Unit], arriving: Sequence[int]) -> None:
        self._costs = costs
        self._units = units
        self._arriving_bytes = sum(costs.traffic[value].output_bytes for value in arriving)
        self._forward_s = np.array([unit.forward_s for unit in units])
        self._saved = np.array([unit.saved_bytes for unit in units])
        self._gradients = np.array([unit.gradient_bytes for unit in units])
        self._peaks = np.array([unit.peak_bytes for unit in units])
        self._accumulating = np.array([unit.accumulating_bytes for unit in units])

        self._sizes = [
            (size, list(numbers)) for numbers, size in _bytes_by_users(costs, units).items()
        ]

    def choices(self, rule: RecomputeRule) -> Choices:
        """Return the choices that the rule allows."""
        none = np.zeros((1, len(self._units)), dtype=bool)
        match rule:
            case "never":
                return self._made(none)
            case "always":
                return self._whole(self._made(none))
            case "blocks":
                return self._made(~none)
            case "auto":
                parts = self._made(self._tried())
                if len(self._units) > 1:
                    parts = parts.and_(self._whole(parts))
                return parts.worth_it()

    def _tried(self) -> _Flags:
        """Return the choices of units among which the best ones are, the first without any."""
        count = len(self._units)
        if 2**count <= MOST_SUBSETS:
            return (np.arange(2**count)[:, None] >> np.arange(count)) % 2 > 0

        kinds = self._kinds()
        if math.prod(len(equal) + 1.0 for equal in kinds) > MOST_CHOICES:
            return self._by_seconds_per_byte()

        # Which of a kind's units recompute: the first; the quickest; or the last.
        orders = [kinds]
        if any(self._differ_by_time(equal) for equal in kinds):
            orders.append([sorted(equal, key=self._forward_s.__getitem__) for equal in kinds])
        if np.any(self._gradients > self._saved):
            orders.append([equal[::-1] for equal in kinds])
        return np.concatenate([counted(order, count) for order in orders])

    def _kinds(self) -> list[list[int]]:
        """Return the numbers of the units of each kind, the first unit's kind first."""
        kinds: dict[Hashable, list[int]] = {}
        for number, unit in enumerate(self._units):
            kinds.setdefault(unit.kind, []).append(number)
        return list(kinds.values())

    def _differ_by_time(self, equal: Sequence[int]) -> bool:
        return len({self._units[number].costs for number in equal}) > 1

    def _by_seconds_per_byte(self) -> _Flags:
        """Return choices that recompute ever more units, those first that free most bytes per
        second.
        """
        alone = np.eye(len(self._units), dtype=bool)
        gained = self._saved - self._entering(alone).diagonal()
        useful = np.flatnonzero(gained > 0)
        price = self._forward_s[useful] / gained[useful]
        by_price = useful[np.argsort(price, kind="stable")]

        tried = np.zeros((len(useful) + 1, len(self._units)), dtype=bool)
        for row, number in enumerate(by_price, 1):
            tried[row:, number] = True
        return tried

    def _made(self, again: _Flags) -> Choices:
        """Return choices of units that recompute, with their costs: (choices, units)."""
        entering = self._entering(again)
        kept = np.where(again, entering, self._saved)
        saved = kept.sum(axis=1)

        if self._costs.at_work is None:
            working = np.max(np.where(again, self._saved, 0.0), axis=1)
            accumulating = working
        else:
            # What earlier units keep is there while a unit runs, less the gradients to come.
            before = np.cumsum(kept, axis=1) - kept + entering
            missing = np.cumsum(self._gradients) - self._gradients
            working = np.max(before + self._peaks - missing, axis=1) - saved
            accumulating = np.max(before + self._accumulating, axis=1) - saved

        nothing = np.zeros(len(again), dtype=bool)
        return Choices(again @ self._forward_s, saved, working, accumulating, again, nothing, ())

    def _whole(self, others: Choices) -> Choices:
        """Return the choice that keeps nothing but what arrives from other stages."""
        saved = others.saved_bytes[:1]
        return Choices(
            self._forward_s.sum(keepdims=True),
            np.array([float(self._arriving_bytes)]),
            others.working_bytes[:1] + saved,
            others.accumulating_bytes[:1] + saved,
            others.units[:1],
            np.ones(1, dtype=bool),
            (),
        )

    def _entering(self, again: _Flags) -> Floats:
        """Return the bytes of the values that enter each unit that recomputes, and no earlier one
        that does.
        """
        entering = np.zeros(again.shape)
        for size, numbers in self._sizes:
            flags = again[:, numbers]
            entering[:, numbers] += size * (flags & (np.cumsum(flags, axis=1) == 1))
        return entering


def _bytes_by_users(costs: LayerCosts, units: Sequence[_Unit]) -> Counter[tuple[int, ...]]:
    """Return the bytes of the values that enter the same units, by the numbers of these units."""
    users: dict[int, list[int]] = {}
    for number, unit in enumerate(units):
        for value in unit.entering:
            users.setdefault(value, []).append(number)

    sizes = Counter[tuple[int, ...]]()
    for value, numbers in users.items():
        sizes[tuple(numbers)] += costs.traffic[value].output_bytes
    return sizes


def counted(kinds: Sequence[Sequence[int]], count: int) -> _Flags:
    """Return every number of units of each kind, of which those that stand first recompute."""
    numbers = np.indices([len(equal) + 1 for equal in kinds]).reshape(len(kinds), -1)

    # Of each unit, its kind and its place among the units of that kind.
    kind_of = np.zeros(count, dtype=np.int64)
    place = np.zeros(count, dtype=np.int64)
    for kind, equal in enumerate(kinds):
        kind_of[equal] = kind
        place[equal] = np.arange(len(equal))

    return np.asarray(place < numbers.T[:, kind_of])
