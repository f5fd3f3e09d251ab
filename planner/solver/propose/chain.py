"""Propose the best plan by the cost model, found by exact searches: along the profile's order, then
over all cuts.

Few plans with other cuts than those along the order are faster, and these take most of the time to
find. So the first search is along the order, and the second one looks for plans that are faster
than its best. Where there are too many cuts for that, the best plan is improved by others near its
own.

On clusters of several levels it is the best one that the searches for those find: on consecutive
ranks, and in columns.
"""

from collections.abc import Iterator

from planner.formats.files import replace
from planner.solver.clock import OutOfTimeError
from planner.solver.improve.branches import improved_paths
from planner.solver.pool import Batch, Pool
from planner.solver.problem.cut_space import searched_cuts
from planner.solver.problem.drained import with_single_stages
from planner.solver.problem.infeasible import UnexplainedError, explain
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import BoundedPlans, CutPath, Evaluation
from planner.solver.propose.regular import regular_plans
from planner.solver.propose.waiting import plans_that_wait_less
from planner.solver.search.pipeline_search import PipelineSearch


def propose_chain(problem: Problem, pool: Pool) -> Iterator[Batch]:
    """Yield the best plan by the cost model, then plans that may wait less; raise the pool's bound.

    Raises:
        InfeasibleError: if no plan of this form fits the memory.
        OutOfTimeError: if the deadline passes before any plan is found.
    """
    # 1. Along the profile's order, or over all cuts where no plan along the order fits.
    cuts = searched_cuts(problem)
    search = PipelineSearch(problem)
    path = search.best()
    if path is None and cuts.branches:
        search = PipelineSearch(problem, cuts.space)
        path = search.best()

    if path is None:
        raise UnexplainedError(lambda: explain(problem, _Fits(problem, search), search.leaner()))

    found = search.found(path)

    # 2. Over all cuts.
    bound_s = found.bound_s
    faster: tuple[Evaluation, ...] = ()
    if cuts.branches and search.space is not cuts.space:
        wider = _faster(PipelineSearch(problem, cuts.space), path)
        bound_s = min(bound_s, wider.bound_s)
        faster = wider.plans

    if problem.sharding.gradients:
        bound_s = with_single_stages(problem, bound_s)  # which the search has none of
    pool.raise_bound(bound_s)

    batch = [plan.stages for plan in (*faster, *found.plans)]
    yield batch

    # 3. Cuts near those of the best plan, and plans that wait less.
    if cuts.improved:
        better = [other.priced(faster).stages for other, faster in improved_paths(search, path)]
        yield better[::-1][: problem.tuning.branches.most_proposed]

    yield from plans_that_wait_less(search, pool, batch)


def _faster(search: PipelineSearch, known: CutPath) -> BoundedPlans:
    """Return what a search finds that takes less time than a path that is known, and a bound on all
    of its plans.
    """
    try:
        if search.problem.placed:
            path = search.best()
        else:
            path = search.faster(known.seconds)
    except OutOfTimeError:
        return BoundedPlans((), search.relaxed_s())

    if path is not None:
        return search.found(path)
    return BoundedPlans((), search.bounded(known).bound_s)


class _Fits:
    """Finds any plan that fits so many GPUs of so much memory; None where there is none."""

    def __init__(self, problem: Problem, search: PipelineSearch) -> None:
        self._problem = problem
        self._search = search

    def __call__(self, gpus: int, memory_bytes: int) -> Evaluation | None:
        plan = self._search.fits(gpus, memory_bytes)
        if (
            plan is not None
            or gpus != self._problem.cluster.gpus
            or not self._problem.sharding.gradients
        ):
            return plan

        # The search knows no replicas that divide gradients and weights.
        cluster = self._problem.cluster.with_memory(lambda _: memory_bytes)
        rules = replace(self._problem.rules, max_stages=1)
        return next(regular_plans(replace(self._problem.with_cluster(cluster), rules=rules)), None)
