"""Search for the best plan by the cost model, under schedules with one stage per worker: the search
that suits both.
"""

from dataclasses import replace
from functools import cached_property

import numpy as np

from planner.cost.network.topology import places_matter
from planner.cost.recomputation import exact_everywhere
from planner.solver.clock import OutOfTimeError
from planner.solver.evaluate.evaluation import priced_path
from planner.solver.problem.infeasible import Fits
from planner.solver.problem.problem import Limits, Problem
from planner.solver.problem.result import RESOLUTION, BoundedPath, CutPath, Evaluation
from planner.solver.problem.states import Chain, CutSpace
from planner.solver.search.chain.search import ANY_TIME_S, Search
from planner.solver.search.chain.synchronous import SynchronousSearch
from planner.solver.search.chain.ways import relaxed_s
from planner.solver.search.levels.columns import Columned, search_columns
from planner.solver.search.levels.flat import best_of, flat_search, nearest_path, nearest_search
from planner.solver.search.levels.levels import search_levels
from planner.units import SLACK


class PipelineSearch:
    """The searches for one problem over one space of cuts: by default those along the profile's
    order.
    """

    def __init__(self, problem: Problem, space: CutSpace | None = None) -> None:
        self.problem = problem
        self.space = space or Chain(problem.layer_costs)
        self.interrupted = False  # by the deadline: the last search may have missed faster plans

    def best(self) -> CutPath | None:
        """Return the best path by the cost model; on clusters of several levels, for the nearest
        flat one.

        Raise OutOfTimeError if no path is found in time, or states and GPUs are too many for any
        search.
        """
        if self.problem.placed:
            path, self.interrupted = nearest_path(self.problem, self.space)
            return path
        tuning = self.problem.tuning
        states = len(self.space)
        many = self.problem.cluster.gpus > tuning.chain.many_gpus
        slow = not self.problem.schedule.asynchronous
        if many and slow and states > tuning.synchronous.most_states:
            raise OutOfTimeError
        search = self._search(self.problem.limits)
        too_many = many and states > tuning.chain.most_states_on_many_gpus
        if isinstance(search, Search) and too_many:
            path, search.interrupted = search.rough() or search.best(), True
        else:
            path = best_of(self.problem, search)
        self.interrupted = search.interrupted
        return path

    def faster(self, below_s: float, precision: float = RESOLUTION) -> CutPath | None:
        """Return the best path as `best` does, up to a precision; None where none takes less than
        some seconds.
        """
        precision = max(precision, self.problem.precision)
        self.interrupted = True
        try:
            search = self._search(self.problem.limits)
            path = (
                search.best(below_s, precision)
                if isinstance(search, Search)
                else search.best(precision, below_s)  # or a slower one
            )
        except OutOfTimeError:
            return None
        self.interrupted = search.interrupted or self.problem.clock.passed
        if path is None or path.seconds >= below_s * (1 - SLACK):
            return None
        return path

    def bounded(self, path: CutPath) -> BoundedPath:
        """Return the best path over the cluster's levels, given the best for the nearest flat one;
        bound every plan.
        """
        # A search that knows no places takes all links for the slowest: plans within servers may be
        # faster.
        misses_places = places_matter(self.problem.cluster) and not self.problem.placed
        if self.interrupted or misses_places:
            return BoundedPath(path, self.relaxed_s())
        found = BoundedPath(path, path.seconds)
        if self.problem.placed:
            found = search_levels(self.problem, self.space, path)
        bound_s = found.bound_s * (1 - self.problem.precision)
        if self._misses_choices:
            bound_s = min(bound_s, self._whatever_recomputes_s())
        return replace(found, bound_s=bound_s)

    @cached_property
    def _misses_choices(self) -> bool:
        limited = self.problem.cluster.memory_bytes is not None and self.problem.recompute == "auto"
        if not limited:
            return False
        if len(self.space) > self.problem.tuning.chain.most_choosing_states:
            return True
        in_order = isinstance(self.space, Chain)
        return not exact_everywhere(self.problem.layer_costs, in_order=in_order)

    def _whatever_recomputes_s(self) -> float:
        """Return seconds that no plan is below even if it had a better choice of what recomputes
        than is known.
        """
        problem = self.problem
        roomy = problem.with_cluster(problem.cluster.model_copy(update={"memory_bytes": None}))
        search = PipelineSearch(roomy, self.space)
        path = None if problem.clock.passed else search.best()
        if path is None or search.interrupted:
            return self.relaxed_s()
        if problem.placed and problem.precision > 0:
            # searches that need not be precise find no better bound
            return path.seconds * (1 - problem.precision)
        return search.bounded(path).bound_s

    def columned(self, path: CutPath, best: Evaluation) -> Columned:
        """Find plans in columns on clusters of several levels, and bound them.

        `path` is the best on the nearest flat cluster; `best` is the best on consecutive ranks.
        """
        if not self.problem.placed:
            return Columned((), np.inf)
        if self.interrupted:
            return Columned((), self.relaxed_s())
        return search_columns(self.problem, self.space, path, best)

    def leaner(self) -> dict[str, Fits]:
        """Return searches that need less memory, by the arguments that ask for them."""
        problem, rules = self.problem, self.problem.rules
        may_shard = (
            rules.shard_optimizer == "never" and problem.layer_costs.profile.may_shard_optimizer
        )
        others = {
            "`recompute=auto`": replace(rules, recompute="auto"),
            "`shard_optimizer=auto`": replace(rules, shard_optimizer="auto")
            if may_shard
            else rules,
            "a larger `max_stages`": replace(rules, max_stages=None),
            "a larger `max_staleness`": replace(rules, max_staleness=None),
        }
        return {
            argument: PipelineSearch(replace(problem, rules=changed), self.space).fits
            for argument, changed in others.items()
            if changed != rules
        }

    def fits(self, gpus: int, memory_bytes: int) -> Evaluation | None:
        """Return any plan that fits other GPUs of this kind."""
        search = self._search(replace(self.problem.limits, gpus=gpus, memory_bytes=memory_bytes))
        if isinstance(search, Search):
            path = search.within(ANY_TIME_S)
        else:
            answer = search.within(np.inf)
            path = None if answer is None else answer.path
        return None if path is None else self.priced(path)

    def priced(self, path: CutPath) -> Evaluation:
        """Price a path's stages by the cost model."""
        return priced_path(self.problem, self.space, path)

    def relaxed_s(self) -> float:
        """Return a time that no plan is below, whatever its cuts: perfect balance and no
        communication.
        """
        return relaxed_s(self.problem, self.space)

    def _search(self, limits: Limits) -> Search | SynchronousSearch:
        return (nearest_search if self.problem.placed else flat_search)(
            self.problem, self.space, limits
        )
