"""The plan for schedules with several stages per worker: the search's best shapes, compared by simulation."""

from __future__ import annotations

from dataclasses import replace

from planner.cost.network.placement import places_matter
from planner.cost.stage_options import RecomputeRule
from planner.errors import InputError
from planner.solver.candidates.evaluation import fastest, priced
from planner.solver.chain.interleaved import InterleavedSearch
from planner.solver.chain.states import Chain
from planner.solver.infeasible import Fits, UnexplainedError, explain
from planner.solver.problem import Problem
from planner.solver.result import Evaluation, Found, stages_along


def solve_interleaved(problem: Problem) -> Found:
    """Find the best interleaved plan along the profile's order.

    Raises:
        InputError: if there are too few GPUs, layers or microbatches to interleave anything.
        InfeasibleError: if no plan fits the memory.
    """
    space, setting, limits = Chain(problem.layer_costs), problem.setting, problem.limits

    def fitting(recompute: RecomputeRule) -> Fits:
        def fits(gpus: int, memory_bytes: int) -> Evaluation | None:
            other = replace(
                limits, gpus=gpus, memory_bytes=memory_bytes, rules=replace(limits.rules, recompute=recompute)
            )
            paths, _ = InterleavedSearch(space, setting, other).best()
            return priced(problem, stages_along(space, paths[0])) if paths else None

        return fits

    search = InterleavedSearch(space, setting, limits)
    if not search.shapes():
        raise InputError(
            f"nothing can be interleaved with {limits.gpus} GPUs, {len(space) - 1} places to end a stage and "
            f"{setting.microbatches} microbatches",
            hint=f"it takes 2 GPUs, {2 * setting.chunks} such places for {setting.chunks} chunks each, and "
            "2 microbatches",
        )
    paths, bound_s = search.best()
    if not paths:
        others = {"`recompute=auto`": fitting("auto")} if limits.recompute == "never" else {}
        raise UnexplainedError(lambda: explain(problem, fitting(limits.recompute), others))
    if places_matter(problem.cluster):
        # With all links as near as the nearest no plan takes longer, so its bound holds, and the cuts suit plans whose
        # pipelines stay within servers.
        near_paths, bound_s = InterleavedSearch(space, setting, limits, problem.topology.link(0)).best()
        paths = list({(path.states, path.options): path for path in [*paths, *near_paths]}.values())
    best = fastest(problem, (priced(problem, stages_along(space, path)) for path in paths))
    return Found(best, min(bound_s, best.seconds))
