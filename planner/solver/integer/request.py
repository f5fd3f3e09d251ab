"""What the integer programs are asked, and their answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from planner.cost.layer_costs import Candidate, LayerCosts
from planner.cost.price import Price
from planner.cost.pricing import price
from planner.cost.setting import Setting
from planner.cost.stage_options import RecomputeRule
from planner.formats.cluster import Cluster, DeviceKind
from planner.formats.constraints import Constraints
from planner.formats.plan import CostModelName
from planner.formats.profile import Profile
from planner.schedule.one_forward_one_backward import ONE_F_ONE_B
from planner.schedule.schedule import Schedule


@dataclass(frozen=True)
class Request:
    """A model, a cluster, and what the plan is for and must respect."""

    layer_costs: LayerCosts
    cluster: Cluster
    model: CostModelName = "resource"
    schedule: Schedule = ONE_F_ONE_B
    microbatches: int = 1
    recompute: RecomputeRule = "auto"
    constraints: Constraints = field(default_factory=Constraints)

    @property
    def keeps_order(self) -> bool:
        """Whether stages must be runs of consecutive layers: the executor builds no others."""
        return self.layer_costs.profile.trainable

    @property
    def simulated(self) -> bool:
        """Return whether plans are judged by their simulation: not under the published models."""
        return self.model == "resource"

    @property
    def kinds(self) -> tuple[DeviceKind | None, ...]:
        """The kinds of GPUs; None for the profiled one, when there is no other."""
        return self.cluster.kinds or (None,)

    def count(self, kind: DeviceKind | None) -> int:
        """GPUs of that kind."""
        return self.cluster.gpus if kind is None else kind.count

    @property
    def groups(self) -> list[frozenset[int]]:
        """Positions of layers that no cut may separate; each layer once."""
        return self.constraints.groups(self.layer_costs.profile)

    def about(self, profile: Profile) -> Request:
        """The same request about another profile."""
        return replace(self, layer_costs=LayerCosts(profile))

    def without_constraints(self) -> Request:
        """The same request with its constraints in the profile, as forbidden cuts; they must say no more than that."""
        profile = self.constraints.as_forbidden_cuts(self.layer_costs.profile, in_order=self.keeps_order)
        assert profile is not None
        return (
            self
            if self.constraints.empty
            else replace(self, layer_costs=LayerCosts(profile), constraints=Constraints())
        )

    def priced(self, stages: Sequence[Candidate]) -> Price:
        """The price of a plan."""
        return price(self.layer_costs, stages, self.setting)

    @property
    def setting(self) -> Setting:
        """What plans are priced for."""
        return Setting(self.cluster, self.schedule, self.microbatches, cost_model=self.model)


@dataclass(frozen=True)
class IlpAnswer:
    """The best plan found, the time that no plan beats, and whether they are the same."""

    stages: tuple[Candidate, ...]
    seconds: float
    bound_s: float
    optimal: bool


def ranked(request: Request, stages: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The stages with ranks where GPUs differ: pinned ones, and the first that are free of each kind."""
    cluster, position = request.cluster, request.layer_costs.position
    if not cluster.kinds:
        return tuple(stages)
    pinned = {position[name]: rank for name, rank in request.constraints.gpu_of.items()}
    free = [rank for rank in range(cluster.gpus) if rank not in pinned.values()]
    ranked = []
    for stage in stages:
        ranks = {pinned[layer] for layer in stage.layers if layer in pinned}
        alike = [rank for rank in free if cluster.kind_of(rank) == stage.options.kind]
        ranks.update(alike[: stage.replicas - len(ranks)])
        free = [rank for rank in free if rank not in ranks]
        ranked.append(replace(stage, ranks=tuple(sorted(ranks))))
    return tuple(ranked)
