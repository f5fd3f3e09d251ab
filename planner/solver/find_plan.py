"""The way from profile and cluster to plan: check the question, answer it step by step, assemble the plan.

A search walks along the layers and adds up what it knows of each stage. The steps settle what it cannot know. Each
takes a problem, asks the steps after it about variants that are relaxed or fixed in one respect, and returns an answer:

    solve_degrees      how many ranks divide the layers of a stage: a search for each degree
    solve_with_room    memory that goes to more than tensors: room for as many communicators as the plan has
    solve_tied         copies of tied weights
    solve_zero_bubble  schedules that are searched as another one
    solve_by_method    the search itself, or an integer program (`planner.solver.methods`)
"""

import time
from contextlib import suppress
from dataclasses import replace

from planner.cost.setting import Setting
from planner.cost.tensor import costs_at, layer_costs_on
from planner.errors import InfeasibleError, InputError, ProfileError
from planner.formats.cluster import Cluster
from planner.formats.device_kinds import cluster_for
from planner.formats.plan import Plan
from planner.formats.plan_parts import SolverReport
from planner.formats.profile import REMEDY, Profile
from planner.options.option import keywords_of
from planner.options.solving import Progress, SolveOptions
from planner.plan.rank_groups import groups_of, usual_degrees
from planner.plan.shape import check_divided_loss
from planner.solver.answer import PAYS, answer
from planner.solver.assemble import complete
from planner.solver.choose.interleaving import interleaved
from planner.solver.evaluate.evaluation import TOLERANCE, evaluate
from planner.solver.evaluate.pipelines import too_large
from planner.solver.problem.budget import Budget, Patience
from planner.solver.problem.infeasible import UnexplainedError
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import WAITING, Found
from planner.solver.search.pipeline_search import PipelineSearch
from planner.units import SLACK

REGULAR = "chunks of equally many blocks"  # where a bound is of interleaved plans, too
ALIKE = 0.005  # share of the time by which no two plans are told apart: estimates are not that true
LAST_S = 5.0  # after the time limit, to simulate an answer that would not be otherwise


def find_plan(
    profile: Profile,
    cluster: Cluster,
    options: SolveOptions,
    patience: Patience | None = None,
    *,
    explains: bool = True,
) -> Plan:
    """Find the fastest plan by the options; the `patience` of several searches takes the place of their time limit.

    Raises:
        InfeasibleError: if no plan fits the memory; where it `explains`, which takes searches, with the smallest
            change that makes one fit.
        InputError: for options that make no sense under the schedule.
    """
    started = time.perf_counter()
    patience = patience or Patience.of(options.time_limit_s, options.progress)
    cluster = cluster_for(profile, cluster)
    if not options.tensor:
        options = replace(options, tensor=usual_degrees(profile, cluster))
    options = with_one_optimizer(options, profile)
    setting = setting_of(options, profile, cluster)
    accepted = options.accept_divided_loss
    check_divided_loss(profile.model, profile.loss, setting.schedule, setting.microbatches, accepted=accepted)
    if all(layer.forward_s + layer.backward_s + layer.update_s <= 0 for layer in profile.layers):
        raise ProfileError(f"the layers of '{profile.model}' take no time, so there is nothing to divide", hint=REMEDY)
    budget = Budget(patience.deadline, progress=patience.progress or Progress())
    _check_rules(options, profile, setting)
    problem = Problem(
        layer_costs_on(profile, cluster),
        setting,
        options.rules,
        options.depth,
        budget,
        solver=options.solver,
    )
    budget.progress.begin(budget.deadline.at_s, PipelineSearch(problem).relaxed_s())
    try:
        found = answer(problem)
    except UnexplainedError as error:
        raise (error.explanation() if explains else error) from None
    drained = problem.schedule.formula == "synchronous" and not cluster.kinds
    if drained:
        last = replace(problem, budget=Budget.unlimited(patience.deadline.at_least(LAST_S).at_most(LAST_S)))
        if not (found.best.simulated or too_large(problem, found.best.stages)):
            # Without its waiting, which may be half of its time, nobody could compare the plan with others.
            found = found.with_best(evaluate(last, found.best.stages))
        found = plainest(last, found)
    plan = complete(problem, found.best, _report(problem, found))
    if accepted and plan.loss is not None:
        plan = plan.model_copy(update={"loss": plan.loss.model_copy(update={"accepted": True})})
    return plan.model_copy(update={"solver": plan.solver.model_copy(update={"seconds": time.perf_counter() - started})})


