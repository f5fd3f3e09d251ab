"""Plans for clusters of several levels: which search for which size, and what its answer is worth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from planner.cost import Integers, Link, SynchronousModel, cost_model
from planner.solver.hierarchy import Found, HierarchySearch, Seconds, better
from planner.solver.placements import Question
from planner.solver.search import Path, Search
from planner.solver.states import Coarse, StateSpace
from planner.solver.synchronous import SynchronousSearch

MOST_PLACED = 256  # GPUs for which every place is tried
ROUNDS = 3


def search_levels(question: Question, price: Seconds, known: Path) -> Found:
    """The fastest plan by its true price, and what no plan over the space can beat.

    Where the cuts and the places are few, the search over both is exact. With more cuts, it is asked about cuts spread
    over the model and those around the best plan so far; with more GPUs, the plans for clusters whose links are all
    alike are priced. The bound is then that of a flat cluster with the innermost links.

    Args:
        question: what is sought.
        price: of a path; infinite when it does not fit the memory.
        known: a path that fits.
    """
    best = better(None, known, price)
    for path in _alike(question):
        best = better(best, path, price)
    few = question.gpus <= MOST_PLACED
    if few and len(question.space) <= HierarchySearch.states_that_fit(question):
        return HierarchySearch(question).best(price, best)
    nearest = _flat(question, question.topology.link(0)).best()
    bound_s = 0.0 if nearest is None else nearest.seconds
    if few:
        best = _refined(question, price, best)
    return Found(best, bound_s if best is None else min(bound_s, best.seconds))


def _refined(question: Question, price: Seconds, best: Path | None) -> Path | None:
    """The best path over some cuts: some of everywhere, and those near the best path's, until that stays."""
    for _ in range(ROUNDS):
        states = _sample(question.space, HierarchySearch.states_that_fit(question), best)
        coarse = replace(question, space=Coarse(question.space, states))
        found = HierarchySearch(coarse).best(_priced_on(states, price), None).path
        if found is None:
            return best
        improved = better(best, _on(found, states), price)
        if improved == best:
            break
        best = improved
    return best


def _sample(space: StateSpace, most: int, best: Path | None) -> Integers:
    """Both ends, cuts at equal distances in compute time, and as many near the cuts of the best path."""
    last = len(space) - 1
    spread = most if best is None or len(best.states) <= 2 else most // 2
    targets_s = np.linspace(0, float(space.compute_s[-1]), spread)
    chosen = set(np.minimum(np.searchsorted(space.compute_s, targets_s), last).tolist()) | {0, last}
    if best is not None and len(best.states) > 2:
        distance = 0
        while len(chosen) < min(most, last + 1):
            for cut in best.states[1:-1]:
                chosen.update({max(cut - distance, 0), min(cut + distance, last)})
            distance += 1
    return np.array(sorted(chosen))


def _priced_on(states: Integers, price: Seconds) -> Seconds:
    return lambda path: price(_on(path, states))


def _on(path: Path, states: Integers) -> Path:
    """The path over the space of which the states are a part."""
    return replace(path, states=tuple(int(states[state]) for state in path.states))


def _alike(question: Question) -> Iterator[Path]:
    """Paths that are best when all links are alike: each kind there is, and a share of each that is shared.

    Each also with stages that take whole servers where they take more than one.
    """
    topology = question.topology
    links = [topology.link(level) for level in range(len(topology))]
    links += [
        replace(topology.link(level), bandwidth_bytes_per_s=bandwidth / size)
        for level, size, bandwidth, _ in topology.shared
    ]
    for link in links:
        if (path := _flat(question, link).best()) is not None:
            yield path
            for _, size, _, _ in topology.shared:
                yield replace(path, replicas=tuple(r // size * size or r for r in path.replicas))


def _flat(question: Question, link: Link) -> Search | SynchronousSearch:
    """The search for a flat cluster of these links."""
    space, objective = question.space, question.objective
    gpus, memory_bytes, recompute = question.gpus, question.memory_bytes, question.recompute
    if isinstance(objective, SynchronousModel):
        model = SynchronousModel(link, objective.schedule, objective.microbatches)
        return SynchronousSearch(space, model, gpus, memory_bytes, recompute)
    return Search(space, cost_model(objective, link), gpus, memory_bytes, recompute)
