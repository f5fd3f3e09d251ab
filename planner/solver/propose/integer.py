"""Propose the best plan of an integer program, for who asks for one and for few GPUs of many kinds.

Programs are for what the exact search cannot express, and check the search.
`planner.solver.search.integer.ilp_flow` has the formulation: stages between cuts, with replicas,
memory, every schedule, and GPUs of several kinds.
"""

from collections.abc import Iterator

from planner.cost.candidate import Candidate
from planner.cost.kinds import kind_on
from planner.errors import InfeasibleError, InputError, PlannerError
from planner.formats.cluster import Cluster
from planner.formats.files import replace
from planner.solver.clock import OutOfTimeError, no_plan_yet
from planner.solver.evaluate.evaluation import priced
from planner.solver.pool import Batch, Pool
from planner.solver.problem.bounds import relaxed_s
from planner.solver.problem.budget import Budget
from planner.solver.problem.infeasible import PLENTY, against_rules, explain
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation, IlpAnswer
from planner.solver.problem.states import Chain
from planner.units import SLACK


def check_solver(problem: Problem) -> None:
    """Raise InputError if no method takes the problem."""
    if not problem.schedule.chunked:
        return

    wants = ""
    if problem.cluster.kinds:
        wants = "GPUs of several kinds"
    elif problem.solver == "ilp":
        wants = "`solver=ilp`"

    if wants:
        raise InputError(
            f"the schedule {problem.schedule} is solved by the search alone, which does not take "
            f"{wants}",
            hint="use another schedule, or leave them out",
        )


def propose_program(problem: Problem, pool: Pool) -> Iterator[Batch]:
    """Yield the best plan; raise the pool's bound.

    Raises:
        InfeasibleError: if there is none.
        InputError: for what no program expresses.
        PlannerError: if the deadline passes before any plan is found.
    """
    answer = solve_by_program(problem)
    bound_s = answer.bound_s
    # No column divides gradients and weights, and all are priced for the slowest kind of link.
    if problem.sharding.gradients or problem.cluster.has_own_links:
        bound_s = min(bound_s, relaxed_s(problem, Chain(problem.layer_costs)))
    pool.raise_bound(bound_s)
    yield [answer.stages]


def propose_small_program(problem: Problem, pool: Pool) -> Iterator[Batch]:
    """Yield the best plan of a small program, and nothing where a program is too large, or time
    ends before.
    """
    cluster = problem.cluster
    columns = len(problem.layer_costs.profile.layers) ** 2 * cluster.gpus * 2 ** len(cluster.kinds)
    too_many = columns > problem.tuning.propose.most_program_columns
    if problem.solver != "auto" or len(cluster.joined) > 1 or too_many:
        return

    try:
        yield from propose_program(problem, pool)
    except InfeasibleError:
        raise
    except PlannerError:
        # Too large, or too little time: the search has proposed plans, or says itself why there is
        # none.
        return


def solve_by_program(problem: Problem) -> IlpAnswer:
    """Find the best plan by an integer program, and seconds that no plan is below.

    Raises:
        InfeasibleError: if there is none.
        InputError: for what the program cannot express.
        PlannerError: if the search ends before any plan is found.
    """
    try:
        answer = solve_ilp(problem)
    except (TimeoutError, OutOfTimeError):
        raise no_plan_yet(problem.clock) from None

    if answer is None:
        raise _infeasible(problem)
    return answer


def _infeasible(problem: Problem) -> InfeasibleError:
    """Say why no plan fits: ask again with other memory."""
    cluster = problem.cluster

    def again(other: Cluster) -> Evaluation | None:
        changed = problem.with_cluster(other)
        budget = Budget(tuning=problem.tuning.budget)
        answer = solve_ilp(replace(changed, budget=budget))
        if answer is None:
            return None
        return priced(changed, answer.stages)

    def fits(gpus: int, memory_bytes: int) -> Evaluation | None:
        if gpus != cluster.gpus:
            return None
        return again(replace(cluster, memory_bytes=memory_bytes))

    plenty = tuple(replace(kind, memory_bytes=PLENTY) for kind in cluster.kinds)

    # Without a memory limit only the rules can be the reason.
    if again(replace(cluster, kinds=plenty, memory_bytes=None)) is None:
        return against_rules(problem)
    if not cluster.kinds:
        return explain(problem, fits, {})
    return InfeasibleError(
        "no plan fits the memory of the cluster's GPUs",
        hint="give the kinds of GPUs more memory_bytes, or more GPUs",
    )


def solve_ilp(problem: Problem) -> IlpAnswer | None:
    """Find the fastest plan that keeps the problem's rules; None if there is none.

    When the deadline passes, the answer is the best plan so far, with a bound.

    Raises:
        InputError: for what no integer program here expresses, and for problems that are too large.
        TimeoutError: when the deadline passes before there is any plan.
    """
    # Imported here, because importing PuLP takes time and few problems need it.
    from planner.solver.search.integer.columns import Columns
    from planner.solver.search.integer.ilp_flow import Flow

    _refuse(problem)
    columns = Columns(problem)
    answer = Flow(problem, columns).solve()
    if answer is None:
        return None

    if not columns.exact:  # this says nothing of others
        bound_s = min(answer.bound_s, relaxed_s(problem, columns.space))
        optimal = answer.optimal and bound_s >= answer.seconds * (1 - SLACK)
        answer = replace(answer, bound_s=bound_s, optimal=optimal)

    return replace(answer, stages=_ranked(problem, answer))


def _refuse(problem: Problem) -> None:
    if len(problem.cluster.joined) > 1:
        raise InputError(
            f"the integer program prices clusters of one level, not of "
            f"{len(problem.cluster.joined)}",
            hint="use `solver=search`, or give `gpus` and the bandwidth of the slowest level",
        )


def _ranked(problem: Problem, answer: IlpAnswer) -> tuple[Candidate, ...]:
    """Return the stages with ranks where GPUs differ: as many of their kinds as they need."""
    cluster = problem.cluster
    if not cluster.kinds:
        return answer.stages

    stages = []
    for stage, ranks in zip(answer.stages, _seats(problem, answer), strict=True):
        kind = kind_on(problem.layer_costs, cluster, stage, ranks)
        options = replace(stage.options, kind=kind)
        stages.append(replace(stage, ranks=tuple(sorted(ranks)), options=options))

    return tuple(stages)


def _seats(problem: Problem, answer: IlpAnswer) -> list[set[int]]:
    """Return the ranks of each stage, by augmenting paths: a replica may move to seat another."""
    # 1. The stage of each replica, and the replica on each rank.
    stage_of = [number for number, stage in enumerate(answer.stages) for _ in range(stage.replicas)]
    replica_on: dict[int, int] = {}

    # 2. A seat for each replica.
    def seat(replica: int, tried: set[int]) -> bool:
        for kind in sorted(answer.kinds[stage_of[replica]]):
            for rank in problem.cluster.kind_ranks[kind]:
                if rank in tried:
                    continue
                tried.add(rank)
                if rank not in replica_on or seat(replica_on[rank], tried):
                    replica_on[rank] = replica
                    return True

        return False

    seated = [seat(replica, set()) for replica in range(len(stage_of))]
    assert all(seated), "the program counts the GPUs of all sets of kinds"

    # 3. Whose seats are a stage's ranks.
    ranks: list[set[int]] = [set() for _ in answer.stages]
    for rank, replica in replica_on.items():
        ranks[stage_of[replica]].add(rank)
    return ranks
