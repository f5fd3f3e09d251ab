"""The way from profile and cluster to plan.

There are two methods, and the problem decides which of them can solve it:

search   exact; GPUs alike; layers pinned to stages; other constraints that are forbidden cuts. Also good plans for
         GPUs that differ, on any levels
ilp      an integer program: all constraints, GPUs that differ; clusters of one level
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from planner.cost.candidate import RecomputeRule, ShardRule
from planner.cost.models.registry import cost_model_of
from planner.cost.setting import Setting
from planner.cost.tensor import layer_costs_on
from planner.errors import InfeasibleError, InputError, PlannerError, ProfileError
from planner.formats.cluster import Cluster
from planner.formats.constraints import Constraints
from planner.formats.device_kinds import cluster_for
from planner.formats.names import CostModelName
from planner.formats.plan import Plan
from planner.formats.plan_parts import SolverReport
from planner.formats.profile import REMEDY, Profile
from planner.schedule.instructions import CHUNKS
from planner.schedule.one_forward_one_backward import ONE_F_ONE_B
from planner.schedule.registry import find
from planner.schedule.schedule import Schedule
from planner.solver.assemble import complete
from planner.solver.candidates.first_plans import FirstPlans
from planner.solver.degrees import solve_degrees
from planner.solver.divided_loss import check_divided_loss
from planner.solver.evaluate.depth import TOLERANCE
from planner.solver.granularity import solve_blocks_first
from planner.solver.minibatch import microbatches_in
from planner.solver.mixed import solve_mixed
from planner.solver.other_schedules import solve_interleaved, solve_synced, solve_zero_bubble
from planner.solver.problem.budget import Budget, Deadline, Progress
from planner.solver.problem.infeasible import UnexplainedError
from planner.solver.problem.problem import DepthRule, Problem
from planner.solver.problem.result import Found
from planner.solver.problem.stage_rules import Granularity, StageRules
from planner.solver.room import solve_with_room
from planner.solver.search.integer.answer import SolverName, needs_program, solve_by_program
from planner.solver.search.pipeline_search import PipelineSearch
from planner.solver.searched import searched
from planner.solver.tied import solve_tied
from planner.units import SLACK

MOST_COLUMNS = 40_000  # about: of an integer program that is tried beside a search


def solve(
    profile: Profile,
    cluster: Cluster,
    *,
    cost_model: CostModelName = "resource",
    schedule: Schedule | str = ONE_F_ONE_B,
    microbatches: int = 1,
    minibatch: int | None = None,
    depth: DepthRule = "auto",
    recompute: RecomputeRule = "auto",
    shard_optimizer: ShardRule = "auto",
    max_stages: int | None = None,
    max_staleness: int | None = None,
    granularity: Granularity = "auto",
    tensor: Sequence[int] = (1,),
    chunks: int = CHUNKS,
    vertical_sync: bool = False,
    solver: SolverName = "auto",
    constraints: Constraints | None = None,
    accept_divided_loss: bool = False,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Find the fastest plan for training the profiled model on the cluster.

    Args:
        profile: costs per layer, for one microbatch.
        cluster: devices, memory and links.
        cost_model: `resource`, or one of the two published ones, to compare against.
        schedule: order of work, which decides what a plan costs and holds.
        microbatches: per minibatch, for schedules that divide it.
        minibatch: samples per minibatch, in place of `microbatches`.
        depth: for 1f1b and 2bw under the resource model: "published" keeps as many minibatches in flight as PipeDream
            does, "auto" more where workers would otherwise wait for messages or for each other.
        recompute: whether stages run their forward again instead of keeping its activations: "auto" where memory
            demands it, "never", or "always".
        shard_optimizer: whether the replicas of a stage divide the optimizer's state: "auto" where that is better,
            "never", or "always".
        max_stages: at most so many stages.
        max_staleness: gradients are at most so many updates late.
        granularity: where a model of repeated blocks, as transformers are, is cut: "block" between blocks only, "layer"
            anywhere, or "auto": between blocks first, and inside blocks where that makes it 2% faster.
        tensor: how many ranks may divide the layers of a stage between them; the profile says what they cost then.
        chunks: stages per GPU, for schedules that leave the choice: `interleaved`.
        vertical_sync: for 1f1b: every stage runs a minibatch with the weight version that the first stage has when the
            minibatch enters, and holds as many versions as the first stage's depth requires.
        solver: "search", "ilp" (an integer program), or "auto": the search, unless the constraints or the cluster need
            the integer program.
        constraints: what the plan must respect beside memory.
        accept_divided_loss: train on the mean of the microbatches' losses also where that is not the loss of the model
            file, such as a contrastive one.
        time_limit_s: after this time the best plan so far is the answer. Simulations end at once, searches after their
            current step, which takes some seconds at most.
        progress: is told the best plan and the best bound so far, and may be read from another thread.

    Returns:
        A plan on as few GPUs as its speed needs. Under the resource model its time is that of its simulation, by which
        it was chosen among the best plans by the cost model. `solver.status` is `optimal` if the time is within
        `TOLERANCE` of `lower_bound_s`, which by the cost model no plan over any legal cut can beat. Plans for trainable
        models cut along the profile's order. Imported profiles cannot be trained, so for them other orders of the
        branches count as well.

    Raises:
        InfeasibleError: if no plan fits the memory, with the smallest change that makes one fit.
        InputError: for a cost model or number of microbatches that make no sense under the schedule.
    """
    started = time.perf_counter()
    schedule = find(schedule)
    if minibatch is not None:
        microbatches = microbatches_in(minibatch, profile, schedule)
    cluster = cluster_for(profile, cluster)
    setting = Setting(cluster, schedule, microbatches, schedule.fixed_chunks or chunks, cost_model)
    check_divided_loss(profile, setting, accepted=accept_divided_loss)
    cost_model_of(setting)  # refuses what no cost model describes, before a search begins
    if all(layer.forward_s + layer.backward_s + layer.update_s <= 0 for layer in profile.layers):
        raise ProfileError(f"the layers of '{profile.model}' take no time, so there is nothing to divide", hint=REMEDY)
    budget = Budget(Deadline.after(time_limit_s), progress=progress or Progress())
    rules = StageRules(recompute, shard_optimizer, max_stages, max_staleness, granularity, tuple(tensor))
    rules.check(profile, setting)
    constraints = constraints or Constraints()
    constraints.check(profile, cluster)
    problem = Problem(layer_costs_on(profile, cluster), setting, rules, depth, constraints, budget)
    if vertical_sync:
        _check_vertical_sync(schedule)
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
