"""The way from profile and cluster to plan.

There are two methods, and the problem decides which of them can solve it:

search   exact; GPUs alike; layers pinned to stages; other constraints that are forbidden cuts. Also good plans for
         GPUs that differ, on any levels
ilp      an integer program: all constraints, GPUs that differ; clusters of one level
"""

from __future__ import annotations

import time
from dataclasses import replace

from planner.cost.models.registry import cost_model_of
from planner.cost.setting import Setting
from planner.cost.tensor import costs_at, layer_costs_on
from planner.errors import InfeasibleError, InputError, PlannerError, ProfileError
from planner.formats.cluster import Cluster
from planner.formats.constraints import Constraints
from planner.formats.device_kinds import cluster_for
from planner.formats.plan import Plan
from planner.formats.plan_parts import SolverReport
from planner.formats.profile import REMEDY, Profile
from planner.options.option import keywords_of
from planner.options.solving import Progress, SolveOptions, SolverName, StageRules
from planner.plan.rank_groups import groups_of
from planner.schedule.schedule import Schedule
from planner.solver.assemble import complete
from planner.solver.candidates.first_plans import FirstPlans
from planner.solver.degrees import solve_degrees
from planner.solver.divided_loss import check_divided_loss
from planner.solver.evaluate.depth import TOLERANCE
from planner.solver.granularity import solve_blocks_first
from planner.solver.mixed import solve_mixed
from planner.solver.other_schedules import solve_interleaved, solve_synced, solve_zero_bubble
from planner.solver.problem.budget import Budget, Patience
from planner.solver.problem.infeasible import UnexplainedError
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Found
from planner.solver.room import solve_with_room
from planner.solver.search.integer.answer import needs_program, solve_by_program
from planner.solver.search.pipeline_search import PipelineSearch
from planner.solver.searched import searched
from planner.solver.tied import solve_tied
from planner.units import SLACK

MOST_COLUMNS = 40_000  # about: of an integer program that is tried beside a search


def find_plan(profile: Profile, cluster: Cluster, options: SolveOptions, patience: Patience | None = None) -> Plan:
    """Find the fastest plan by the options.

    `patience` is for several searches that share their time, and takes the place of the options' time limit.

    Raises:
        InfeasibleError: if no plan fits the memory, with the smallest change that makes one fit.
        InputError: for a cost model or number of microbatches that make no sense under the schedule.
    """
    started = time.perf_counter()
    patience = patience or Patience.of(options.time_limit_s, options.progress)
    cluster = cluster_for(profile, cluster)
    setting = setting_of(options, profile, cluster)
    check_divided_loss(profile, setting, accepted=options.accept_divided_loss)
    cost_model_of(setting)  # refuses what no cost model describes, before a search begins
    if all(layer.forward_s + layer.backward_s + layer.update_s <= 0 for layer in profile.layers):
        raise ProfileError(f"the layers of '{profile.model}' take no time, so there is nothing to divide", hint=REMEDY)
    budget = Budget(patience.deadline, progress=patience.progress or Progress())
    rules = options.rules
    _check_rules(rules, profile, setting)
    constraints = options.constraints or Constraints()
    constraints.check(profile, cluster)
    problem = Problem(layer_costs_on(profile, cluster), setting, rules, options.depth, constraints, budget)
    vertical_sync, solver = options.vertical_sync, options.solver
    if vertical_sync:
        _check_vertical_sync(options.order)
    budget.progress.begin(budget.deadline.at_s, PipelineSearch(problem).relaxed_s())

    def answer_of(other: Problem) -> Found:
        return solve_synced(other, lambda each: _found(each, solver)) if vertical_sync else _found(other, solver)

    def whole(other: Problem) -> Found:
        return solve_with_room(
            other,
            lambda each: solve_tied(each, answer_of, vertical_sync=vertical_sync),
            vertical_sync=vertical_sync,
        )

    try:
        found = solve_degrees(problem, whole, mixing=solver in ("auto", "search") and not vertical_sync)
    except UnexplainedError as error:
        raise error.explanation() from None
    plan = complete(problem, found.best, _report(problem, found), vertical_sync=vertical_sync)
    return plan.model_copy(update={"solver": plan.solver.model_copy(update={"seconds": time.perf_counter() - started})})


@keywords_of(SolveOptions)
def solve(profile: Profile, cluster: Cluster, options: SolveOptions) -> Plan:
    """Find the fastest plan for training the profiled model on the cluster.

    Args:
        profile: costs per layer, for one microbatch.
        cluster: devices, memory and links.

    Without `microbatches` and `minibatch`, a minibatch is one microbatch.

    Returns:
        A plan on as few GPUs as its speed needs. Under the resource model its time is that of its simulation, by which
        it was chosen among the best plans by the cost model. `solver.status` is `optimal` if the time is within
        `TOLERANCE` of `lower_bound_s`, which by the cost model no plan over any legal cut can beat. Plans for trainable
        models cut along the profile's order. Imported profiles cannot be trained, so for them other orders of the
        branches count as well. When the time limit ends, simulations end at once, searches after their current step,
        which takes some seconds at most.

    Raises:
        InfeasibleError: if no plan fits the memory, with the smallest change that makes one fit.
        InputError: for a cost model or number of microbatches that make no sense under the schedule.
    """
    if options.microbatches is None and options.minibatch is None:
        options = replace(options, microbatches=1)
    return find_plan(profile, cluster, options)


