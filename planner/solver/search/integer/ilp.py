"""Integer programs for what the exact search cannot express, and to check the search: which problems need one.

`ilp_flow` has the formulation: stages between cuts, with replicas, memory, every schedule, and GPUs of several kinds.
"""

from dataclasses import replace

from planner.cost.candidate import Candidate
from planner.cost.kinds import kind_on
from planner.errors import InfeasibleError, InputError
from planner.solver.evaluate.evaluation import evaluate, priced
from planner.solver.problem.budget import Budget, OutOfTimeError, no_plan_yet
from planner.solver.problem.infeasible import PLENTY, against_rules, explain
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation, Found, IlpAnswer
from planner.solver.problem.states import Chain
from planner.solver.search.chain.ways import relaxed_s
from planner.units import SLACK


def solve_by_program(problem: Problem) -> Found:
    """Find the best plan by an integer program; raise InfeasibleError if there is none.

    Raise InputError for what it cannot express, and PlannerError if the search ends before any plan is found.
    """
    try:
        found = _found(problem)
    except (TimeoutError, OutOfTimeError):
        raise no_plan_yet(problem.deadline) from None
    if found is None:
        raise _infeasible(problem)
    if max(problem.levels) > 1:  # no column divides gradients and weights
        found = replace(found, bound_s=min(found.bound_s, relaxed_s(problem, Chain(problem.layer_costs))))
    return replace(found, best=evaluate(problem, found.best.stages))


def _found(problem: Problem) -> Found | None:
    best = solve_ilp(problem)
    return None if best is None else Found(priced(problem, best.stages), best.bound_s, "ilp, CBC")


def _infeasible(problem: Problem) -> InfeasibleError:
    cluster = problem.cluster

    def again(**changes: object) -> Evaluation | None:
        found = _found(replace(problem.with_cluster(cluster.model_copy(update=changes)), budget=Budget()))
        return None if found is None else found.best

    def fits(gpus: int, memory_bytes: int) -> Evaluation | None:
        return again(memory_bytes=memory_bytes) if gpus == cluster.gpus else None

    plenty = tuple(kind.model_copy(update={"memory_bytes": PLENTY}) for kind in cluster.kinds)
    # Without a memory limit only the rules can be the reason.
    if again(kinds=plenty, memory_bytes=None) is None:
        return against_rules(problem)
    if not cluster.kinds:
        return explain(problem, fits, {})
    return InfeasibleError(
        "no plan fits the memory of the cluster's GPUs", hint="give the kinds of GPUs more memory_bytes, or more GPUs"
    )


def solve_ilp(problem: Problem) -> IlpAnswer | None:
    """Find the fastest plan that keeps the problem's rules; None if there is none.

    When the deadline passes, the answer is the best plan so far, with a bound. Raise TimeoutError if there is none yet,
    and InputError for what no integer program here expresses, and for problems that are too large.
    """
    # Imported here, because importing PuLP takes time and few problems need it.
    from planner.solver.search.integer.ilp_flow import Columns, Flow

    _refuse(problem)
    columns = Columns(problem)
    answer = Flow(problem, columns).solve()
    if answer is None:
        return None
    if not columns.exact:  # this says nothing of others
        bound_s = min(answer.bound_s, relaxed_s(problem, columns.space))
        answer = replace(answer, bound_s=bound_s, optimal=answer.optimal and bound_s >= answer.seconds * (1 - SLACK))
    return replace(answer, stages=_ranked(problem, answer))


def _refuse(problem: Problem) -> None:
    if len(problem.cluster.joined) > 1:
        raise InputError(
            f"the integer program prices clusters of one level, not of {len(problem.cluster.joined)}",
            hint="use `solver=search`, or give `gpus` and the bandwidth of the slowest level",
        )


def _ranked(problem: Problem, answer: IlpAnswer) -> tuple[Candidate, ...]:
    """Return the stages with ranks where GPUs differ: as many of their kinds as they need."""
    cluster, stages = problem.cluster, answer.stages
    if not cluster.kinds:
        return stages
    slots = [number for number, stage in enumerate(stages) for _ in range(stage.replicas)]
    taken: dict[int, int] = {}  # slots by rank

    def seat(slot: int, tried: set[int]) -> bool:
        for kind in sorted(answer.kinds[slots[slot]]):
            for rank in cluster.kind_ranks[kind]:
                if rank in tried:
                    continue
                tried.add(rank)
                if rank not in taken or seat(taken[rank], tried):
                    taken[rank] = slot
                    return True
        return False

    assert all(seat(slot, set()) for slot in range(len(slots))), "the program counts the GPUs of all sets of kinds"
    ranks: list[set[int]] = [set() for _ in stages]
    for rank, slot in taken.items():
        ranks[slots[slot]].add(rank)
    kinds = (kind_on(problem.layer_costs, cluster, *each) for each in zip(stages, ranks, strict=True))
    return tuple(
        replace(stage, ranks=tuple(sorted(own)), options=replace(stage.options, kind=kind))
        for stage, own, kind in zip(stages, ranks, kinds, strict=True)
    )
