"""Plans for clusters of several levels: which search for which size, and what its answer is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from planner.cost.link import Link
from planner.cost.models.synchronous import SynchronousModel
from planner.cost.work import Integers
from planner.solver.bounds.registry import bounds_for
from planner.solver.chain.search import RESOLUTION, Path, Search, with_replicas
from planner.solver.chain.states import Coarse, StateSpace
from planner.solver.chain.synchronous import SynchronousSearch
from planner.solver.graph.branches import MOST_DOWNSETS, Beyond, search_beyond
from planner.solver.graph.downsets import Downsets, enumerate_downsets
from planner.solver.levels.best_first import Found, better
from planner.solver.levels.hierarchy import HierarchySearch
from planner.solver.levels.local_search import Descents
from planner.solver.levels.nearest import NearestModel
from planner.solver.levels.relaxed import Seconds
from planner.solver.levels.stage_bounds import Question

MOST_PLACED = 256  # GPUs for which every place is tried
MOST_BOUNDED = 64  # GPUs for which all cuts of a branching model are looked at
MOST_PRICED, DESCENDED = 3_000, 16  # plans to price in local search, for so many GPUs; for more, fewer
MOST_ALIKE = 300  # states, about, over which plans for links that are all alike are sought
PRECISION = 4e-3  # of the bound for clusters of several levels over more than that
ROUNDS = 3

PriceOn = Callable[[StateSpace], Seconds]


def search_levels(question: Question, price: Seconds, nearest: Path, strain: Seconds | None = None) -> Found:
    """The fastest plan by its true price, and what no plan over the space can beat.

    Where the cuts and the places are few, the search over both is exact as far as the work allowed for it goes. With
    more cuts, it is asked about cuts spread over the model and those around the best plan so far; with more GPUs, the
    plans for clusters whose links are all alike are priced. What is not proven then is improved by local search.

    Args:
        question: what is sought.
        price: of a path; infinite when it does not fit the memory.
        nearest: the best path on a flat cluster that is never worse (`nearest_search`), whose time is the bound.
        strain: what local search lowers; the price if None.
    """
    starts = [nearest, *_alike(question)]
    best = None
    for path in starts:
        best = better(best, path, price)
    few = question.gpus <= MOST_PLACED and not question.deadline.passed
    if few and len(question.space) <= HierarchySearch.states_that_fit(question):
        found = HierarchySearch(question).best(price, best)
    else:
        best = _refined(question, price, best) if few else best
        found = Found(best, nearest.seconds if best is None else min(nearest.seconds, best.seconds))
    if few and (found.path is None or found.bound_s < found.path.seconds * (1 - RESOLUTION)):
        found = _descended(question, price, strain or price, found, starts)
    return found


def _descended(question: Question, price: Seconds, strain: Seconds, found: Found, starts: Sequence[Path]) -> Found:
    """What local search makes of the best path, which is not proven to be optimal, and of others."""
    descents = descents_for(question, strain)
    best = found.path
    for start in starts if best is None else [best, *starts]:
        path = descents.from_(start)
        best = best if path is None else better(best, path, price)
    return found if best is None else Found(best, min(found.bound_s, best.seconds))


def descents_for(question: Question, strain: Seconds) -> Descents:
    """Local search for this question; the more GPUs, the longer a price takes, and the fewer plans are priced."""
    most = MOST_PRICED * DESCENDED // max(DESCENDED, question.gpus)
    return Descents(question.space, question.gpus, strain, question.deadline, most)


def search_all_cuts(question: Question, price_on: PriceOn, along: Path, nearest: Path) -> tuple[StateSpace, Found]:
    """`search_levels` beyond the profile's order, for the asynchronous pipeline: the answer, and the space it is over.

    A flat cluster that is never worse bounds what other cuts can give, and tells which of them are worth a look. Where
    those are few, the answer is exact; else those nearest to the cuts of good plans are searched.

    Args:
        question: what is sought, over the cuts along the profile's order.
        price_on: the price of a path over a space.
        along: the best path along the order, with its price.
        nearest: as for `search_levels`.
    """
    space = question.space
    beyond = beyond_the_order(question, nearest)
    sought = question.gpus <= MOST_BOUNDED and not question.deadline.passed
    words = enumerate_downsets(space.layer_costs, MOST_DOWNSETS) if sought else None
    if words is None:
        return space, Found(along, min(beyond.bound_s, along.seconds))
    everything = Downsets(space.layer_costs, words, complete=True)
    seeds: list[tuple[StateSpace, Path]] = [(space, along), (space, nearest)]
    if beyond.path is not None and beyond.space is not None:
        seeds.append((beyond.space, beyond.path))
    best_space, best = space, along
    for _ in range(ROUNDS):
        if question.deadline.passed:
            break
        worth = everything.worth(_nearest_model(question), question.gpus, best.seconds)
        fit = HierarchySearch.states_that_fit(question)
        cuts = sorted({origin.layers(0, state) for origin, path in seeds for state in path.states[1:-1]})
        states = worth if len(worth) <= fit or not cuts else everything.nearest(worth, cuts, fit)
        nearby = everything.only(states, complete=len(worth) <= fit)
        answer = HierarchySearch(replace(question, space=nearby)).best(price_on(nearby), None)
        improved = answer.path is not None and answer.path.seconds < best.seconds * (1 - RESOLUTION)
        if nearby.complete:
            bound_s = min(answer.bound_s, best.seconds)
            return (nearby, answer) if improved else (best_space, Found(best, bound_s))
        if not improved or answer.path is None:
            break
        best_space, best = nearby, answer.path
        seeds = [(nearby, best)]
    return best_space, Found(best, min(beyond.bound_s, best.seconds))


def beyond_the_order(question: Question, nearest: Path) -> Beyond:
    """What other cuts can give on a flat cluster that is never worse."""
    space, model = question.space, _nearest_model(question)
    if question.gpus > MOST_BOUNDED or question.deadline.passed:
        return Beyond(None, None, float(model.least_s(space.work(0, np.array([len(space) - 1])))[0]) / question.gpus)
    gpus, memory_bytes = question.gpus, question.memory_bytes
    recompute, deadline = question.recompute, question.deadline
    return search_beyond(space.layer_costs, model, gpus, memory_bytes, space, nearest, recompute, deadline=deadline)


def nearest_path(question: Question) -> tuple[Path | None, bool]:
    """The best path on a flat cluster that is never worse, its seconds a bound; and whether the deadline cut it short.

    Over many cuts it is found as closely as such a bound needs to be.
    """
    search = nearest_search(question)
    if isinstance(search, SynchronousSearch) or len(question.space) <= 2 * MOST_ALIKE:
        return search.best(), search.interrupted
    path = search.best(precision=PRECISION)
    return path and replace(path, seconds=path.seconds * (1 - PRECISION)), search.interrupted


def nearest_search(question: Question) -> Search | SynchronousSearch:
    """The search for a flat cluster that is never worse."""
    if isinstance(question.objective, SynchronousModel):
        return _flat(question, question.topology.link(0))
    model = _nearest_model(question)
    return Search(question.space, model, question.gpus, question.memory_bytes, question.recompute, question.deadline)


def _nearest_model(question: Question) -> NearestModel:
    assert not isinstance(question.objective, SynchronousModel)
    return NearestModel(question.objective, question.topology)


def _refined(question: Question, price: Seconds, best: Path | None) -> Path | None:
    """The best path over some cuts: some of everywhere, and those near the best path's, until that stays."""
    for _ in range(ROUNDS):
        if question.deadline.passed:
            break
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
    topology, space = question.topology, question.space
    states = np.arange(len(space))
    if len(space) > 2 * MOST_ALIKE:  # these are candidates, so that cuts here and there do
        states = np.unique(np.linspace(0, len(space) - 1, MOST_ALIKE).astype(np.int64))
        question = replace(question, space=Coarse(space, states))
    links = [topology.link(level) for level in range(len(topology))]
    links += [
        replace(topology.link(level), bandwidth_bytes_per_s=bandwidth / size)
        for level, size, bandwidth, _ in topology.shared
    ]
    for link in links:
        if question.deadline.passed:
            return
        if (coarse := _flat(question, link).best()) is not None:
            yield (path := _on(coarse, states))
            for _, size, _, _ in topology.shared:
                yield with_replicas(path, [r // size * size or r for r in path.replicas])


def _flat(question: Question, link: Link) -> Search | SynchronousSearch:
    """The search for a flat cluster of these links."""
    space, objective = question.space, question.objective
    gpus, memory_bytes, recompute = question.gpus, question.memory_bytes, question.recompute
    if isinstance(objective, SynchronousModel):
        model = SynchronousModel(link, objective.schedule, objective.microbatches)
        return SynchronousSearch(space, model, gpus, memory_bytes, recompute, question.deadline)
    return Search(space, bounds_for(objective, link), gpus, memory_bytes, recompute, question.deadline)
