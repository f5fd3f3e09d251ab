"""Plans for clusters of several levels: which search for which size, and what its answer is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from planner.cost import Integers, Link, SynchronousModel, cost_model
from planner.solver.branches import MOST_DOWNSETS, search_beyond
from planner.solver.downsets import Downsets, enumerate_downsets
from planner.solver.hierarchy import Found, HierarchySearch, Seconds, better
from planner.solver.nearest import NearestModel
from planner.solver.placements import Question
from planner.solver.search import RESOLUTION, Path, Search
from planner.solver.states import Coarse, StateSpace
from planner.solver.synchronous import SynchronousSearch

MOST_PLACED = 256  # GPUs for which every place is tried
MOST_BOUNDED = 64  # GPUs for which all cuts of a branching model are looked at
ROUNDS = 3

PriceOn = Callable[[StateSpace], Seconds]


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
    nearest = _nearest(question).best()
    bound_s = 0.0 if nearest is None else nearest.seconds
    if nearest is not None:
        best = better(best, nearest, price)
    if few:
        best = _refined(question, price, best)
    return Found(best, bound_s if best is None else min(bound_s, best.seconds))


def search_all_cuts(question: Question, price_on: PriceOn, known: Path) -> tuple[StateSpace, Found]:
    """`search_levels` beyond the profile's order, for the asynchronous pipeline: the answer, and the space it is over.

    A flat cluster that is never worse bounds what other cuts can give, and tells which of them are worth a look. Where
    those are few, the answer is exact; else those nearest to the cuts of good plans are searched.

    Args:
        question: what is sought, over the cuts along the profile's order.
        price_on: the price of a path over a space.
        known: a path over the question's space.
    """
    assert not isinstance(question.objective, SynchronousModel)
    space, found = question.space, search_levels(question, price_on(question.space), known)
    assert found.path is not None
    nearest = Search(
        space,
        NearestModel(question.objective, question.topology),
        question.gpus,
        question.memory_bytes,
        question.recompute,
    )
    alone = nearest.best()
    few = question.gpus <= MOST_BOUNDED
    words = enumerate_downsets(space.ledger, MOST_DOWNSETS) if few else None
    if alone is None or words is None:
        least_s = float(nearest.model.least_s(space.work(0, np.array([len(space) - 1])))[0]) / question.gpus
        return space, replace(found, bound_s=min(found.bound_s, least_s))
    gpus, memory_bytes = question.gpus, question.memory_bytes
    beyond = search_beyond(space.ledger, nearest.model, gpus, memory_bytes, space, alone, question.recompute)
    everything = Downsets(space.ledger, words, complete=True)
    seeds: list[tuple[StateSpace, Path]] = [(space, found.path), (space, alone)]
    if beyond.path is not None and beyond.space is not None:
        seeds.append((beyond.space, beyond.path))
    best_space, best = space, found.path
    for _ in range(ROUNDS):
        worth = everything.worth(nearest.model, gpus, best.seconds)
        fit = HierarchySearch.states_that_fit(question)
        cuts = sorted({origin.layers(0, state) for origin, path in seeds for state in path.states[1:-1]})
        states = worth if len(worth) <= fit or not cuts else everything.nearest(worth, cuts, fit)
        nearby = everything.only(states, complete=len(worth) <= fit)
        wider = replace(question, space=nearby)
        answer = HierarchySearch(wider).best(price_on(nearby), None)
        improved = answer.path is not None and answer.path.seconds < best.seconds * (1 - RESOLUTION)
        if nearby.complete:
            bound_s = min(answer.bound_s, best.seconds)
            return (nearby, answer) if improved else (best_space, Found(best, bound_s))
        if not improved or answer.path is None:
            break
        best_space, best = nearby, answer.path
        seeds = [(nearby, best)]
    return best_space, Found(best, min(beyond.bound_s, best.seconds))


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


def _nearest(question: Question) -> Search | SynchronousSearch:
    """The search for a flat cluster that is never worse."""
    topology, objective = question.topology, question.objective
    if isinstance(objective, SynchronousModel):
        return _flat(question, topology.link(0))
    model = NearestModel(objective, topology)
    return Search(question.space, model, question.gpus, question.memory_bytes, question.recompute)


def _flat(question: Question, link: Link) -> Search | SynchronousSearch:
    """The search for a flat cluster of these links."""
    space, objective = question.space, question.objective
    gpus, memory_bytes, recompute = question.gpus, question.memory_bytes, question.recompute
    if isinstance(objective, SynchronousModel):
        model = SynchronousModel(link, objective.schedule, objective.microbatches)
        return SynchronousSearch(space, model, gpus, memory_bytes, recompute)
    return Search(space, cost_model(objective, link), gpus, memory_bytes, recompute)
