"""What is asked of the solver, apart from profile and cluster, and plans by name priced as the solver prices them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.cost.asynchronous import DIVIDED, RecomputeRule
from planner.cost.layer_costs import Candidate, Ledger
from planner.cost.plan_price import Price
from planner.cost.pricing import price
from planner.errors import PlanError
from planner.formats.cluster import Cluster
from planner.formats.plan import CostModelName, Plan, ScheduleName
from planner.formats.profile import Profile
from planner.solver import solve
from planner.solver.candidates.depth import DepthRule
from planner.solver.candidates.trials import simulated_price

MICROBATCHES_PER_GPU = 4  # from which on GPipe calls its bubble negligible


@dataclass(frozen=True)
class Question:
    """How to solve: the arguments of `solve` beside profile and cluster.

    `microbatches`: per minibatch; None for `MICROBATCHES_PER_GPU` where the schedule divides minibatches.
    """

    cost_model: CostModelName = "resource"
    schedule: ScheduleName = "1f1b"
    microbatches: int | None = None
    depth: DepthRule = "auto"
    recompute: RecomputeRule = "auto"
    chunks: int = 2  # of the model on each GPU, under interleaved

    def microbatches_on(self, cluster: Cluster) -> int:
        """Microbatches per minibatch on this cluster."""
        if self.microbatches is not None:
            return self.microbatches
        return MICROBATCHES_PER_GPU * cluster.gpus if self.schedule in DIVIDED else 1

    def solve(self, profile: Profile, cluster: Cluster) -> Plan:
        """The fastest plan.

        Raises:
            InfeasibleError, InputError: as `solve`.
        """
        return solve(
            profile,
            cluster,
            cost_model=self.cost_model,
            schedule=self.schedule,
            microbatches=self.microbatches_on(cluster),
            depth=self.depth,
            recompute=self.recompute,
            chunks=self.chunks,
        )

    def price(self, ledger: Ledger, stages: Sequence[Candidate], cluster: Cluster) -> Price:
        """What these stages cost, by simulation where the cost model is the planner's own."""
        cost = self.formula(ledger, stages, cluster)
        if self.cost_model != "resource":
            return cost
        microbatches = self.microbatches_on(cluster)
        return simulated_price(ledger, stages, cluster, cost, self.depth, self.schedule, microbatches)

    def fastest(self, ledger: Ledger, options: Iterable[Sequence[Candidate]], cluster: Cluster) -> list[Candidate]:
        """The fastest of some lists of stages; at least one."""
        best: Sequence[Candidate] = ()
        best_s = math.inf
        for bound_s, stages in self.by_formula(ledger, options, cluster):
            if bound_s >= best_s:
                break  # waits only add
            seconds = self.price(ledger, stages, cluster).seconds_per_minibatch
            if seconds < best_s:
                best, best_s = stages, seconds
        return list(best)

    def by_formula(
        self, ledger: Ledger, options: Iterable[Sequence[Candidate]], cluster: Cluster
    ) -> list[tuple[float, Sequence[Candidate]]]:
        """Lists of stages with their seconds per minibatch by the cost model, the fastest first."""
        priced = [(self.formula(ledger, stages, cluster).seconds_per_minibatch, stages) for stages in options]
        return sorted(priced, key=lambda option: option[0])

    def formula(self, ledger: Ledger, stages: Sequence[Candidate], cluster: Cluster) -> Price:
        """What they cost by the cost model."""
        return price(
            ledger,
            stages,
            cluster,
            model=self.cost_model,
            schedule=self.schedule,
            microbatches=self.microbatches_on(cluster),
            chunks=self.chunks if self.schedule == "interleaved" else 1,
        )


def question_of(plan: Plan) -> Question:
    """What `plan` answers."""
    return Question(
        cost_model=plan.solver.cost_model,
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        chunks=plan.chunks,
    )


def stages_of(ledger: Ledger, plan: Plan) -> list[Candidate]:
    """The plan's stages, by the positions of their layers.

    Raises:
        PlanError: when the plan was made from another profile, or for GPUs that differ or layers that are not
            contiguous, which the formulas of alike GPUs do not price.
    """
    if plan.cluster.kinds or not plan.contiguous:
        raise PlanError(
            "the plan is for GPUs that differ, or its stages are scattered over the model",
            hint="compare and explain plans for GPUs that are alike",
        )
    if plan.profile_digest != ledger.profile.digest:
        raise PlanError(
            f"the plan was made from another profile of '{plan.model}' than this one of '{ledger.profile.model}'",
            hint="give the plan's own `profile`, or solve again",
        )
    before: frozenset[int] = frozenset()
    stages = []
    for stage in plan.stages:
        layers = frozenset(ledger.position[name] for name in stage.layers)
        stages.append(Candidate(before, layers, stage.replicas, stage.recompute))
        before |= layers
    return stages
