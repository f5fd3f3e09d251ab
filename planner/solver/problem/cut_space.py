"""Which cuts of a model are searched: all that it has, where these are few, or those in its order.

A graph has few downsets where its branches are short or few. Otherwise the search takes the first
layers in the profile's order up to each place, and `planner.solver.improve.branches` changes what
it finds. An answer says which.
"""

from dataclasses import dataclass

from planner.formats.files import replace
from planner.formats.plan_parts import ALONG_ORDER
from planner.solver.problem.downsets import Downsets
from planner.solver.problem.layer_graph import LayerGraph
from planner.solver.problem.problem import Problem
from planner.solver.problem.states import Chain, CutSpace

IMPROVED = f"{ALONG_ORDER}, improved"


@dataclass(frozen=True)
class SearchedCuts:
    """The cuts of a question that are searched.

    Attributes:
        space: their states.
        complete: whether no plan has a cut elsewhere.
        improved: whether plans with cuts elsewhere are looked for near those that are found.
    """

    space: CutSpace
    complete: bool
    improved: bool = False

    @property
    def branches(self) -> bool:
        """Whether the space has other cuts than those along the order."""
        return not isinstance(self.space, Chain)

    @property
    def words(self) -> str:
        """What an answer says of them; nothing where there are no others than those along the
        order.
        """
        if not self.complete:
            if self.improved:
                return IMPROVED
            return ALONG_ORDER
        if not self.branches:
            return ""
        return f"all {len(self.space)} sets of layers that a cut may leave before it"

    @property
    def bound_of(self) -> str:
        """Of which plans a bound over the space is, where not of all."""
        if self.complete:
            return ""
        return ALONG_ORDER


def searched_cuts(problem: Problem) -> SearchedCuts:
    """Return the cuts that are searched for a question."""
    chain = Chain(problem.layer_costs)
    if problem.rules.max_stages == 1:
        return SearchedCuts(chain, complete=True)  # whose plans have no cut

    graph = LayerGraph(problem.layer_costs)
    branches = takes_branches(problem)
    most = len(chain)
    if branches:
        tuning = problem.tuning.branches
        if chooses_recomputation(problem):
            few = tuning.most_choosing_downsets
        else:
            few = tuning.most_downsets
        most = max(most, few)

    downsets = graph.downsets(most)
    if downsets is None:
        return SearchedCuts(chain, complete=False, improved=branches)
    if len(downsets) == len(chain):
        return SearchedCuts(chain, complete=True)
    return SearchedCuts(Downsets(problem.layer_costs, graph.flags(downsets)), complete=True)


def takes_branches(problem: Problem) -> bool:
    """Return whether plans may have other cuts than those along the order: some searches know no
    others.
    """
    return not (problem.schedule.chunked or problem.cluster.kinds or problem.solver == "ilp")


def chooses_recomputation(problem: Problem) -> bool:
    """Return whether stages may choose what recomputes, so that searches look at many ways to run
    each.
    """
    return problem.cluster.memory_bytes is not None and problem.recompute == "auto"


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
