"""What a plan is asked for, and the problem that a search is given, with the checks of what no plan
keeps.
"""

from dataclasses import dataclass
from functools import cached_property

from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.cost.tensor import costs_at, layer_costs_on
from planner.errors import InputError, ProfileError
from planner.formats.cluster import Cluster
from planner.formats.device_kinds import cluster_for
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.formats.plan_parts import AskedRules
from planner.formats.profile import REMEDY, Profile
from planner.options.solving import SolveOptions
from planner.plan.rank_groups import groups_of, usual_degrees
from planner.plan.shape import check_divided_loss
from planner.plan.trainable import split_compiled_words
from planner.schedule.schedule import Schedule
from planner.solver.clock import Clock
from planner.solver.problem.budget import Budget
from planner.solver.problem.problem import Problem
from planner.solver.tuning.record import STANDARD, Tuning


@dataclass(frozen=True)
class Request:
    """What a plan is asked for.

    Attributes:
        profile: costs per layer, for one microbatch.
        cluster: devices, memory and links, with what the profile says of kinds of devices.
        options: what plans may be like.
        clock: when the answer must be there, whatever time limit the options have.
        tuning: how far searches look, how long, and how near counts as equal.
    """

    profile: Profile
    cluster: Cluster
    options: SolveOptions
    clock: Clock
    tuning: Tuning = STANDARD

    @classmethod
    def of(
        cls,
        profile: Profile,
        cluster: Cluster,
        options: SolveOptions,
        tuning: Tuning = STANDARD,
    ) -> "Request":
        """Return the request whose clock starts now, and runs for the options' time limit."""
        clock = Clock.of(options.time_limit_s, options.progress, tuning.clock)
        return cls(profile, cluster_for(profile, cluster), options, clock, tuning)

    @cached_property
    def layer_costs(self) -> LayerCosts:
        """The costs of layers on the cluster."""
        return layer_costs_on(self.profile, self.cluster)

    @property
    def setting(self) -> Setting:
        """What plans are priced for."""
        microbatches = self.options.microbatches_on(self.cluster, self.profile)
        return Setting(
            self.cluster,
            self.options.order,
            microbatches,
            self.options.chunks_per_gpu,
        )

    def on(self, cluster: Cluster) -> "Request":
        """Ask the same about another cluster."""
        return replace(self, cluster=cluster_for(self.profile, cluster))

    def under(self, schedule: Schedule, microbatches: int | None = None) -> "Request":
        """Ask the same under another schedule; under one that divides no minibatches each is one
        microbatch.

        Args:
            schedule: chosen for the user, who did not ask for it.
            microbatches: of a minibatch; by default those of the options.
        """
        return self.with_options(self.options.under(schedule, microbatches))

    def with_options(self, options: SolveOptions) -> "Request":
        """Ask for plans by other options."""
        return replace(self, options=options)

    def with_clock(self, clock: Clock) -> "Request":
        """Ask for an answer at another time."""
        return replace(self, clock=clock)

    def within(self, share: float) -> "Request":
        """Ask for an answer in this share of the time that is left."""
        return self.with_clock(self.clock.part(share))

    def budget(self) -> Budget:
        """Return what the simulations of one search may spend."""
        return Budget(self.clock, tuning=self.tuning.budget)

    def unlimited_budget(self) -> Budget:
        """Return the budget of simulations that the clock alone ends."""
        return Budget.unlimited(self.clock, self.tuning.budget)

    def problem(self, budget: Budget) -> Problem:
        """Return the problem of pricing plans by the options as they are."""
        return Problem(
            self.layer_costs,
            self.setting,
            self.options.rules,
            self.options.depth,
            budget=budget,
            tuning=self.tuning,
        )

    def settled(self) -> "Request":
        """Ask with the numbers of ranks that may divide layers, where the user left them open.

        An optimizer that combines parameters leaves none: its workers step all of them.

        Raises:
            InputError: for options that such an optimizer does not allow.
        """
        degrees = self.options.tensor or usual_degrees(self.profile, self.cluster)
        options = replace(self.options, tensor=degrees)
        if self.profile.optimizer_separable is not False:
            return self.with_options(options)

        if 1 not in degrees:
            raise InputError(
                f"the optimizer of '{self.profile.model}' combines parameters, which ranks of "
                f"`tensor` would shard",
                hint="leave `tensor` out, or take an optimizer that updates each parameter by "
                "itself, such as AdamW",
            )

        return self.with_options(replace(options, max_stages=1, tensor=(1,)))


def searched_problem(request: Request, budget: Budget) -> Problem:
    """Return the problem of finding the fastest plan.

    Raises:
        InputError: for options that no plan keeps.
        ProfileError: for layers that take no time.
    """
    request = request.settled()
    problem = request.problem(budget)
    profile = request.profile

    check_divided_loss(
        profile.model,
        profile.loss,
        problem.schedule,
        problem.microbatches,
        accepted=request.options.accept_divided_loss,
    )

    _check_times(profile)
    _check_sharding(problem)
    _check_degrees(problem)
    _check_staleness(problem)
    _check_compiled(problem)
    return replace(problem, solver=request.options.solver)


def options_of(plan: Plan) -> SolveOptions:
    """Return the options that `plan` was solved with, as far as it records them."""
    return SolveOptions(
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        depth=plan.solver.depth,
        tensor=sorted({1, *plan.degrees}),
        chunks=plan.chunks,
        accept_divided_loss=plan.loss is not None and plan.loss.accepted,
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


def _check_times(profile: Profile) -> None:
    if all(layer.forward_s + layer.backward_s + layer.update_s <= 0 for layer in profile.layers):
        raise ProfileError(
            f"the layers of '{profile.model}' take no time, so there is nothing to split",
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


def _check_compiled(problem: Problem) -> None:
    if problem.layer_costs.profile.compiled is None or problem.rules.max_stages == 1:
        return
    if problem.schedule.splits_backward:
        raise InputError(
            split_compiled_words(problem.schedule),
            hint="use `schedule=1f1b-flush`, or profile without `compile`",
        )


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
