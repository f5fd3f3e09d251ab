"""Search for the best plan by the cost model, under schedules with one stage per worker: the search
that suits both.
"""

from functools import cached_property

import numpy as np

from planner.cost.network.topology import places_matter
from planner.cost.recomputation import exact_everywhere
from planner.formats.files import replace
from planner.solver.clock import OutOfTimeError
from planner.solver.evaluate.evaluation import priced_path
from planner.solver.problem.bounds import relaxed_s
from planner.solver.problem.infeasible import Fits
from planner.solver.problem.problem import Limits, Problem
from planner.solver.problem.result import (
    RESOLUTION,
    BoundedPath,
    BoundedPlans,
    CutPath,
    Evaluation,
)
from planner.solver.problem.states import Chain, CutSpace
from planner.solver.search.chain.search import ANY_TIME_S, Search
from planner.solver.search.chain.synchronous import SynchronousSearch
from planner.solver.search.levels.columns import search_columns
from planner.solver.search.levels.flat import (
    flat_search,
    nearest_path,
    nearest_search,
    precision_of,
)
from planner.solver.search.levels.levels import search_levels
from planner.units import SLACK


class PipelineSearch:
    """The searches for one problem over one space of cuts: by default those along the profile's
    order.
    """

    def __init__(self, problem: Problem, space: CutSpace | None = None) -> None:
        self.problem = problem
        space = space or Chain(problem.layer_costs)
        if problem.rules.max_stages == 1:
            space = space.only(np.array([0, len(space) - 1]))  # without a cut
        self.space = space
        self.interrupted = False  # by the deadline: the last search may have missed faster plans

    def best(self) -> CutPath | None:
        """Return the best path by the cost model; on clusters of several levels, for the nearest
        flat one.

        Raise OutOfTimeError if no path is found in time, or states and GPUs are too many for any
        search.
        """
        problem = self.problem
        if problem.placed:
            path, self.interrupted = nearest_path(problem, self.space)
            return path

        tuning = problem.tuning
        states = len(self.space)
        if problem.cluster.gpus > tuning.chain.many_gpus:
            if problem.schedule.asynchronous:
                if states > tuning.chain.most_states_on_many_gpus:
                    self.interrupted = True
                    search = Search(self.space, problem.asynchronous(), problem.limits)
                    return search.rough() or search.best()
            elif states > tuning.synchronous.most_states:
                raise OutOfTimeError

        return self._best(np.inf, precision_of(problem))

    def faster(self, below_s: float, precision: float = RESOLUTION) -> CutPath | None:
        """Return the best path as `best` does, up to a precision; None where none takes less than
        some seconds.
        """
        try:
            path = self._best(below_s, max(precision, self.problem.precision))
        except OutOfTimeError:
            self.interrupted = True
            return None

        self.interrupted |= self.problem.clock.passed

        # A synchronous search may also find slower ones.
        if path is not None and path.seconds < below_s * (1 - SLACK):
            return path
        return None

    def _best(self, below_s: float, precision: float) -> CutPath | None:
        search = self._search(self.problem.limits)
        path = search.best(below_s, precision)
        self.interrupted = search.interrupted
        return path

    def found(self, path: CutPath) -> BoundedPlans:
        """Return the plans that the search proposes, given its best path: the best on consecutive
        ranks, then those in columns.
        """
        bounded = self.bounded(path)
        assert bounded.path is not None
        best = self.priced(bounded.path)
        columns = self._in_columns(path, best)

        # The bound comes from the search and the seconds from the price, which add the same in
        # another order.
        bound_s = min(bounded.bound_s, columns.bound_s, best.seconds)
        return BoundedPlans((best, *columns.plans), bound_s)

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
        roomy = problem.with_cluster(replace(problem.cluster, memory_bytes=None))
        search = PipelineSearch(roomy, self.space)
        try:
            path = search.best()
        except OutOfTimeError:
            path = None

        if path is None or search.interrupted:
            return self.relaxed_s()
        if problem.placed and problem.precision > 0:
            # searches that need not be precise find no better bound
            return path.seconds * (1 - problem.precision)

        return search.bounded(path).bound_s

    def _in_columns(self, path: CutPath, best: Evaluation) -> BoundedPlans:
        """Find plans in columns on clusters of several levels, and bound them.

        `path` is the best on the nearest flat cluster; `best` is the best on consecutive ranks.
        """
        if not self.problem.placed:
            return BoundedPlans((), np.inf)
        if self.interrupted:
            return BoundedPlans((), self.relaxed_s())
        return search_columns(self.problem, self.space, path, best)

    def leaner(self) -> dict[str, Fits]:
        """Return searches that need less memory, by the arguments that ask for them."""
        problem = self.problem
        rules = self.problem.rules
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
        limits = replace(
            self.problem.limits,
            gpus=gpus,
            memory_bytes=memory_bytes,
            clock=self.problem.budget.clock,
        )

        path = self._search(limits).within(ANY_TIME_S)
        if path is None:
            return None
        return self.priced(path)

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
