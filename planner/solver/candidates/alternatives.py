"""Which plans are simulated beside the one that the search finds, for it may wait more than another.

For the asynchronous pipeline those of `questions`; on clusters of several levels each is made for links that are all
alike, and local search fits it to those there are. For schedules that drain, those met on the way to the best one.
"""

from __future__ import annotations

import numpy as np

from planner.cost.layer_costs import LayerCosts
from planner.cost.link import Link
from planner.cost.models.synchronous import SynchronousModel
from planner.cost.weight_copies import counted_with_copies
from planner.solver.bounds.registry import bounds_for
from planner.solver.candidates.pipelines import MOST_WORKERS
from planner.solver.candidates.trials import SETTLED, Priced, Trials
from planner.solver.candidates.waits import PROPOSED, SLOWED, BestOn, DataParallelSearch, fastest, questions, slowed
from planner.solver.chain.search import Search
from planner.solver.chain.states import Chain, StateSpace
from planner.solver.chain.synchronous import SynchronousSearch
from planner.solver.levels.levels import MOST_PLACED, descents_for, search_levels
from planner.solver.levels.local_search import Descents
from planner.solver.task import MOST_DRAINED_STATES, Task

SLOWER_DRAINED = (1.0, 2.0)  # links for which rivals of schedules that drain are made
FASTER = (2.0, 4.0)  # links for which plans for clusters of several levels are proposed, too


def fastest_simulated(task: Task, first: Priced, trials: Trials) -> Priced:
    """The fastest plan of a task when it is simulated: `first`, or another that its waits let pass."""
    layer_costs = task.space.layer_costs
    if task.schedule.asynchronous:
        rivals = Rivals(task)
        return fastest(layer_costs, first, rivals.alone(), rivals.kinds(), trials)
    best = trials.fastest(layer_costs, [first])
    if best[1].cost_model_s is None or len(task.space) > MOST_DRAINED_STATES:
        return best
    for slower in SLOWER_DRAINED:
        if best[1].seconds_per_minibatch <= first[1].seconds_per_minibatch * (1 + SETTLED):
            break
        if trials.tally.over:
            trials.tally.exhausted = False
            break
        best = trials.fastest(layer_costs, [first, *_drained(task, slower)], best)
    return best


class Rivals:
    """Plans of an asynchronous pipeline that may win when they are simulated."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._most = min(task.cluster.gpus, MOST_WORKERS)
        self._counting = _counting_copies(task)
        self._near: Descents | None = None
        if task.placed and task.cluster.gpus <= MOST_PLACED:
            self._near = descents_for(task.question(), (self._counting or task).strain)

    def alone(self) -> Priced | None:
        """The best of a single stage."""
        task = self._task
        return self._best_of(task.space, DataParallelSearch, task.link, task.cluster.memory_bytes)(self._most, np.inf)

    def kinds(self) -> list[tuple[BestOn, int]]:
        """How to find the best plan of each kind, and for how many GPUs at most."""
        task, cluster = self._task, self._task.cluster
        memory_unit = (
            sum(layer.weight_bytes + layer.saved_bytes for layer in task.space.layer_costs.profile.layers) or 1
        )
        link_unit = memory_unit / float(task.space.compute_s[-1])
        asked = [*questions(cluster.gpus, task.link, cluster.memory_bytes, link_unit, memory_unit)]
        if task.placed:  # where some transfers cross faster links than the slowest
            asked += [(Search, self._most, slowed(task.link, 1 / faster), cluster.memory_bytes) for faster in FASTER]
        proposed = [(task.space, *question) for question in asked]
        if self._counting is not None:
            proposed = [(self._counting.space, *question) for question in asked[: len(PROPOSED)]] + proposed
        kinds = [(self._best_of(space, kind, link, memory), most) for space, kind, most, link, memory in proposed]
        if self._counting is not None and task.placed and cluster.gpus <= MOST_WORKERS:
            kinds = [(self._on_levels(self._counting), cluster.gpus), *kinds]
        return kinds

    def _best_of(self, space: StateSpace, kind: type[Search], link: Link, memory: int | None) -> BestOn:
        task = self._task
        model = bounds_for(task.model, link, task.schedule, task.microbatches)
        slower = link.bandwidth_bytes_per_s < task.link.bandwidth_bytes_per_s

        def best_on(gpus: int, below_s: float) -> Priced | None:
            if task.deadline.passed:
                return None
            limit_s = below_s * (SLOWED if slower else 1)
            path = kind(space, model, gpus, memory, task.recompute, task.deadline).best(limit_s)
            if path is None:
                return None
            proposal = task.priced(path)
            if self._near is None or proposal[1].seconds_per_minibatch < below_s:
                return proposal
            # It was found for links that are all alike, and these are not.
            path = self._near.from_(path)
            return proposal if path is None else task.priced(path)

        return best_on

    def _on_levels(self, counting: Task) -> BestOn:
        """The best plan for all GPUs of a cluster of several levels where copies of weights count."""

        def best_on(gpus: int, below_s: float) -> Priced | None:
            path = None if gpus < counting.cluster.gpus else counting.best()
            if path is None or counting.interrupted:
                return None
            found = search_levels(counting.question(), counting.seconds, path, counting.strain).path
            return None if found is None else self._task.priced(found)

        return best_on


def _counting_copies(task: Task) -> Task | None:
    """The same task where copies of weights that stages share always cost what they do; None without such weights.

    The searches over the profile itself do not know what copies cost a stage. The simulation does.
    """
    counted = counted_with_copies(task.space.layer_costs.profile) if isinstance(task.space, Chain) else None
    return None if counted is None else task.over(Chain(LayerCosts(counted)))


def _drained(task: Task, slower: float) -> list[Priced]:
    """Plans for a schedule that drains, found on the way to the best one for links that many times slower."""
    if slower == 1 and task.met:
        return [task.priced(path) for path in task.met]
    model = SynchronousModel(slowed(task.link, slower), task.schedule, task.microbatches)
    gpus, memory_bytes = task.cluster.gpus, task.cluster.memory_bytes
    search = SynchronousSearch(task.space, model, gpus, memory_bytes, task.recompute, task.deadline)
    search.best()
    return [task.priced(path) for path in search.found]
