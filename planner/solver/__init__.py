"""Profile + Cluster -> Plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from planner.cost.layer_costs import Candidate, LayerCosts
from planner.cost.price import Price
from planner.cost.rounding import SLACK
from planner.cost.setting import Setting
from planner.cost.stage_options import RecomputeRule
from planner.cost.weight_copies import price_with_copies
from planner.errors import InputError, ProfileError
from planner.formats.cluster import Cluster
from planner.formats.constraints import Constraints
from planner.formats.plan import CostModelName, Plan, SolverReport
from planner.formats.profile import REMEDY, Profile
from planner.schedule.defaults import CHUNKS
from planner.schedule.one_forward_one_backward import ONE_F_ONE_B
from planner.schedule.registry import find
from planner.schedule.schedule import Schedule
from planner.solver.assemble import assemble, simulated_plan
from planner.solver.candidates.alternatives import fastest_simulated
from planner.solver.candidates.budget import Tally
from planner.solver.candidates.deadline import Deadline
from planner.solver.candidates.depth import TOLERANCE, DepthRule
from planner.solver.candidates.trials import Trials
from planner.solver.chain.interleaved_plan import solve_interleaved
from planner.solver.chain.states import Chain
from planner.solver.chain.vertical_sync import solve_synced
from planner.solver.chain.zero_bubble import solve_zero_bubble
from planner.solver.infeasible import explain
from planner.solver.integer.request import Request
from planner.solver.methods import Found, SolverName, answer, method_for
from planner.solver.task import Task

__all__ = ["solve"]


def solve(
    profile: Profile,
    cluster: Cluster,
    *,
    cost_model: CostModelName = "resource",
    schedule: Schedule | str = ONE_F_ONE_B,
    microbatches: int = 1,
    depth: DepthRule = "auto",
    recompute: RecomputeRule = "auto",
    chunks: int = CHUNKS,
    vertical_sync: bool = False,
    solver: SolverName = "auto",
    constraints: Constraints | None = None,
    time_limit_s: float | None = None,
) -> Plan:
    """The fastest plan for training the profiled model on the cluster.

    Args:
        profile: costs per layer, for one microbatch.
        cluster: devices, memory and links.
        cost_model: `resource`, or one of the two published ones, to compare against.
        schedule: what the plan is for; it decides what a plan costs and holds.
        microbatches: per minibatch, for schedules that divide it.
        depth: of 1f1b and 2bw, under the resource model: "published" keeps as many minibatches in flight as PipeDream
            does, "auto" more where workers would otherwise wait for messages or for each other.
        recompute: whether stages run their forward again instead of keeping its activations: "auto" where memory
            demands it, "never", or "always".
        chunks: of the model on each GPU, for schedules that leave the choice: `interleaved`.
        vertical_sync: of 1f1b: every stage runs a minibatch at the version of the weights that the first stage has when
            it enters; a stage holds as many as the first stage's depth makes it.
        solver: "search", "ilp" (an integer program), "brute" (every plan of ten layers), or "auto": the search, unless
            the constraints or the cluster ask for the integer program.
        constraints: what the plan must respect beside memory.
        time_limit_s: after which to answer with the best plan so far. Simulations end then, and searches between
            two of their steps, of which the longest take some seconds.

    Returns:
        A plan on as few GPUs as are needed for its speed. Under the resource model its time is that of its simulation,
        by which it was chosen among the best by the cost model. `solver.status` is `optimal` when that is within
        `TOLERANCE` of `lower_bound_s`, the least, by the cost model, that any plan's busiest resource takes over every
        legal cut. Plans for models that can be trained cut along the profile's order; for imported profiles, which
        cannot, other orders of their branches count as well.

    Raises:
        InfeasibleError: when no plan fits the memory, with the smallest change that would.
        InputError: for a cost model or number of microbatches that the schedule has no use for.
    """
    started = time.perf_counter()
    schedule = find(schedule)
    chunks = schedule.fixed_chunks or chunks
    Setting(cluster, schedule, microbatches, chunks, cost_model)  # refuses combinations without meaning
    if all(layer.forward_s + layer.backward_s + layer.update_s <= 0 for layer in profile.layers):
        raise ProfileError(f"the layers of '{profile.model}' take no time, so there is nothing to divide", hint=REMEDY)
    deadline = Deadline.after(time_limit_s)
    layer_costs = LayerCosts(profile)
    request = Request(layer_costs, cluster, cost_model, schedule, microbatches, recompute, constraints or Constraints())
    trials = Trials(cluster, schedule, microbatches, depth, Tally(deadline))
    if vertical_sync:
        _check_vertical_sync(request)
        found, cost = solve_synced(request, depth, lambda r, rule: _found(r, solver, trials.again(depth=rule), chunks))
    else:
        found, cost = _found(request, solver, trials, chunks)
    cost = price_with_copies(request.layer_costs, found.stages, cluster, cost, schedule)
    report = _report(found, cost, cost_model, trials)
    plan = assemble(request.layer_costs, cluster, found.stages, cost, schedule, microbatches, report)
    plan = plan.model_copy(update={"vertical_sync": vertical_sync})
    if plan.predicted.by == "simulation" and (vertical_sync or plan.shared):
        plan = simulated_plan(plan)  # candidates know of neither
    return plan.model_copy(update={"solver": plan.solver.model_copy(update={"seconds": time.perf_counter() - started})})


def _report(found: Found, cost: Price, cost_model: CostModelName, trials: Trials) -> SolverReport:
    """How good a plan at this price is."""
    seconds = cost.seconds_per_minibatch
    bound_s = min(found.bound_s, seconds)
    if cost.cost_model_s is None:
        optimal = seconds <= bound_s * (1 + SLACK)
        bound_s = seconds if optimal else bound_s
    else:
        optimal = seconds <= bound_s * (1 + TOLERANCE)
    return SolverReport(
        name=found.name,
        cost_model=cost_model,
        status="optimal" if optimal else "feasible",
        lower_bound_s=bound_s,
        gap=(seconds - bound_s) / seconds,
        seconds=0.0,
        cost_model_s=seconds if cost.cost_model_s is None else cost.cost_model_s,
        simulated=trials.tally.count,
        exhausted=trials.tally.exhausted,
    )


def _check_vertical_sync(request: Request) -> None:
    if not request.schedule.stashes:
        raise InputError(
            f"`vertical_sync` is for the schedule 1f1b, not for {request.schedule}",
            hint="leave it out, or use `schedule=1f1b`",
        )


def _found(request: Request, solver: SolverName, trials: Trials, chunks: int) -> tuple[Found, Price]:
    """The best plan's stages, by the method that the request asks for, and their simulated price."""
    cluster, schedule, microbatches = request.cluster, request.schedule, request.microbatches
    if schedule.solved_as is not schedule:
        drained = replace(request, schedule=schedule.solved_as)
        found, _ = _found(drained, solver, trials.again(schedule=schedule.solved_as), chunks)
        return solve_zero_bubble(request, found, trials)
    if (method := method_for(request, solver)) != "search":
        found = answer(request, method, trials.tally.deadline)
        cost = request.priced(found.stages)
        if request.simulated:
            cost = trials.price(request.layer_costs, found.stages, cost)
        return found, cost
    layer_costs = request.without_constraints().layer_costs
    if schedule.chunked:
        stages, cost, bound_s = solve_interleaved(layer_costs, cluster, microbatches, chunks, request.recompute, trials)
    else:
        stages, cost, bound_s = _searched(request.about(layer_costs.profile), trials)
    return Found(tuple(stages), bound_s, "search"), cost


def _searched(request: Request, trials: Trials) -> tuple[Sequence[Candidate], Price, float]:
    """Stages, their simulated price, and lower bound, for schedules with one stage per GPU."""
    layer_costs, cluster, recompute = request.layer_costs, request.cluster, request.recompute
    task = Task(
        Chain(layer_costs),
        cluster,
        request.model,
        request.schedule,
        request.microbatches,
        recompute,
        trials.tally.deadline,
    )
    path = task.best()
    if path is None and not task.keeps_order and (wider := task.over_all_cuts()) is not None:
        task, path = wider, wider.best()
    if path is None:
        raise explain(layer_costs, cluster, task.fits, task.leaner())
    along = task
    task, path, bound_s = task.over_levels(path) if task.placed else task.beyond_the_order(path)
    stages, cost = task.priced(path)
    bound_s = min(bound_s, cost.seconds_per_minibatch)
    if request.simulated:
        stages, cost = fastest_simulated(along, (stages, cost), trials)
    return stages, cost, bound_s
