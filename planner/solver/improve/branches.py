"""Improve plans of graphs with many downsets: cuts near those of a plan, but not along the profile's order.

A round looks at two stages and the cut between them as *very large-scale neighbourhood search* does (Ahuja et al.,
2002): it lists some of the downsets near each cut of the best plan so far, and an exact search over all of them at once
finds the best plan. Rounds take turns between two neighbourhoods:

    moved     one layer moves to the other stage, with all that must go with it
    nearest   any layers move that together take the least time

It ends where neither has a faster plan. On PipeDream's Inception v3 the result is that of a search over all of its
221,565 downsets, in a hundredth of its states.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice

from planner.cost.candidate import Candidate
from planner.solver.problem.downsets import Downsets
from planner.solver.problem.layer_graph import LayerGraph
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import CutPath
from planner.solver.search.pipeline_search import PipelineSearch

NEAR_STATES = 300  # of each round: a search over so many knows all choices of what recomputes
ROUNDS = 12  # rounds end before, almost always: a plan that they improve is improved two or three times
GAIN = 3e-4  # share of the time that a round must gain to be worth another one

Neighbourhood = Callable[[int, int], set[int]]  # of a downset: so many downsets near it


def improved_paths(search: PipelineSearch, path: CutPath) -> Iterator[tuple[PipelineSearch, CutPath]]:
    """Yield ever faster paths from the best along the order, each with the search of its space."""
    graph = LayerGraph(search.problem.layer_costs)
    neighbourhoods = (graph.with_groups_moved, graph.nearest)
    failures = 0

    for neighbourhood in islice(cycle(neighbourhoods), ROUNDS):
        if failures == len(neighbourhoods) or len(path.states) == 2 or search.problem.clock.passed:
            return
        nearby = PipelineSearch(search.problem, _space_near(search, path, graph, neighbourhood))
        better = nearby.faster(path.seconds * (1 - GAIN), GAIN)
        if better is None:
            failures += 1
            continue
        failures = 0
        search = nearby
        path = better
        yield search, path


def space_around(question: Problem, stages: Sequence[Candidate]) -> Downsets:
    """Return the space of the cuts of some stages, those near them, and those along the profile's order."""
    graph = LayerGraph(question.layer_costs)
    cuts = [graph.of_layers(stage.before) for stage in stages[1:]]
    in_order = {(1 << count) - 1 for count in range(len(graph.groups))}
    return _space(graph, in_order | _near(cuts, graph.nearest))


def _space_near(search: PipelineSearch, path: CutPath, graph: LayerGraph, neighbourhood: Neighbourhood) -> Downsets:
    """Return the space of about `NEAR_STATES` downsets near the cuts of a path."""
    cuts = [graph.of_layers(search.space.layers(0, state)) for state in path.states[1:-1]]
    return _space(graph, _near(cuts, neighbourhood))


def _near(cuts: Sequence[int], neighbourhood: Neighbourhood) -> set[int]:
    each = NEAR_STATES // max(1, len(cuts))
    return set(cuts).union(*(neighbourhood(cut, each) for cut in cuts))


def _space(graph: LayerGraph, downsets: set[int]) -> Downsets:
    every = sorted({0, graph.everything} | downsets)
    return Downsets(graph.layer_costs, graph.flags(every))