def setting_of(options: SolveOptions, profile: Profile, cluster: Cluster) -> Setting:
    """Return what plans under the options are priced for."""
    microbatches = options.microbatches_on(cluster, profile)
    return Setting(cluster, options.order, microbatches, options.chunks_per_gpu, options.cost_model)


def _check_rules(rules: StageRules, profile: Profile, setting: Setting) -> None:
    """Refuse what no plan keeps.

    Raises:
        InputError: naming the argument.
        ProfileError, ClusterError: for degrees that the profile or the cluster's servers do not have.
    """
    schedule = setting.schedule
    if rules.shard_optimizer == "always" and not profile.may_shard_optimizer:
        raise InputError(
            f"`shard_optimizer=always` needs an optimizer that replicas can divide, and the profile of "
            f"'{profile.model}' does not say so of its own",
            hint="profile the model again if its optimizer is one, such as Adam; or use `shard_optimizer=never`",
        )
    if rules.shard_optimizer == "always" and setting.cost_model != "resource":
        raise InputError(
            f"the cost model '{setting.cost_model}' was published before optimizers were sharded",
            hint="use `cost_model=resource`, or `shard_optimizer=never`",
        )
    if not rules.tensor or min(rules.tensor) < 1 or list(rules.tensor) != sorted(set(rules.tensor)):
        given = ",".join(map(str, rules.tensor))
        raise InputError(f"`tensor={given}` are no ascending numbers of ranks", hint="write them as in 1,2,4,8")
    for degree in rules.tensor[int(rules.tensor[0] == 1) :]:
        costs_at(profile, degree)
        groups_of(setting.cluster, degree)
    if rules.max_stages is not None and rules.max_stages < 1:
        raise InputError(f"`max_stages={rules.max_stages}` leaves no stage", hint="give 1 or more")
    if rules.max_staleness is None:
        return
    if rules.max_staleness < 0:
        raise InputError(f"`max_staleness={rules.max_staleness}` is no number of updates", hint="give 0 or more")
    if (late := schedule.staleness(1)) > rules.max_staleness:
        raise InputError(
            f"`max_staleness={rules.max_staleness}` is less than the {late} update that gradients under {schedule} "
            "are late in every plan",
            hint="use a `schedule` that drains the pipeline, such as 1f1b-flush",
        )


def _report(problem: Problem, found: Found) -> SolverReport:
    """Report how good the plan found is."""
    seconds, bound_s = found.best.seconds, min(found.bound_s, found.best.seconds)
    if found.best.simulated:
        optimal = seconds <= bound_s * (1 + TOLERANCE)
    else:
        optimal = seconds <= bound_s * (1 + SLACK)
        bound_s = seconds if optimal else bound_s
    cost_model_s = found.best.price.cost_model_s
    return SolverReport(
        name=found.name,
        cost_model=problem.setting.cost_model,
        status="optimal" if optimal else "feasible",
        lower_bound_s=bound_s,
        gap=(seconds - bound_s) / seconds,
        seconds=0.0,
        cost_model_s=seconds if cost_model_s is None else cost_model_s,
        simulated=problem.budget.count,
        exhausted=problem.budget.exhausted,
    )


def _check_vertical_sync(schedule: Schedule) -> None:
    if not schedule.stashes:
        raise InputError(
            f"`vertical_sync` is for the schedule 1f1b, not for {schedule}",
            hint="leave it out, or use `schedule=1f1b`",
        )


def _found(problem: Problem, solver: SolverName) -> Found:
    """Find the best plan by the method that the problem needs."""
    if (other := problem.schedule.solved_as) is not problem.schedule:
        problem.budget.seen.clear()  # the same stages are other plans under another schedule
        return solve_zero_bubble(problem, _found(problem.under(other), solver))
    if _mixed(problem) and solver in ("auto", "search"):
        return _on_mixed_gpus(problem, exact=solver == "auto" and _small(problem))
    if needs_program(problem, solver):
        return solve_by_program(problem)
    search = solve_interleaved if problem.schedule.chunked else searched
    within = problem.with_cuts_forbidden()
    assert within is not None
    return solve_blocks_first(within, search)


def _on_mixed_gpus(problem: Problem, *, exact: bool) -> Found:
    """Find the best plan on GPUs of several kinds by the search, and by the integer program if it is to be `exact`.

    Raises:
        InfeasibleError: if neither finds a plan that fits the memory.
    """
    within = problem.with_cuts_forbidden()
    assert within is not None
    try:
        found = solve_blocks_first(within, lambda each: FirstPlans(each).at_least(solve_mixed(each)))
    except (InfeasibleError, InputError):
        if not exact:
            raise
        return solve_by_program(problem)
    if not exact:
        return found
    try:
        other = solve_by_program(problem)
    except PlannerError:  # too many stages for a program, or too little time
        return found
    best = other if other.best.saves(found.best) else found
    return replace(best, bound_s=max(found.bound_s, other.bound_s))


def _small(problem: Problem) -> bool:
    """Return whether an integer program for GPUs of several kinds is quick."""
    columns = len(problem.layer_costs.profile.layers) ** 2 * problem.cluster.gpus * 2 ** len(problem.cluster.kinds)
    return len(problem.cluster.joined) == 1 and columns <= MOST_COLUMNS


def _mixed(problem: Problem) -> bool:
    """Return whether the search for GPUs of several kinds can take the problem."""
    constraints = problem.constraints
    expressed = not constraints.gpu_of and problem.with_cuts_forbidden() is not None
    return bool(problem.cluster.kinds) and expressed and not problem.schedule.chunked
