"""From what a user asks to the problem that a search answers, with the checks of what no plan
keeps.
"""

from dataclasses import replace

from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.cost.tensor import costs_at, layer_costs_on
from planner.errors import InputError, ProfileError
from planner.formats.cluster import Cluster
from planner.formats.plan import Plan
from planner.formats.plan_parts import AskedRules
from planner.formats.profile import REMEDY, Profile
from planner.options.solving import SolveOptions
from planner.plan.rank_groups import groups_of, usual_degrees
from planner.plan.shape import check_divided_loss
from planner.solver.problem.budget import Budget
from planner.solver.problem.problem import Problem
from planner.solver.tuning.record import STANDARD, Tuning


def setting_of(options: SolveOptions, profile: Profile, cluster: Cluster) -> Setting:
    """Return what plans under the options are priced for."""
    microbatches = options.microbatches_on(cluster, profile)
    return Setting(cluster, options.order, microbatches, options.chunks_per_gpu)


def problem_of(
    options: SolveOptions,
    layer_costs: LayerCosts,
    cluster: Cluster,
    budget: Budget | None = None,
    tuning: Tuning = STANDARD,
) -> Problem:
    """Return the problem of pricing plans on this cluster; without a budget each takes what it
    takes.
    """
    return Problem(
        layer_costs,
        setting_of(options, layer_costs.profile, cluster),
        options.rules,
        options.depth,
        budget=budget or Budget.unlimited(tuning=tuning.budget),
        tuning=tuning,
    )


def checked_problem(
    options: SolveOptions,
    profile: Profile,
    cluster: Cluster,
    budget: Budget,
    tuning: Tuning,
) -> Problem:
    """Return the problem of finding the fastest plan.

    Raises:
        InputError: for options that no plan keeps.
        ProfileError: for layers that take no time.
    """
    options = replace(options, tensor=options.tensor or usual_degrees(profile, cluster))
    options = with_one_optimizer(options, profile)
    problem = problem_of(options, layer_costs_on(profile, cluster), cluster, budget, tuning)

    check_divided_loss(
        profile.model,
        profile.loss,
        problem.schedule,
        problem.microbatches,
        accepted=options.accept_divided_loss,
    )
    _check_times(profile)
    _check_sharding(problem)
    _check_degrees(problem)
    _check_staleness(problem)
    return replace(problem, solver=options.solver)


def options_of(plan: Plan) -> SolveOptions:
    """Return the options that `plan` was solved with, as far as it records them."""
    return SolveOptions(
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        depth=plan.solver.depth,
        tensor=sorted({1, *plan.degrees}),
        chunks=plan.chunks,
    )


def options_asked(plan: Plan) -> SolveOptions:
    """Return the options that `plan` was solved with, with what its user asked its stages to be
    like.
    """
    rules = plan.solver.rules or AskedRules()
    return replace(
        options_of(plan),
        recompute=rules.recompute,
        shard_optimizer=rules.shard_optimizer,
        max_stages=rules.max_stages,
        max_staleness=rules.max_staleness,
        granularity=rules.granularity,
    )


def with_one_optimizer(options: SolveOptions, profile: Profile) -> SolveOptions:
    """Return the options for plans whose workers each step all parameters, where the optimizer
    combines them.

    Raise InputError where `tensor` asks for ranks that divide them.
    """
    if profile.optimizer_separable is not False:
        return options
    if options.tensor and 1 not in options.tensor:
        raise InputError(
            f"the optimizer of '{profile.model}' combines parameters, which ranks of `tensor` "
            f"would divide",
            hint="leave `tensor` out, or take an optimizer that updates each parameter by itself, "
            "such as AdamW",
        )
    return replace(options, max_stages=1, tensor=(1,))


def _check_times(profile: Profile) -> None:
    if all(layer.forward_s + layer.backward_s + layer.update_s <= 0 for layer in profile.layers):
        raise ProfileError(
            f"the layers of '{profile.model}' take no time, so there is nothing to divide",
            hint=REMEDY,
        )


def _check_sharding(problem: Problem) -> None:
    profile = problem.layer_costs.profile
    if problem.rules.shard_optimizer == "always" and not profile.may_shard_optimizer:
        raise InputError(
            f"`shard_optimizer=always` needs an optimizer that replicas can shard, and the "
            f"profile of "
            f"'{profile.model}' does not say so of its own",
            hint="profile the model again if its optimizer is one, such as Adam; or use "
            "`shard_optimizer=never`",
        )


def _check_degrees(problem: Problem) -> None:
    degrees = list(problem.rules.tensor)
    if min(degrees) < 1 or degrees != sorted(set(degrees)):
        numbers = ",".join(map(str, degrees))
        raise InputError(
            f"`tensor={numbers}` are no ascending numbers of ranks", hint="write them as in 1,2,4,8"
        )

    for number, degree in enumerate(degrees):
        if number > 0 or degree > 1:
            costs_at(problem.layer_costs.given, degree)
            groups_of(problem.cluster, degree)


def _check_staleness(problem: Problem) -> None:
    most = problem.rules.max_staleness
    late = problem.schedule.staleness(1)
    if most is not None and late > most:
        raise InputError(
            f"`max_staleness={most}` is less than the {late} update by which gradients under "
            f"{problem.schedule} "
            "are stale in every plan",
            hint="use a `schedule` that drains the pipeline, such as 1f1b-flush",
        )
