"""Integer programs for what the exact search cannot express, and to check the search.

`ilp_flow` has the formulation: stages between cuts, with replicas, memory, every schedule, GPUs of several kinds, and
pinned layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.cost.layer_costs import Candidate
from planner.cost.rounding import SLACK
from planner.errors import InputError
from planner.solver.bounds.balance import balanced_s
from planner.solver.chain.ways import WaysOf
from planner.solver.integer.ilp_columns import Columns
from planner.solver.integer.ilp_flow import Flow
from planner.solver.integer.milp import MilpName, installed
from planner.solver.problem import Problem
from planner.solver.result import IlpAnswer

_MOST_STATES_FOR_A_BOUND = 300


def solve_ilp(problem: Problem, solver: MilpName | None = None) -> IlpAnswer | None:
    """Find the fastest plan that respects the problem's constraints; None if there is none.

    Args:
        problem: for a cluster of one level. When its deadline passes, the answer is the best plan so far, with a bound.
        solver: by default HiGHS if installed, otherwise CBC.

    Raises:
        InputError: for what no integer program here expresses, and for problems that are too large.
        TimeoutError: if the deadline passes before any plan is found.
    """
    refuse(problem)
    solver = solver or installed()[0]
    columns = Columns(problem, all_cuts=not problem.keeps_order)
    answer = Flow(problem, columns, solver).solve()
    if answer is None:
        return None
    if not columns.space.complete:  # other cuts of a model that keeps its order only bound what is possible
        bound_s = min(answer.bound_s, _over_all_cuts_s(problem, solver))
        answer = replace(answer, bound_s=bound_s, optimal=answer.optimal and bound_s >= answer.seconds * (1 - SLACK))
    return replace(answer, stages=_ranked(problem, answer.stages))


def _over_all_cuts_s(problem: Problem, solver: MilpName) -> float:
    """Return seconds that no plan over any cuts of the graph is below."""
    columns = Columns(problem, all_cuts=True)
    if not columns.space.complete or len(columns.states) > _MOST_STATES_FOR_A_BOUND:
        return _balanced_s(problem, columns)
    try:
        answer = Flow(problem, columns, solver).solve()
    except TimeoutError:
        return _balanced_s(problem, columns)
    assert answer is not None  # the plans along the order are among them
    return answer.bound_s


def _balanced_s(problem: Problem, columns: Columns) -> float:
    ways = WaysOf(columns.space, problem.limits, prices_shards=problem.simulates)
    return balanced_s(ways.least(problem.layer_costs.everything), problem.setting)


def refuse(problem: Problem) -> None:
    """Refuse what no integer program here expresses.

    Raises:
        InputError: saying what.
    """
    constraints, cluster = problem.constraints, problem.cluster
    if len(cluster.joined) > 1:
        raise InputError(
            f"the integer program prices clusters of one level, not of {len(cluster.joined)}",
            hint="use `solver=search`, or give `gpus` and the bandwidth of the slowest level",
        )
    if problem.recompute == "blocks":
        raise InputError(
            "the integer program recomputes whole stages or nothing, not block by block",
            hint="use `recompute=auto`, or leave out what only the integer program takes",
        )
    if constraints.gpu_of and not cluster.kinds:
        name, rank = next(iter(constraints.gpu_of.items()))
        raise InputError(
            f"layer '{name}' cannot be pinned to GPU {rank} of a cluster whose GPUs are all alike",
            hint="pin it to a stage, or give the cluster's kinds in cluster.json",
        )


def _ranked(problem: Problem, stages: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the stages with ranks where GPUs differ: pinned ones, then the first free ones of each kind."""
    cluster, position = problem.cluster, problem.layer_costs.position
    if not cluster.kinds:
        return tuple(stages)
    pinned = {position[name]: rank for name, rank in problem.constraints.gpu_of.items()}
    free = [rank for rank in range(cluster.gpus) if rank not in pinned.values()]
    ranked = []
    for stage in stages:
        ranks = {pinned[layer] for layer in stage.layers if layer in pinned}
        alike = [rank for rank in free if cluster.kind_of(rank) == stage.options.kind]
        ranks.update(alike[: stage.replicas - len(ranks)])
        free = [rank for rank in free if rank not in ranks]
        ranked.append(replace(stage, ranks=tuple(sorted(ranks))))
    return tuple(ranked)
