"""Exact search for the max-load objective: a dynamic programme over all cuts of the graph at once.

A device's load is the time of its layers and of the distinct values that cross into and out of it;
the plan is a chain of cuts with one device between neighbours, and its time the largest load. With
g(u, J) the smallest largest load with which the devices u (so many of each kind) run everything
before the cut J,

    g(u, J) = min over I below J and kinds k of  max( g(u - k, I), load(J \\ I on k) )

(Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020,
section 5.1.1). All loads from one cut are computed in one go, and only those that could be part of
a plan faster than a known one: the devices left must be able to compute what is left. O(cuts² ·
values) at worst; the bound leaves a few percent of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from benchmarks.published.dnn_partitioning.downsets import Words, ticks, to_bits
from benchmarks.published.dnn_partitioning.objective import (
    Host,
    compute_s,
    held_bytes,
    value_load_s,
)
from planner.cost.candidate import Candidate, StageOptions
from planner.cost.layer_costs import LayerCosts
from planner.cost.network.link import link_of
from planner.cost.work import Floats, Integers
from planner.formats.cluster import Cluster, DeviceKind
from planner.schedule.instructions import POSTED
from planner.solver.clock import Clock

_SLACK = 1e-12


@dataclass(frozen=True)
class LoadPlan:
    """Stages, and the largest of their loads."""

    stages: tuple[Candidate, ...]
    seconds: float


@dataclass(frozen=True)
class _Devices:
    """GPUs of one kind."""

    kind: DeviceKind | None
    count: int
    speed: float
    pays_transfers: bool
    memory_bytes: int | None


class LoadSearch:
    """The cuts of a model, and the loads of the stages between them.

    Args:
        layer_costs: the model.
        words: cuts, a bit set of layer positions per row; the empty one and the whole among them.
        cluster: of one level.
    """

    def __init__(self, layer_costs: LayerCosts, words: Words, cluster: Cluster) -> None:
        self.interrupted = False  # by the deadline: there may be faster plans
        layers, link = layer_costs.profile.layers, link_of(cluster)
        bits = to_bits(words, len(layers))
        # Whole numbers, whose sums are exact: a cut is never earlier than one inside it.
        each: Floats = ticks(layer_costs)
        before: Floats = bits @ each
        total_s = sum(compute_s(layer) for layer in layers)
        # Cuts within a time of each other are neighbours, and each stands after those it contains.
        order = np.lexsort((*words.T, bits.sum(axis=1, dtype=np.int64), before))
        self._words = words[order]
        self._bits: NDArray[np.uint8] = bits[order]
        self._before_s: Floats = before[order] * (total_s / each.sum())
        self._devices = _devices(cluster)
        held = np.array([held_bytes(layer) for layer in layers], dtype=np.float64)
        self._held = np.asarray(self._bits @ held, dtype=np.float64)
        columns = np.ascontiguousarray(self._bits.T)
        # Users within each cut of each value, and the cuts at which it is made and still needed.
        shape = (len(layer_costs.traffic), len(words))
        self._used, self._live = np.zeros(shape, np.int16), np.zeros(shape, np.bool_)
        for number, value in enumerate(layer_costs.traffic):
            self._used[number] = columns[list(value.users)].sum(axis=0)
            self._live[number] = (columns[value.producer] > 0) & (
                self._used[number] < len(value.users)
            )
        self._cost_s = np.array([value_load_s(value, link) for value in layer_costs.traffic])
        self._bytes = np.array(
            [v.output_bytes + v.gradient_bytes for v in layer_costs.traffic], dtype=np.float64
        )
        self._front_s: Floats = self._cost_s @ self._live
        self._front_bytes: Floats = self._bytes @ self._live

    def best(self, below_s: float, clock: Clock) -> LoadPlan | None:
        """Return the plan with the smallest largest load, on as few devices as reach it; None if
        none is below.
        """
        last = len(self._before_s) - 1
        slowest = min(devices.speed for devices in self._devices)
        # any plan is
        below_s = min(below_s, 2 * (self._before_s[-1] / slowest + float(self._cost_s.sum())))
        counts = [devices.count for devices in self._devices]
        uses = list(product(*(range(count + 1) for count in counts)))
        row = {use: number for number, use in enumerate(uses)}
        left_s = [
            sum(
                (devices.count - n) * devices.speed
                for devices, n in zip(self._devices, use, strict=True)
            )
            for use in uses
        ]
        most = np.full((len(uses), last + 1), np.inf)  # g
        origin = np.full((len(uses), last + 1), -1, dtype=np.int32)
        via = np.zeros((len(uses), last + 1), dtype=np.int8)
        most[0, 0] = 0.0
        for state in range(last):
            steps = [
                (number, kind, row[following])
                for number in np.flatnonzero(most[:, state] < below_s)
                for kind in range(len(counts))
                if (following := _with(uses[number], kind)) in row
            ]
            if not steps:
                continue
            if clock.passed:
                self.interrupted = True
                break
            room_s = max(left_s[following] for _, _, following in steps) * below_s
            others = self._reach(state, below_s, room_s)
            others, compute_s, moved_s, moved = self._between(state, others)
            for kind, devices in enumerate(self._devices):
                loads = compute_s / devices.speed + (moved_s if devices.pays_transfers else 0.0)
                keep = loads < below_s
                if devices.memory_bytes is not None:
                    keep &= (
                        self._held[others] - self._held[state] + POSTED * moved
                        <= devices.memory_bytes
                    )
                ends, loads = others[keep], loads[keep]
                for number, _, onto in (step for step in steps if step[1] == kind):
                    seconds = np.maximum(most[number, state], loads)
                    better = seconds < most[onto, ends]
                    most[onto, ends[better]] = seconds[better]
                    origin[onto, ends[better]] = state
                    via[onto, ends[better]] = kind
            below_s = min(below_s, float(most[:, last].min()) * (1 + _SLACK))
        return self._trace(uses, row, most, origin, via)

    def _reach(self, state: int, below_s: float, room_s: float) -> Integers:
        """Return the cuts from here that some device reaches in time while the devices left can
        compute the rest.
        """
        before_s = self._before_s
        fastest = max(devices.speed for devices in self._devices)
        first = np.searchsorted(
            before_s, before_s[-1] - room_s * (1 + _SLACK) - _SLACK, side="left"
        )
        limit = np.searchsorted(before_s, before_s[state] + below_s * fastest, side="right")
        others = np.arange(max(state + 1, int(first)), int(limit))
        own = self._words[state]
        for word in np.flatnonzero(own):
            others = others[(self._words[others, word] & own[word]) == own[word]]
        return others

    def _between(self, state: int, others: Integers) -> tuple[Integers, Floats, Floats, Floats]:
        """Return compute seconds, transfer seconds and bytes of the stages from the state to each
        of the others.
        """
        compute_s = self._before_s[others] - self._before_s[state]
        moved_s, moved = self._front_s[others].copy(), self._front_bytes[others].copy()
        for value in np.flatnonzero(self._live[:, state]):
            # It comes in where the stage uses it. The stage did not make it, so it does not go out.
            used = self._used[value, others] > self._used[value, state]
            balance = used.astype(np.float64) - self._live[value, others]
            moved_s += balance * self._cost_s[value]
            moved += balance * self._bytes[value]
        return others, compute_s, moved_s, moved

    def _trace(
        self,
        uses: Sequence[tuple[int, ...]],
        row: dict[tuple[int, ...], int],
        most: Floats,
        origin: NDArray[np.int32],
        via: NDArray[np.int8],
    ) -> LoadPlan | None:
        last = most.shape[1] - 1
        seconds = float(most[:, last].min())
        if not np.isfinite(seconds):
            return None
        equal = np.flatnonzero(most[:, last] <= seconds * (1 + _SLACK))
        number = min(map(int, equal), key=lambda each: sum(uses[each]))
        states, kinds = [last], []
        while states[-1] != 0:
            device, state = int(via[number, states[-1]]), int(origin[number, states[-1]])
            kinds.append(self._devices[device].kind)
            states.append(state)
            number = row[_with(uses[number], device, -1)]
        sets = [
            frozenset(map(int, np.flatnonzero(self._bits[state]))) for state in reversed(states)
        ]
        stages = tuple(
            Candidate(before, done - before, StageOptions(1, kind=kind))
            for (before, done), kind in zip(pairwise(sets), reversed(kinds), strict=True)
        )
        return LoadPlan(stages, seconds)


def _devices(cluster: Cluster) -> list[_Devices]:
    if not cluster.kinds:
        return [_Devices(None, cluster.gpus, 1.0, True, cluster.memory_bytes)]
    return [
        _Devices(kind, kind.count, kind.speed, not isinstance(kind, Host), cluster.memory_of(kind))
        for kind in cluster.kinds
    ]


def _with(use: tuple[int, ...], kind: int, more: int = 1) -> tuple[int, ...]:
    return (*use[:kind], use[kind] + more, *use[kind + 1 :])
