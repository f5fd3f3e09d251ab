"""Plans for 1f1b with vertical sync, whose stages hold versions of the weights by the depth of the first stage.

A walk from the last layer to the first does not know that depth. So it is asked for plans whose stages all hold the
same number of versions, whatever is in flight, and what it finds is held to the versions that the plan really has. With
one version each this is a relaxation, whose bound holds for all plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from planner.cost.layer_costs import Candidate, LayerCosts
from planner.cost.price import Price, stage_memory
from planner.errors import InfeasibleError
from planner.formats.profile import Profile
from planner.schedule.vertical_sync import Entry, versions_held
from planner.solver.candidates.depth import DepthRule
from planner.solver.integer.request import Request
from planner.solver.methods import Found

Answer = Callable[[Request, DepthRule], tuple[Found, Price]]


def solve_synced(request: Request, depth: DepthRule, answer: Answer) -> tuple[Found, Price]:
    """The best plan found by `answer` whose versions under vertical sync fit the memory, with these in its price.

    Raises:
        InfeasibleError: when there is none.
    """

    def holding(versions: int, rule: DepthRule) -> tuple[Found, Price]:
        found, cost = answer(request.about(with_versions(request.layer_costs.profile, versions)), rule)
        return found, synced_price(request.layer_costs, found.stages, cost)

    found, cost = relaxed = holding(1, depth)
    if _fits(request, found.stages, cost):
        return relaxed
    bound_s = found.bound_s
    rules: list[DepthRule] = ["auto", "published"] if depth == "auto" else [depth]
    for rule in rules:
        for versions in range(2, request.cluster.gpus + 2):
            try:
                found, cost = holding(versions, rule)
            except InfeasibleError:
                break
            if _fits(request, found.stages, cost):
                return replace(found, bound_s=min(bound_s, found.bound_s)), cost
    raise InfeasibleError(
        f"no plan found on {request.cluster.gpus} GPUs holds the versions of its weights that vertical sync needs",
        hint="leave `vertical_sync` out, or take `schedule=2bw`, which holds two",
    )


def with_versions(profile: Profile, versions: int) -> Profile:
    """The profile with `versions` of the weights held whatever is in flight."""
    layers = tuple(
        layer.model_copy(update={"weight_bytes": 0, "buffer_bytes": layer.buffer_bytes + versions * layer.weight_bytes})
        for layer in profile.layers
    )
    return profile.model_copy(update={"layers": layers})


def synced_price(layer_costs: LayerCosts, stages: Sequence[Candidate], price: Price) -> Price:
    """`price` with the memory of vertical sync's versions."""
    entry = Entry(stages[0].replicas, price.in_flight[0])
    memory = tuple(
        stage_memory(layer_costs.footprint(stage), flying, versions_held(entry, stage.replicas))
        for stage, flying in zip(stages, price.in_flight, strict=True)
    )
    return replace(price, memory=memory)


def _fits(request: Request, stages: Sequence[Candidate], cost: Price) -> bool:
    limits = [request.cluster.memory_of(stage.options.kind) for stage in stages]
    return all(limit is None or held.total_bytes <= limit for held, limit in zip(cost.memory, limits, strict=True))
