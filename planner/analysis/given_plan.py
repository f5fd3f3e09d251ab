"""Price a given plan: the plan's stages and schedule in the terms of the cost model and the solver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.analysis.solve_options import SolveOptions, check_workers
from planner.cost.candidate import Candidate, StageOptions
from planner.cost.kinds import with_kinds
from planner.cost.layer_costs import LayerCosts
from planner.cost.network.placement import Busy
from planner.cost.overheads import Price
from planner.cost.pricing import busy_resources
from planner.cost.tensor import layer_costs_on
from planner.errors import PlanError
from planner.formats.cluster import Cluster
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.plan.rank_groups import of_groups
from planner.solver.evaluate.evaluation import evaluate
from planner.solver.problem.budget import Patience
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation
from planner.solver.problem.stage_rules import StageRules


@dataclass(frozen=True)
class GivenPlan:
    """A plan, the profile it was made from, and the options it was solved with.

    Attributes:
        layer_costs: costs of the profile's layers.
        plan: from `solve` or `load_plan`.
        options: under which it and its alternatives are priced.
        stages: of the plan, by the positions of their layers.
    """

    layer_costs: LayerCosts
    plan: Plan
    options: SolveOptions
    stages: tuple[Candidate, ...]

    @classmethod
    def of(
        cls, profile: Profile, plan: Plan, options: SolveOptions | None = None, patience: Patience | None = None
    ) -> GivenPlan:
        """Prepare `plan`; without `options`, take those that the plan records, and `patience` for what is solved.

        Raises:
            PlanError: if the plan was made from another profile.
        """
        layer_costs = layer_costs_on(profile, plan.cluster)
        if plan.profile_digest != profile.digest:
            raise PlanError(
                f"the plan was made from another profile of '{plan.model}' than this one of '{profile.model}'",
                hint="give the plan's own `profile`, or solve again",
            )
        names = [name for stage in plan.stages for name in stage.layers]
        if missing := set(names) ^ set(layer_costs.position):
            has, lacks = ("plan", "profile") if min(missing) in names else ("profile", "plan")
            raise PlanError(
                f"the {has} has a layer '{min(missing)}', which the {lacks} has not",
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
        recorded = options_of(plan).problem(layer_costs, plan.cluster)
        placed = with_kinds(layer_costs, stages, recorded.setting)
        return cls(layer_costs, plan, options or options_of(plan, patience), placed)

    @property
    def seconds(self) -> float:
        """Predicted seconds per minibatch."""
        return self.plan.predicted.seconds_per_minibatch

    @property
    def simulated(self) -> bool:
        """Whether the plan's seconds are those of a simulation."""
        return self.plan.predicted.by == "simulation"

    def within(self, share: float) -> GivenPlan:
        """Return the same, with this share of the time that is left for what is solved."""
        return replace(self, options=self.options.within(share))

    def price(self) -> Price:
        """Price the plan, with the time and the memory that it states: it may have been solved for other depths."""
        return replace(
            self._as_recorded.price(self.stages),
            seconds_per_minibatch=self.seconds,
            memory=tuple(stage.memory for stage in self.plan.stages),
        )

    @property
    def problem(self) -> Problem:
        """The problem of pricing the plan and its alternatives."""
        return self.options.problem(self.layer_costs, self.plan.cluster)

    @property
    def _as_recorded(self) -> Problem:
        """The problem that the plan itself records."""
        return options_of(self.plan).problem(self.layer_costs, self.plan.cluster)

    def evaluate(self, stages: Sequence[Candidate], cluster: Cluster | None = None) -> Evaluation:
        """Evaluate other stages under the same options, on the plan's cluster or on another one.

        Where GPUs differ, stages run at the pace of those of their ranks.
        """
        if cluster is None:
            return evaluate(self.problem, stages)
        return evaluate(self.options.problem(layer_costs_on(self.layer_costs.profile, cluster), cluster), stages)

    def on(self, cluster: Cluster) -> Plan:
        """Return the plan's stages on another cluster, priced and simulated there, whether or not they fit its memory.

        Raises:
            InputError: if the cluster has fewer GPUs than the plan.
        """
        check_workers(self.plan.workers, cluster)
        return self.options.price(layer_costs_on(self.layer_costs.profile, cluster), cluster, self.stages)

    def busy_resources(self) -> Sequence[Busy]:
        """Compute the busy seconds per minibatch of each stage's resources."""
        within, groups, _ = self._as_recorded.in_groups(self.stages)
        return busy_resources(within.layer_costs, groups, within.setting)


def options_of(plan: Plan, patience: Patience | None = None) -> SolveOptions:
    """Return the options that `plan` was solved with, as far as it records them."""
    return SolveOptions(
        patience=patience or Patience(),
        cost_model=plan.solver.cost_model,
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        depth=plan.solver.depth,
        rules=StageRules(tensor=tuple(sorted({1, *plan.degrees}))),
        chunks=plan.chunks,
    )
