"""Improve plans of graphs with many downsets: cuts near those of a plan, but not along the
profile's order.

A round looks at two stages and the cut between them as *very large-scale neighbourhood search* does
(Ahuja et al., 2002): it lists some of the downsets near each cut of the best plan so far, and an
exact search over all of them at once finds the best plan. Rounds take turns between two
neighbourhoods:

    moved     one layer moves to the other stage, with all that must go with it
    nearest   any layers move that together take the least time

It ends where neither has a faster plan. On PipeDream's Inception v3 the result is that of a search
over all of its 221,565 downsets, in a hundredth of its states.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice

from planner.cost.candidate import Candidate
from planner.cost.layer_costs import LayerCosts
from planner.solver.problem.cut_space import chooses_recomputation
from planner.solver.problem.downsets import Downsets
from planner.solver.problem.layer_graph import Flags, LayerGraph
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import CutPath
from planner.solver.problem.states import CutSpace
from planner.solver.search.pipeline_search import PipelineSearch
from planner.solver.tuning.searches import BranchesTuning

Neighbourhood = Callable[[int, int], set[int]]  # of a downset: so many downsets near it


def improved_paths(
    search: PipelineSearch, path: CutPath
) -> Iterator[tuple[PipelineSearch, CutPath]]:
    """Yield ever faster paths from the best along the order, each with the search of its space."""
    if len(path.states) == 2:  # no cut that others could lie near
        return

    tuning = search.problem.tuning.branches

    def faster(space: CutSpace, below_s: float) -> CutPath | None:
        if search.problem.clock.passed:
            return None
        return PipelineSearch(search.problem, space).faster(below_s, tuning.min_gain_share)

    graph = LayerGraph(search.problem.layer_costs)
    if chooses_recomputation(search.problem):
        states = tuning.near_choosing_states
    else:
        states = tuning.near_states

    for space, better in improved_cuts(graph, search.space, path, faster, tuning, states=states):
        yield PipelineSearch(search.problem, space), better


def improved_cuts(
    graph: LayerGraph,
    space: CutSpace,
    path: CutPath,
    faster: Callable[[CutSpace, float], CutPath | None],
    tuning: BranchesTuning,
    space_of: Callable[[LayerCosts, Flags], CutSpace] = Downsets,
    states: int | None = None,
) -> Iterator[tuple[CutSpace, CutPath]]:
    """Yield ever faster paths near a path, each with its space.

    Args:
        graph: of the layers.
        space: of the first path.
        path: whose cuts are changed.
        faster: returns the best path over a space that takes less than some seconds, if there is
            any.
        space_of: makes a space of downsets.
        tuning: how many rounds, and what they must gain.
        states: of each round, about; by default those of `tuning`.
    """
    states = states or tuning.near_states
    neighbourhoods = (graph.with_groups_moved, graph.nearest)
    failures = 0

    for neighbourhood in islice(cycle(neighbourhoods), tuning.rounds):
        if failures == len(neighbourhoods) or len(path.states) == 2:
            return

        cuts = [graph.of_layers(space.layers(0, state)) for state in path.states[1:-1]]
        nearby = space_of(graph.layer_costs, _flags(graph, _near(cuts, neighbourhood, states)))
        better = faster(nearby, path.seconds * (1 - tuning.min_gain_share))
        if better is None:
            failures += 1
            continue

        failures = 0
        space = nearby
        path = better
        yield space, path


def space_around(problem: Problem, stages: Sequence[Candidate]) -> Downsets:
    """Return the space of the cuts of some stages, those near them, and those along the profile's
    order.
    """
    graph = LayerGraph(problem.layer_costs)
    cuts = [graph.of_layers(stage.before) for stage in stages[1:]]
    in_order = {(1 << count) - 1 for count in range(len(graph.groups))}
    nearby = _near(cuts, graph.nearest, problem.tuning.branches.near_states)
    return Downsets(problem.layer_costs, _flags(graph, in_order | nearby))


def _near(cuts: Sequence[int], neighbourhood: Neighbourhood, states: int) -> set[int]:
    each = states // max(1, len(cuts))
    return set(cuts).union(*(neighbourhood(cut, each) for cut in cuts))


def _flags(graph: LayerGraph, downsets: set[int]) -> Flags:
    return graph.flags(sorted({0, graph.everything} | downsets))
