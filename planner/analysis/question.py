"""What a caller asks of the solver beside profile and cluster, and how plans are priced under the same question."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.cost.layer_costs import Candidate, LayerCosts
from planner.cost.price import Price
from planner.cost.pricing import price
from planner.cost.setting import Setting
from planner.cost.stage_options import RecomputeRule
from planner.formats.cluster import Cluster
from planner.formats.plan import CostModelName, Plan
from planner.formats.profile import Profile
from planner.schedule.defaults import CHUNKS, MICROBATCHES_PER_GPU
from planner.schedule.one_forward_one_backward import ONE_F_ONE_B
from planner.schedule.schedule import Schedule
from planner.solver import solve
from planner.solver.candidates.depth import DepthRule
from planner.solver.candidates.trials import simulated_price


@dataclass(frozen=True)
class Question:
    """The arguments of `solve` beside profile and cluster.

    `microbatches`: per minibatch; None means `MICROBATCHES_PER_GPU` for schedules that divide minibatches.
    """

    cost_model: CostModelName = "resource"
    schedule: Schedule = ONE_F_ONE_B
    microbatches: int | None = None
    depth: DepthRule = "auto"
    recompute: RecomputeRule = "auto"
    chunks: int = CHUNKS  # of the model on each GPU, under interleaved

    def microbatches_on(self, cluster: Cluster) -> int:
        """Return the number of microbatches per minibatch on this cluster."""
        if self.microbatches is not None:
            return self.microbatches
        return MICROBATCHES_PER_GPU * cluster.gpus if self.schedule.divides else 1

    def setting_on(self, cluster: Cluster) -> Setting:
        """Return what plans on this cluster are priced for."""
        chunks = self.schedule.fixed_chunks or self.chunks
        return Setting(cluster, self.schedule, self.microbatches_on(cluster), chunks, self.cost_model)

    def solve(self, profile: Profile, cluster: Cluster) -> Plan:
        """Find the fastest plan.

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

    def price(self, layer_costs: LayerCosts, stages: Sequence[Candidate], cluster: Cluster) -> Price:
        """Price these stages, by simulation if the cost model is the planner's own."""
        cost = self.formula(layer_costs, stages, cluster)
        if self.cost_model != "resource":
            return cost
        microbatches = self.microbatches_on(cluster)
        return simulated_price(layer_costs, stages, cluster, cost, self.depth, self.schedule, microbatches)

    def fastest(
        self,
        layer_costs: LayerCosts,
        options: Iterable[Sequence[Candidate]],
        cluster: Cluster,
        *,
        must_fit: bool = False,
    ) -> tuple[float, Sequence[Candidate]] | None:
        """Return the fastest of several lists of stages with its seconds per minibatch; None if none fits."""
        best: tuple[float, Sequence[Candidate]] | None = None
        bounds = [(self.formula(layer_costs, stages, cluster).seconds_per_minibatch, stages) for stages in options]
        for bound_s, stages in sorted(bounds, key=lambda bound: bound[0]):
            if best is not None and bound_s >= best[0]:
                break  # simulating can only add waiting time
            cost = self.price(layer_costs, stages, cluster)
            if must_fit and not fits(cost, cluster):
                continue
            if best is None or cost.seconds_per_minibatch < best[0]:
                best = cost.seconds_per_minibatch, stages
        return best

    def formula(self, layer_costs: LayerCosts, stages: Sequence[Candidate], cluster: Cluster) -> Price:
        """Price these stages by the cost model, without simulating."""
        return price(layer_costs, stages, self.setting_on(cluster))


def fits(cost: Price, cluster: Cluster) -> bool:
    """Return whether every stage fits the memory of a GPU."""
    limit = cluster.memory_bytes
    return limit is None or all(memory.total_bytes <= limit for memory in cost.memory)
