"""The assignment formulation: which device runs which layer, for stages that are any sets of
layers.

One device per stage and no replicas. With binary variables x for layer v on device d, and y, z
for value u entering and leaving d (continuous: the objective pushes them to 0 or 1),

    minimise    T
    subject to  sum over d of  x[v, d]  =  1                                              each layer is somewhere
                y[u, d]  >=  x[w, d] - x[v, d]      v makes u, w uses it                  it comes in
                z[u, d]  >=  x[v, d] - x[w, d]      v makes u, w uses it                  it goes out
                sum_v t_v/s_d x[v, d]  +  sum_u c_u (y[u, d] + z[u, d])  <=  T            load
                sum_v m_v x[v, d]  +  2 sum_u b_u (y[u, d] + z[u, d])  <=  memory of d

(Tarnawski et al., NeurIPS 2020, section 5.2, without its CPUs).
"""

from __future__ import annotations

from collections.abc import Iterable

import pulp

from benchmarks.published.dnn_partitioning.objective import (
    Host,
    LoadProblem,
    compute_s,
    held_bytes,
    value_load_s,
)
from planner.cost.candidate import Candidate, StageOptions
from planner.cost.network.link import link_of
from planner.schedule.instructions import POSTED
from planner.solver.clock import Clock
from planner.solver.problem.result import IlpAnswer
from planner.solver.problem.states import uncut_groups
from planner.solver.search.integer.cbc import run

_SCALE = 1000.0

Variables = list[list[pulp.LpVariable]]  # by group of layers or value, and device


class Assignment:
    """The integer program of a request."""

    def __init__(self, request: LoadProblem) -> None:
        self.request = request
        self.gpus = request.cluster.gpus
        self.groups = uncut_groups(request.layer_costs)
        self.group_of = {
            layer: number for number, group in enumerate(self.groups) for layer in group
        }
        cluster = request.cluster
        self.kinds = [cluster.kind_of(rank) if cluster.kinds else None for rank in range(self.gpus)]
        layers = request.layer_costs.profile.layers
        each_s = [compute_s(layer) for layer in layers]
        self.group_s = [sum(each_s[layer] for layer in group) for group in self.groups]
        self._scale = _SCALE * self.gpus / sum(each_s)

    def solve(self, clock: Clock) -> IlpAnswer | None:
        """Return the placement with the smallest largest load; None when there is none.

        Raises:
            TimeoutError: when time runs out before there is any.
        """
        problem = pulp.LpProblem("placement", pulp.LpMinimize)
        longest = problem.add_variable("T", 0)
        problem.setObjective(pulp.lpSum([longest]))
        runs = self._variables(problem, "x", len(self.groups), cat=pulp.LpBinary)
        for row in runs:
            problem += pulp.lpSum(row) == 1
        self._load(problem, runs, longest)
        self._break_ties(problem, runs)
        status = run(problem, clock.left_s)
        if status == "infeasible":
            return None
        if status == "unknown":
            raise TimeoutError
        stages = self._stages(runs)
        seconds = self.request.longest_s(stages)
        # CBC tells no bound when its time ends.
        bound_s = min(self.request.relaxed_s, seconds)
        # What the solver calls optimal is so to its tolerance.
        optimal = status == "optimal"
        return IlpAnswer(stages, seconds, seconds if optimal else bound_s, optimal)

    def _variables(
        self, problem: pulp.LpProblem, name: str, count: int, cat: str = pulp.LpContinuous
    ) -> Variables:
        return [
            [problem.add_variable(f"{name}{n}_{d}", 0, 1, cat) for d in range(self.gpus)]
            for n in range(count)
        ]

    def _load(self, problem: pulp.LpProblem, runs: Variables, longest: pulp.LpVariable) -> None:
        """Add the rows of every device's load and memory."""
        layer_costs, link = self.request.layer_costs, link_of(self.request.cluster)
        moving = [
            value for value in layer_costs.traffic if self._may_cross(value.producer, value.users)
        ]
        enters, leaves = (self._variables(problem, name, len(moving)) for name in ("y", "z"))
        for n, value in enumerate(moving):
            maker = runs[self.group_of[value.producer]]
            for group in {self.group_of[user] for user in value.users} - {
                self.group_of[value.producer]
            }:
                for d, user in enumerate(runs[group]):
                    problem += enters[n][d] >= user - maker[d]
                    problem += leaves[n][d] >= maker[d] - user
        sizes = [
            sum(held_bytes(layer_costs.profile.layers[index]) for index in group)
            for group in self.groups
        ]
        for d, kind in enumerate(self.kinds):
            speed = 1.0 if kind is None else kind.speed
            crossing = [
                (pair[n][d], value) for pair in (enters, leaves) for n, value in enumerate(moving)
            ]
            layers = [
                (runs[g][d], seconds / speed * self._scale)
                for g, seconds in enumerate(self.group_s)
            ]
            pays = 0.0 if isinstance(kind, Host) else self._scale
            values = [(variable, value_load_s(value, link) * pays) for variable, value in crossing]
            problem += _weighted([*layers, *values]) <= longest
            limit = self.request.cluster.memory_of(kind)
            if limit is not None:
                held = [(runs[g][d], size / limit) for g, size in enumerate(sizes)]
                moved = [
                    (x, POSTED * (v.output_bytes + v.gradient_bytes) / limit) for x, v in crossing
                ]
                problem += _weighted([*held, *moved]) <= 1
        # The layers alone, over all devices at their speeds.
        speeds = sum(1.0 if kind is None else kind.speed for kind in self.kinds)
        problem += longest * 1.0 >= sum(self.group_s) / speeds * self._scale

    def _may_cross(self, producer: int, users: Iterable[int]) -> bool:
        return any(self.group_of[user] != self.group_of[producer] for user in users)

    def _break_ties(self, problem: pulp.LpProblem, runs: Variables) -> None:
        """Put the n-th group on one of the first n devices where all are alike: permuted solutions
        are not searched.
        """
        if not self.request.cluster.kinds:
            for number, row in enumerate(runs):
                for variable in row[number + 1 :]:
                    problem += variable == 0

    def _stages(self, runs: Variables) -> tuple[Candidate, ...]:
        sets: list[set[int]] = [set() for _ in range(self.gpus)]
        for group, row in zip(self.groups, runs, strict=True):
            values = [variable.value() for variable in row]
            sets[values.index(max(values))].update(group)
        before: frozenset[int] = frozenset()
        stages = []
        for rank, (layers, kind) in enumerate(zip(sets, self.kinds, strict=True)):
            if layers:
                stages.append(
                    Candidate(before, frozenset(layers), StageOptions(1, kind=kind), ranks=(rank,))
                )
                before |= layers
        return tuple(stages)


def _weighted(terms: Iterable[tuple[pulp.LpVariable, float]]) -> pulp.LpAffineExpression:
    return pulp.LpAffineExpression(list(terms))
