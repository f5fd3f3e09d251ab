"""Beyond the profile's order: whether other cuts of a branching model beat the best plan found along the order."""

from __future__ import annotations

from dataclasses import dataclass

from planner.cost import CostModel, RecomputeRule
from planner.pricing import Ledger
from planner.solver.downsets import Downsets, enumerate_downsets
from planner.solver.search import Path, Search
from planner.solver.states import StateSpace

MOST_DOWNSETS = 400_000  # enumerated in some seconds
MOST_STATES = 3_000  # searched in some seconds
NEAR_STATES = 1_500
ROUNDS = 8  # a fixed number rather than a time, so that the same question has the same answer


@dataclass(frozen=True)
class Beyond:
    """What a search over other cuts found.

    Attributes:
        path: a faster plan, or None when none was found.
        space: where the path's states are.
        decided: whether nothing is faster than the path, or than the known plan when there is no path.
    """

    path: Path | None
    space: Downsets | None
    decided: bool


def search_beyond(
    ledger: Ledger,
    model: CostModel,
    gpus: int,
    memory_bytes: int | None,
    space: StateSpace,
    known: Path,
    recompute: RecomputeRule = "auto",
) -> Beyond:
    """Look for a 1f1b plan over all cuts that is faster than the `known` one over `space`.

    Where so few cuts are worth a look that all can be searched, the answer is exact. Else the cuts nearest to those of
    the best plan so far are searched, and again around what that finds, until it finds nothing faster.
    """
    words = enumerate_downsets(ledger, MOST_DOWNSETS)
    if words is None:
        return Beyond(None, None, decided=False)
    everything = Downsets(ledger, words, complete=True)
    best, best_space = known, space
    answer: Downsets | None = None
    decided = False
    for _ in range(ROUNDS):
        states = everything.worth(model, gpus, best.seconds)
        decided = len(states) <= MOST_STATES
        if not decided:
            cuts = [best_space.layers(0, state) for state in best.states[1:-1]]
            states = everything.nearest(states, cuts, NEAR_STATES)
        nearby = everything.only(states, complete=decided)
        better = Search(nearby, model, gpus, memory_bytes, recompute).best(below_s=best.seconds)
        if better is not None:
            best, best_space, answer = better, nearby, nearby
        if decided or better is None:
            break
    return Beyond(None if answer is None else best, answer, decided)
