"""Price a given plan, and alternatives to it: its stages and schedule in the terms of the cost model and the solver."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from planner.cost.candidate import Candidate, StageOptions
from planner.cost.kinds import with_kinds
from planner.cost.layer_costs import LayerCosts
from planner.cost.network.placement import Busy
from planner.cost.overheads import Price
from planner.cost.pricing import busy_resources
from planner.cost.tensor import layer_costs_on
from planner.errors import InputError, PlanError
from planner.formats.cluster import Cluster
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.options.solving import SolveOptions
from planner.plan.rank_groups import of_groups
from planner.solver.assemble import GIVEN, complete
from planner.solver.evaluate.evaluation import evaluate, priced
from planner.solver.find_plan import setting_of
from planner.solver.problem.budget import Budget, Patience
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation


def problem_of(
    options: SolveOptions, layer_costs: LayerCosts, cluster: Cluster, budget: Budget | None = None
) -> Problem:
    """Return the problem of pricing plans on this cluster, each of which takes what it takes without a `budget`."""
    setting = setting_of(options, layer_costs.profile, cluster)
    return Problem(layer_costs, setting, options.rules, options.depth, budget=budget or Budget.unlimited())


def priced_plan(
    options: SolveOptions,
    layer_costs: LayerCosts,
    cluster: Cluster,
    stages: Sequence[Candidate],
    patience: Patience | None = None,
) -> Plan:
    """Return the plan of these stages, priced and simulated, whether or not they fit the memory."""
    budget = Budget.unlimited((patience or Patience()).deadline)
    # A plan that does not fit has a price, too.
    problem = problem_of(options, layer_costs, cluster.with_memory(lambda _: None), budget)
    return complete(problem, evaluate(problem, stages), GIVEN).model_copy(update={"cluster": cluster})


def check_workers(needed: int, cluster: Cluster) -> None:
    """Check that the cluster has the GPUs that stages need; raise InputError naming both numbers."""
    if needed > cluster.gpus:
        raise InputError(
            f"the stages need {needed} GPUs, and the cluster has {cluster.gpus}", hint=f"give `gpus={needed}` or more"
        )


def fastest(problem: Problem, plans: Iterable[Sequence[Candidate]], *, must_fit: bool = False) -> Evaluation | None:
    """Return the fastest of several lists of stages; None if none fits."""
    best: Evaluation | None = None
    for candidate in sorted((priced(problem, stages) for stages in plans), key=lambda candidate: candidate.seconds):
        if best is not None and candidate.seconds >= best.seconds:
            break  # simulating can only add waiting time
        evaluation = evaluate(problem, candidate.stages)
        if must_fit and not evaluation.fits(problem.cluster):
            continue
        if best is None or evaluation.saves(best, 0.0):
            best = evaluation
    return best


@dataclass(frozen=True)
class GivenPlan:
    """A plan, the profile it was made from, and the options it was solved with."""

    layer_costs: LayerCosts
    plan: Plan
    options: SolveOptions  # under which it and its alternatives are priced
    stages: tuple[Candidate, ...]
    patience: Patience  # of everything that is solved or simulated, together

    @classmethod
    def of(
        cls, profile: Profile, plan: Plan, options: SolveOptions | None = None, patience: Patience | None = None
    ) -> GivenPlan:
        """Prepare `plan`, with the options that it records by default; raise PlanError if its profile is another."""
        layer_costs = layer_costs_on(profile, plan.cluster)
        if plan.profile_digest != profile.digest:
            raise PlanError(
                f"the plan was made from another profile of '{plan.model}' than this one of '{profile.model}'",
                hint="give the plan's own `profile`, or solve again",
            )
        if missing := {name for stage in plan.stages for name in stage.layers} ^ set(layer_costs.position):
            raise PlanError(
                f"only one of plan and profile has the layer '{min(missing)}'",
                hint="make the plan again with: plan solve",
            )
        in_order = dict.fromkeys(rank for stage in plan.stages for rank in stage.ranks)
        as_usual = list(in_order) == list(range(plan.workers))
        before: frozenset[int] = frozenset()
        stages = []
        for stage, own in zip(plan.stages, of_groups(plan).stages, strict=True):
            layers = frozenset(layer_costs.position[name] for name in stage.layers)
            groups = (frozenset(layer_costs.position[name] for name in names) for names in stage.recompute_groups)
            how = StageOptions(stage.replicas, stage.sharded, tuple(groups), tensor=stage.tensor)
            stages.append(Candidate(before, layers, how, () if as_usual else own.ranks))
            before |= layers
        placed = with_kinds(layer_costs, stages, setting_of(options_of(plan), profile, plan.cluster))
        options = options or options_of(plan)
        patience = patience or Patience.of(options.time_limit_s, options.progress)
        return cls(layer_costs, plan, options, placed, patience)

    @property
    def seconds(self) -> float:
        """Predicted seconds per minibatch."""
        return self.plan.predicted.seconds_per_minibatch

    @property
    def simulated(self) -> bool:
        """Whether the plan's seconds are those of a simulation."""
        return self.plan.predicted.by == "simulation"

    def within(self, share: float) -> GivenPlan:
        """Return the plan with this share of the time that is left for what is solved."""
        return replace(self, patience=self.patience.part(share))

    def price(self) -> Price:
        """Price the plan, with the time, depths and memory that it states: a simulation may have chosen others."""
        return replace(
            self._as_recorded.price(self.stages),
            seconds_per_minibatch=self.seconds,
            in_flight=tuple(stage.in_flight for stage in self.plan.stages),
            memory=tuple(stage.memory for stage in self.plan.stages),
        )

    @property
    def problem(self) -> Problem:
        """The problem of pricing the plan and its alternatives."""
        return self.problem_on(self.plan.cluster)

    @property
    def _as_recorded(self) -> Problem:
        return problem_of(options_of(self.plan), self.layer_costs, self.plan.cluster)

    def problem_on(self, cluster: Cluster) -> Problem:
        """Return the problem of pricing stages on a cluster under the plan's options."""
        known = cluster == self.plan.cluster
        layer_costs = self.layer_costs if known else layer_costs_on(self.layer_costs.profile, cluster)
        return problem_of(self.options, layer_costs, cluster, Budget.unlimited(self.patience.deadline))

    def on(self, cluster: Cluster) -> Plan:
        """Return the plan's stages on another cluster, priced and simulated there, whether or not they fit its memory.

        Raise InputError if the cluster has fewer GPUs than the plan.
        """
        check_workers(self.plan.workers, cluster)
        layer_costs = layer_costs_on(self.layer_costs.profile, cluster)
        return priced_plan(self.options, layer_costs, cluster, self.stages, self.patience)

    def busy_resources(self) -> Sequence[Busy]:
        """Compute the busy seconds per minibatch of each stage's resources."""
        within, groups, _ = self._as_recorded.in_groups(self.stages)
        return busy_resources(within.layer_costs, groups, within.setting)


def options_of(plan: Plan) -> SolveOptions:
    """Return the options that `plan` was solved with, as far as it records them."""
    return SolveOptions(
        cost_model=plan.solver.cost_model,
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        depth=plan.solver.depth,
        tensor=sorted({1, *plan.degrees}),
        chunks=plan.chunks,
    )
