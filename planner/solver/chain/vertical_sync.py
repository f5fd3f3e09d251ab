"""Plans for 1f1b with vertical sync, whose stages hold weight versions by the depth of the first stage.

The search walks from the last layer to the first, so it does not know that depth. It is asked for plans whose stages
all hold the same number of versions, whatever is in flight, and what it finds must fit with the versions that the plan
really has. With one version each, this is a relaxation, whose bound holds for all plans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner.cost.layer_costs import LayerCosts
from planner.cost.price import stage_memory
from planner.errors import InfeasibleError
from planner.schedule.vertical_sync import Entry, versions_held
from planner.solver.problem import DepthRule, Problem
from planner.solver.result import Evaluation, Found


def solve_synced(problem: Problem, answer: Callable[[Problem], Found]) -> Found:
    """Find the best plan of the search `answer` whose versions under vertical sync fit the memory.

    Raises:
        InfeasibleError: if there is none.
    """

    def holding(versions: int, depth: DepthRule) -> Found:
        problem.budget.seen.clear()  # the same stages are other plans with other versions
        layer_costs = problem.layer_costs.holding(versions)
        found = answer(replace(problem, layer_costs=layer_costs, depth=depth))
        return replace(found, best=synced(problem.layer_costs, found.best))

    relaxed = holding(1, problem.depth)
    if relaxed.best.fits(problem.cluster):
        return relaxed
    depths: list[DepthRule] = ["auto", "published"] if problem.depth == "auto" else [problem.depth]
    # Deeper pipelines hold more versions, so the published depths may fit where chosen ones do not.
    for depth in depths:
        for versions in range(2, problem.cluster.gpus + 2):
            try:
                found = holding(versions, depth)
            except InfeasibleError:
                break
            if found.best.fits(problem.cluster):
                return replace(found, bound_s=min(relaxed.bound_s, found.bound_s))
    raise InfeasibleError(
        f"no plan found on {problem.cluster.gpus} GPUs holds the versions of its weights that vertical sync needs",
        hint="leave `vertical_sync` out, or take `schedule=2bw`, which holds two",
    )


def synced(layer_costs: LayerCosts, plan: Evaluation) -> Evaluation:
    """Return the plan with the memory of vertical sync's versions."""
    entry = Entry(plan.stages[0].replicas, plan.price.in_flight[0])
    memory = tuple(
        stage_memory(layer_costs.footprint(stage), flying, versions_held(entry, stage.replicas))
        for stage, flying in zip(plan.stages, plan.price.in_flight, strict=True)
    )
    return replace(plan, price=replace(plan.price, memory=memory))