def or_interleaved(profile: Profile, plan: Plan, options: SolveOptions, patience: Patience) -> Plan:
    """Return the fastest regular interleaved plan where it is `PAYS` faster than a plan under 1f1b-flush, or the plan.

    So much must several times as many messages earn, for what waits for them is not all known.
    """
    cluster, budget = plan.cluster, Budget.unlimited(patience.deadline)
    if options.alone or cluster.kinds:
        return plan
    degrees = options.tensor or usual_degrees(profile, cluster)
    options = replace(options, tensor=degrees, minibatch=None, microbatches=plan.microbatches)
    costs = layer_costs_on(profile, cluster)
    problem = Problem(costs, setting_of(options, profile, cluster), options.rules, options.depth, budget=budget)
    waiting = plan.predicted.by == "simulation"  # is part of its seconds
    found = interleaved(problem, plan.predicted.seconds_per_minibatch * (1 if waiting else 1 + WAITING) * (1 - PAYS))
    known, best = plan.solver, found.best
    bound_s = min(known.lower_bound_s, found.bound_s)
    bound_of = ", ".join(filter(None, (known.bound_of, REGULAR)))
    if best is not None and (best.simulated or not waiting):
        report = _report(found.problem, Found(best, bound_s, bound_of=bound_of))
        with suppress(InfeasibleError):  # copies of weights that several stages use do not fit
            return complete(found.problem, best, report.model_copy(update={"seconds": known.seconds}))
    return plan


@keywords_of(SolveOptions)
def solve(profile: Profile, cluster: Cluster, options: SolveOptions) -> Plan:
    """Find the fastest plan, with nothing to read beside it: see `planner.solve`."""
    return find_plan(profile, cluster, options)


def plainest(problem: Problem, found: Found) -> Found:
    """Return the answer with replicas of a single stage that divide as little as takes no longer, but for `ALIKE`."""
    stage, best = found.best.stages[0], found.best
    if len(best.stages) > 1 or stage.options.tensor > 1 or problem.rules.shard_optimizer == "always":
        return found
    for level in range(stage.options.level):
        plan = evaluate(problem, [replace(stage, options=replace(stage.options, level=level))])
        if plan.simulated == best.simulated and plan.seconds <= best.seconds * (1 + ALIKE) and problem.allows(plan):
            return found.with_best(plan)
    return found


def with_one_optimizer(options: SolveOptions, profile: Profile) -> SolveOptions:
    """Return the options for plans whose workers each step all parameters, where the optimizer combines them.

    Raise InputError where `tensor` asks for ranks that divide them.
    """
    if profile.optimizer_separable is not False:
        return options
    if options.tensor and 1 not in options.tensor:
        raise InputError(
            f"the optimizer of '{profile.model}' combines parameters, which ranks of `tensor` would divide",
            hint="leave `tensor` out, or take an optimizer that updates each parameter by itself, such as AdamW",
        )
    return replace(options, max_stages=1, tensor=(1,))


def setting_of(options: SolveOptions, profile: Profile, cluster: Cluster) -> Setting:
    """Return what plans under the options are priced for."""
    microbatches = options.microbatches_on(cluster, profile)
    return Setting(cluster, options.order, microbatches, options.chunks_per_gpu)


def _check_rules(options: SolveOptions, profile: Profile, setting: Setting) -> None:
    """Refuse what no plan keeps."""
    rules, schedule = options.rules, setting.schedule
    if rules.shard_optimizer == "always" and not profile.may_shard_optimizer:
        raise InputError(
            f"`shard_optimizer=always` needs an optimizer that replicas can divide, and the profile of "
            f"'{profile.model}' does not say so of its own",
            hint="profile the model again if its optimizer is one, such as Adam; or use `shard_optimizer=never`",
        )
    if min(rules.tensor) < 1 or list(rules.tensor) != sorted(set(rules.tensor)):
        given = ",".join(map(str, rules.tensor))
        raise InputError(f"`tensor={given}` are no ascending numbers of ranks", hint="write them as in 1,2,4,8")
    for degree in rules.tensor[int(rules.tensor[0] == 1) :]:
        costs_at(profile, degree)
        groups_of(setting.cluster, degree)
    if rules.max_staleness is not None and (late := schedule.staleness(1)) > rules.max_staleness:
        raise InputError(
            f"`max_staleness={rules.max_staleness}` is less than the {late} update that gradients under {schedule} "
            "are late in every plan",
            hint="use a `schedule` that drains the pipeline, such as 1f1b-flush",
        )


def _report(problem: Problem, found: Found) -> SolverReport:
    seconds, bound_s = found.best.seconds, min(found.bound_s, found.best.seconds)
    if found.best.simulated:
        optimal = seconds <= bound_s * (1 + TOLERANCE)
    else:
        optimal = seconds <= bound_s * (1 + SLACK)
        bound_s = seconds if optimal else bound_s
    cost_model_s = found.best.price.cost_model_s
    return SolverReport(
        name=found.name,
        status="optimal" if optimal else "feasible",
        lower_bound_s=bound_s,
        bound_of=found.bound_of,
        gap=(seconds - bound_s) / seconds,
        seconds=0.0,
        cost_model_s=seconds if cost_model_s is None else cost_model_s,
        simulated=problem.budget.count,
        exhausted=problem.budget.exhausted,
    )
