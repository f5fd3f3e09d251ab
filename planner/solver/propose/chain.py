"""Propose the best plan by the cost model, found by the exact search over all cuts, or those along the profile's order.

Where there are too many cuts for all, it is improved by others near its own.

On clusters of several levels it is the best one that the searches for those find: on consecutive ranks, and in columns.
"""

from collections.abc import Iterator
from dataclasses import replace

from planner.solver.improve.branches import improved_paths
from planner.solver.pool import Batch, Pool
from planner.solver.problem.cut_space import searched_cuts
from planner.solver.problem.drained import with_single_stages
from planner.solver.problem.infeasible import UnexplainedError, explain
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation
from planner.solver.propose.regular import regular_plans
from planner.solver.propose.waiting import plans_that_wait_less
from planner.solver.search.pipeline_search import PipelineSearch

MOST_IMPROVED = 3  # plans off the profile's order that are proposed, the fastest first


def propose_chain(question: Problem, pool: Pool) -> Iterator[Batch]:
    """Yield the best plan by the cost model, then plans that may wait less; raise the pool's bound.

    Raises:
        InfeasibleError: if no plan of this form fits the memory.
        OutOfTimeError: if the deadline passes before any plan is found.
    """
    cuts = searched_cuts(question)
    search = PipelineSearch(question, cuts.space)
    path = search.best()
    if path is None:
        raise UnexplainedError(lambda: explain(question, _Fits(question, search), search.leaner()))

    bounded = search.bounded(path)
    assert bounded.path is not None
    best = search.priced(bounded.path)
    columned = search.columned(path, best)

    # The bound comes from the search and the seconds from the price, which add the same numbers in another order.
    bound_s = min(bounded.bound_s, columned.bound_s, best.seconds)
    if max(question.levels) > 1:
        bound_s = with_single_stages(question, bound_s)  # which the search has none of
    pool.raise_bound(bound_s)

    batch = [plan.stages for plan in (best, *columned.plans)]
    yield batch
    if cuts.improved:
        better = [other.priced(faster).stages for other, faster in improved_paths(search, path)]
        yield better[: -1 - MOST_IMPROVED : -1]
    yield from plans_that_wait_less(search, pool, batch)


class _Fits:
    """Finds any plan that fits so many GPUs of so much memory; None where there is none."""

    def __init__(self, question: Problem, search: PipelineSearch) -> None:
        self._question = question
        self._search = search

    def __call__(self, gpus: int, memory_bytes: int) -> Evaluation | None:
        plan = self._search.fits(gpus, memory_bytes)
        if plan is not None or gpus != self._question.cluster.gpus or max(self._question.levels) < 2:
            return plan
        # The search knows no replicas that divide gradients and weights.
        cluster = self._question.cluster.with_memory(lambda _: memory_bytes)
        rules = replace(self._question.rules, max_stages=1)
        return next(regular_plans(replace(self._question.with_cluster(cluster), rules=rules)), None)
