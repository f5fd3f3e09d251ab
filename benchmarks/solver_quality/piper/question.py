"""The question that Piper's program answers, for the search of the planner: its costs of stages in
place of ours.

Stages, plans and the search are those of `plan solve --tensor`. What a stage moves and holds is
what the formulas of `benchmarks.solver_quality.piper.formulas` say: every edge that a cut crosses
counts, with the bytes that a group exchanges beside it, and each layer has the memory that the file
gives for it, with and without recomputing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise, starmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.solver_quality.piper.formulas import PiperStage, costs_of
from planner.cost.layer_costs import LayerCosts
from planner.cost.recomputation import MOST_CHOICES, Choices, Recomputation
from planner.cost.work import Floats, Integers
from planner.options.solving import RecomputeRule
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import CutPath, stages_along
from planner.solver.problem.states import FRONTS, Chain
from planner.solver.search.chain.search import Search

Flags = NDArray[np.bool_]
_MEASURES = ("timePerSample", "memoryUsageA", "memoryUsageB")
_Costs = Sequence[Mapping[str, Any]]  # by layer


class Sums(Recomputation):
    """The choices of stages whose recomputed layers add up, in time and in memory."""

    def __init__(self, layer_costs: LayerCosts, plain: _Costs, again: _Costs) -> None:
        super().__init__(layer_costs)
        self._plain, self._more = _table(plain), _table(again) - _table(plain)
        time, saved = self._more[:, 0], self._more[:, 1]
        kinds: dict[bytes, list[int]] = {}
        for layer in np.argsort(time, kind="stable").tolist():
            if saved[layer] < 0:
                kinds.setdefault(self._more[layer, 1:].tobytes(), []).append(layer)
        self._kinds = [*kinds.values()]
        self._by_price = sorted(
            chain(*self._kinds), key=(-time / np.minimum(saved, -1)).__getitem__
        )
        self._layers = tuple((layer,) for layer in range(len(time)))

    def several(self, stages: Sequence[tuple[int, ...]]) -> list[Choices]:
        """Return the choices: of layers that save the same, those that take least time first."""
        own = np.zeros((len(stages), len(self._layers)), dtype=bool)
        for row, stage in enumerate(stages):
            own[row, stage] = True
        many = (
            np.prod([own[:, kind].sum(axis=1) + 1.0 for kind in self._kinds], axis=0) > MOST_CHOICES
        )
        found = dict[int, Choices]()
        for rows, kinds in (
            (np.flatnonzero(~many), self._kinds),
            (np.flatnonzero(many), [self._by_price]),
        ):
            if len(rows):
                found.update(zip(rows.tolist(), self._tried(own[rows], kinds), strict=True))
        return [found[row] for row in range(len(stages))]

    def _tried(self, own: Flags, kinds: Sequence[Sequence[int]]) -> list[Choices]:
        """Return every number of layers of each kind, of which those that stand first in it
        recompute.
        """
        stage = np.arange(len(own))
        units = np.zeros(own.shape, dtype=bool)
        for kind in kinds:
            counts = own[stage][:, kind].sum(axis=1) + 1
            before = np.repeat(np.arange(len(stage)), counts)
            number = np.arange(len(before)) - np.repeat(np.cumsum(counts) - counts, counts)
            stage, units = stage[before], units[before]
            again = own[stage][:, kind]
            again &= np.cumsum(again, axis=1) <= number[:, None]
            units[:, kind] = again
        more = units @ self._more
        order = np.lexsort((more[:, 0], stage))
        more, units = more[order], units[order]
        more[:, 1] += (own @ self._plain[:, 1])[stage]
        nothing = np.zeros(len(more), dtype=bool)
        seconds, saved, working = more.T
        ends = np.cumsum(np.bincount(stage)).tolist()
        return [
            Choices(
                seconds[rows],
                saved[rows],
                working[rows],
                working[rows],
                units[rows],
                nothing[rows],
                self._layers,
            )
            for rows in starmap(slice, pairwise([0, *ends]))
        ]


def _table(costs: _Costs) -> Floats:
    return np.array([[each[name] for name in _MEASURES] for each in costs])


class EveryEdge(Chain):
    """Cuts along the profile's order that every edge across them is charged for, at both of its
    ends.

    Args:
        layer_costs: at one degree.
        graph: the input file's content.
        degree: so many ranks divide the layers.
    """

    def __init__(self, layer_costs: LayerCosts, graph: Mapping[str, Any], degree: int) -> None:
        super().__init__(layer_costs)
        nodes = {node["id"]: node for node in graph["nodes"]}
        names = [int(layer.name) for layer in layer_costs.profile.layers]
        self._plain, self._again = (
            [costs_of(nodes[name], degree, again) for name in names] for again in (False, True)
        )
        place = {name: index for index, name in enumerate(names)}
        ends = [(place[edge["sourceId"]], place[edge["destId"]], edge) for edge in graph["edges"]]
        self._made, self._used = (
            np.stack([self.holds(end[side]) for end in ends]) for side in (0, 1)
        )
        sizes = np.array([edge["communicationCost"] for *_, edge in ends])
        arriving = [
            self._plain[target]["syncTimeFw"][str(edge["sourceId"])] for _, target, edge in ends
        ]
        leaving = [
            self._plain[source]["syncTimeBw"][str(edge["destId"])] for source, _, edge in ends
        ]
        self._arriving, self._leaving = sizes + arriving, sizes + leaving

    def recomputation(self, rule: RecomputeRule) -> Recomputation:
        """Return the sums."""
        return Sums(self.layer_costs, self._plain, self._again)

    def sides(self, state: int, others: Integers) -> tuple[Floats, Floats]:
        """Return the bytes of all edges, without any messages that memory would hold."""
        before, after = np.zeros((2, len(FRONTS), len(others)))
        made, used = self._made[:, state], self._used[:, state]
        before[:2] = (self._arriving * (made & ~used)) @ self._used[:, others]
        after[:2] = (self._leaving * ~made) @ (self._made[:, others] & ~self._used[:, others])
        return before, after


def answered(problem: Problem, graph: Mapping[str, Any]) -> list[PiperStage] | None:
    """Return the best plan by the program's own formulas; None if none fits the memory."""
    best: tuple[EveryEdge, CutPath, int] | None = None
    for degree in problem.rules.tensor:
        if degree <= problem.cluster.gpus:
            groups = problem.on_groups_of(degree)
            space = EveryEdge(groups.layer_costs, graph, degree)
            path = Search(space, groups.asynchronous(), groups.limits).best()
            if path is not None and (best is None or path.seconds < best[1].seconds):
                best = space, path, degree
    if best is None:
        return None
    space, path, degree = best
    names = [int(layer.name) for layer in problem.layer_costs.profile.layers]
    return [
        PiperStage(
            frozenset(names[layer] for layer in stage.layers),
            stage.replicas,
            degree,
            frozenset(names[layer] for group in stage.options.recompute for layer in group),
        )
        for stage in stages_along(space, path)
    ]
