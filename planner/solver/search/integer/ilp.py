"""Integer programs for what the exact search cannot express, and to check the search.

`ilp_flow` has the formulation: stages between cuts, with replicas, memory, every schedule, GPUs of several kinds, and
pinned layers.
"""

from __future__ import annotations

from dataclasses import replace

from planner.cost.candidate import Candidate
from planner.cost.kinds import kind_on
from planner.errors import InputError
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import IlpAnswer
from planner.solver.search.chain.ways import relaxed_s
from planner.solver.search.integer.ilp_columns import Columns
from planner.solver.search.integer.ilp_flow import Flow, MilpName, installed
from planner.units import SLACK

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
    _refuse(problem)
    solver = solver or installed()[0]
    columns = Columns(problem, all_cuts=not problem.keeps_order)
    answer = Flow(problem, columns, solver).solve()
    if answer is None:
        return None
    if not columns.space.complete:  # other cuts of a model that keeps its order only bound what is possible
        bound_s = min(answer.bound_s, _over_all_cuts_s(problem, solver))
        answer = replace(answer, bound_s=bound_s, optimal=answer.optimal and bound_s >= answer.seconds * (1 - SLACK))
    return replace(answer, stages=_ranked(problem, answer))


def _over_all_cuts_s(problem: Problem, solver: MilpName) -> float:
    """Return seconds that no plan over any cuts of the graph is below."""
    columns = Columns(problem, all_cuts=True)
    if not columns.space.complete or len(columns.states) > _MOST_STATES_FOR_A_BOUND:
        return relaxed_s(problem, columns.space)
    try:
        answer = Flow(problem, columns, solver).solve()
    except TimeoutError:
        return relaxed_s(problem, columns.space)
    assert answer is not None  # the plans along the order are among them
    return answer.bound_s


def _refuse(problem: Problem) -> None:
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


def _ranked(problem: Problem, answer: IlpAnswer) -> tuple[Candidate, ...]:
    """Return the stages with ranks where GPUs differ: pinned ones, and as many more of their kinds as they need."""
    cluster, position, stages = problem.cluster, problem.layer_costs.position, answer.stages
    if not cluster.kinds:
        return stages
    pinned = {position[name]: rank for name, rank in problem.constraints.gpu_of.items()}
    ranks = [{pinned[layer] for layer in stage.layers if layer in pinned} for stage in stages]
    slots = [number for number, stage in enumerate(stages) for _ in range(stage.replicas - len(ranks[number]))]
    taken: dict[int, int] = {}  # slots by rank

    def seat(slot: int, tried: set[int]) -> bool:
        """Give the slot a rank, and its owner another if need be: an augmenting path."""
        for kind in sorted(answer.kinds[slots[slot]]):
            for rank in cluster.kind_ranks[kind]:
                if rank in tried or rank in pinned.values():
                    continue
                tried.add(rank)
                if rank not in taken or seat(taken[rank], tried):
                    taken[rank] = slot
                    return True
        return False

    assert all(seat(slot, set()) for slot in range(len(slots))), "the program counts the GPUs of all sets of kinds"
    for rank, slot in taken.items():
        ranks[slots[slot]].add(rank)
    kinds = (kind_on(problem.layer_costs, cluster, *each) for each in zip(stages, ranks, strict=True))
    return tuple(
        replace(stage, ranks=tuple(sorted(own)), options=replace(stage.options, kind=kind))
        for stage, own, kind in zip(stages, ranks, kinds, strict=True)
    )
