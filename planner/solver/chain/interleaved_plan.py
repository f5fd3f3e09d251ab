"""The interleaved plan for a cluster: the shapes that the search likes best, by what their simulated streams take."""

from __future__ import annotations

from collections.abc import Sequence

from planner.cost.layer_costs import Candidate, LayerCosts
from planner.cost.link import link_of
from planner.cost.price import Price
from planner.cost.pricing import price
from planner.cost.setting import Setting
from planner.cost.stage_options import RecomputeRule
from planner.errors import InputError
from planner.formats.cluster import Cluster
from planner.schedule.schedule import Schedule
from planner.solver.candidates.trials import Trials
from planner.solver.chain.interleaved import InterleavedSearch
from planner.solver.chain.search import Path, stages_along
from planner.solver.chain.states import Chain
from planner.solver.infeasible import explain

Answer = tuple[Sequence[Candidate], Price]


def solve_interleaved(
    layer_costs: LayerCosts, cluster: Cluster, microbatches: int, chunks: int, recompute: RecomputeRule, trials: Trials
) -> tuple[Sequence[Candidate], Price, float]:
    """The best interleaved plan found: its stages, its price, and a time that no such plan along the order is below.

    Raises:
        InputError: where there are too few GPUs, layers or microbatches to interleave anything.
        InfeasibleError: where no plan fits the memory.
    """
    space, deadline, schedule = Chain(layer_costs), trials.tally.deadline, trials.schedule

    def search(gpus: int, memory_bytes: int | None, rule: RecomputeRule = recompute) -> InterleavedSearch:
        return InterleavedSearch(
            space, schedule, link_of(cluster), gpus, memory_bytes, microbatches, chunks, rule, deadline
        )

    def fits(gpus: int, memory_bytes: int) -> Answer | None:
        paths, _ = search(gpus, memory_bytes).best()
        return _priced(layer_costs, space, cluster, schedule, paths[0], microbatches, chunks) if paths else None

    def fits_recomputing(gpus: int, memory_bytes: int) -> Answer | None:
        paths, _ = search(gpus, memory_bytes, "auto").best()
        return _priced(layer_costs, space, cluster, schedule, paths[0], microbatches, chunks) if paths else None

    asked = search(cluster.gpus, cluster.memory_bytes)
    if not asked.shapes():
        raise InputError(
            f"nothing can be interleaved with {cluster.gpus} GPUs, {len(space) - 1} places to end a stage and "
            f"{microbatches} microbatches",
            hint=f"it takes 2 GPUs, {2 * chunks} such places for {chunks} chunks each, and 2 microbatches",
        )
    paths, bound_s = asked.best()
    if not paths:
        raise explain(
            layer_costs, cluster, fits, {"`recompute=auto`": fits_recomputing} if recompute == "never" else {}
        )
    stages, cost = trials.fastest(
        layer_costs, (_priced(layer_costs, space, cluster, schedule, path, microbatches, chunks) for path in paths)
    )
    return stages, cost, min(bound_s, cost.seconds_per_minibatch)


def _priced(
    layer_costs: LayerCosts,
    space: Chain,
    cluster: Cluster,
    schedule: Schedule,
    path: Path,
    microbatches: int,
    chunks: int,
) -> Answer:
    stages = stages_along(space, path)
    return stages, price(layer_costs, stages, Setting(cluster, schedule, microbatches, chunks))
