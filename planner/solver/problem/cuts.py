"""Questions about plans that cut at some places only."""

from planner.formats.files import replace
from planner.solver.problem.problem import Problem


def cut_after(problem: Problem, ends: frozenset[int]) -> Problem:
    """Return the question with cuts after these layers only, by position, where the profile allows
    them.
    """
    profile = problem.layer_costs.profile
    forbidden = set(profile.no_cut_after)
    for position, layer in enumerate(profile.layers):
        if position not in ends:
            forbidden.add(layer.name)
    names = tuple(layer.name for layer in profile.layers[:-1] if layer.name in forbidden)
    coarser = problem.with_profile(replace(profile, no_cut_after=names))
    return replace(coarser, precision=problem.tuning.chain.some_cuts_precision)
