"""Beyond the profile's order: whether another cut of a branching model beats the best plan found along the order."""

from __future__ import annotations

from dataclasses import dataclass

from planner.cost import CostModel
from planner.pricing import Ledger
from planner.solver.downsets import Downsets, enumerate_downsets
from planner.solver.search import Path, Search

MOST_DOWNSETS = 400_000  # enumerated in some seconds
MOST_STATES = 3_000  # searched in some seconds


@dataclass(frozen=True)
class Beyond:
    """What a search over all cuts found.

    Attributes:
        decided: whether it was possible; if not, nothing is known.
        path: a faster plan and the best there is, or None when there is none.
        space: where the path's states are.
    """

    decided: bool
    path: Path | None = None
    space: Downsets | None = None


def search_beyond(ledger: Ledger, model: CostModel, gpus: int, memory_bytes: int | None, known_s: float) -> Beyond:
    """Look for a 1f1b plan faster than `known_s` over all cuts of the graph."""
    words = enumerate_downsets(ledger, MOST_DOWNSETS)
    if words is None:
        return Beyond(decided=False)
    space = Downsets(ledger, words, complete=True).worth(model, gpus, known_s)
    if len(space) > MOST_STATES:
        return Beyond(decided=False)
    return Beyond(True, Search(space, model, gpus, memory_bytes).best(below_s=known_s), space)
