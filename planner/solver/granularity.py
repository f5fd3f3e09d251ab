"""Cut a model of repeated blocks between its blocks first, and inside blocks where that pays.

Users of transformers think in blocks, and most cuts inside a block send more bytes than those between two. A model of
80 blocks of 11 layers is a chain of 82 links then, not of 885. Inside blocks the plan is sought among all cuts if those
are few, and otherwise among those in the blocks on either side of the cuts that were found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner.errors import InfeasibleError, InputError
from planner.plan.blocks import block_ends
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation, Found
from planner.solver.search.pipeline_search import PipelineSearch

PAYS = 0.02  # share of the time that cuts inside blocks must save
PRECISION = 2e-3  # of searches over blocks: less than timings vary
# Cuts up to which a search looks inside blocks. It takes longer under synchronous schedules, and where the memory is
# limited: then every stage may recompute any of its blocks.
MOST_CUTS, MOST_LIMITED_CUTS = 400, 160


def solve_blocks_first(problem: Problem, answer: Callable[[Problem], Found]) -> Found:
    """Find the best plan of the search `answer` that cuts at blocks' boundaries, or inside blocks where that pays.

    Raises:
        InfeasibleError: if no plan fits the memory.
        InputError: for blocks of a model that has none.
    """
    profile = problem.layer_costs.profile
    ends = frozenset[int]() if problem.rules.granularity == "layer" else block_ends(profile)
    if not ends and problem.rules.granularity == "block":
        raise InputError(
            f"`granularity=block` is for models of repeated blocks, and '{profile.model}' has none",
            hint="use `granularity=layer`",
        )
    if not ends:
        return answer(problem)
    blocks = cut_after(problem, ends)
    if problem.rules.granularity == "block":
        return answer(blocks)
    try:
        found = answer(blocks)
    except InfeasibleError:
        if len(profile.layers) > _most_cuts(problem):
            raise
        return answer(problem)  # smaller stages may fit
    # The bound is one over all cuts.
    layers, most, bound_s = len(profile.layers), _most_cuts(problem), PipelineSearch(problem).relaxed_s()
    best = found
    if bound_s < found.best.seconds * (1 - PAYS) and not problem.deadline.passed:
        everywhere = layers <= most
        cuts = frozenset(range(layers - 1)) if everywhere else ends | _beside(problem, ends, found.best)
        if cuts != ends and len(cuts) <= most:
            inside = answer(problem if everywhere else cut_after(problem, cuts))
            bound_s = inside.bound_s if everywhere else bound_s
            best = inside if inside.best.saves(found.best, PAYS) else found
    return replace(best, bound_s=min(bound_s, best.best.seconds))


def _most_cuts(problem: Problem) -> int:
    many = problem.schedule.asynchronous and problem.cluster.memory_bytes is None
    return MOST_CUTS if many else MOST_LIMITED_CUTS


def _beside(problem: Problem, ends: frozenset[int], plan: Evaluation) -> frozenset[int]:
    """Return the cuts inside the blocks on either side of each of the plan's cuts."""
    cuts = {len(stage.before) - 1 for stage in plan.stages[1:]}
    last = len(problem.layer_costs.profile.layers) - 1
    starts = sorted({-1, *ends, last})
    found: set[int] = set()
    for cut in cuts & ends:
        place = starts.index(cut)
        found.update(range(starts[place - 1] + 1, starts[place + 1]))
    return frozenset(found)


def cut_after(problem: Problem, ends: frozenset[int]) -> Problem:
    """Return the problem with cuts after these layers only, where the profile allows them."""
    profile = problem.layer_costs.profile
    forbidden = {layer.name for number, layer in enumerate(profile.layers) if number not in ends}
    names = tuple(layer.name for layer in profile.layers[:-1] if layer.name in forbidden | {*profile.no_cut_after})
    return replace(problem.with_profile(profile.model_copy(update={"no_cut_after": names})), precision=PRECISION)
