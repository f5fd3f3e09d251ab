"""Propose plans that may wait less than the best one by the cost model, which knows no waiting.

Under asynchronous schedules these are simpler plans (`planner.solver.propose.simpler`). Under
synchronous schedules they are the plans that the search meets on its way to the best, for the links
as they are and for slower ones: then messages weigh more, and it meets plans with fewer of them.
"""

from collections.abc import Iterator

from planner.solver.clock import OutOfTimeError
from planner.solver.pool import Batch, Pool
from planner.solver.problem.result import RESOLUTION
from planner.solver.propose.simpler import propose_simpler, propose_straight
from planner.solver.search.chain.synchronous import SynchronousSearch
from planner.solver.search.pipeline_search import PipelineSearch


def plans_that_wait_less(search: PipelineSearch, pool: Pool, known: Batch) -> Iterator[Batch]:
    """Yield alternatives to the best plan, as long as the pool has a simulated plan that is not
    proven to be best.
    """
    if pool.best is None or not pool.best.simulated:
        return
    if search.problem.schedule.asynchronous:
        yield from propose_straight(search, pool)
        yield from propose_simpler(search, pool)
    elif len(search.space) <= search.problem.tuning.synchronous.most_states:
        yield from _for_slower_links(search, pool, known)


def _for_slower_links(search: PipelineSearch, pool: Pool, known: Batch) -> Iterator[Batch]:
    """Yield what searches for a synchronous schedule meet."""
    problem = search.problem
    least_s = min(pool.priced(stages).seconds for stages in known)
    settled_s = least_s * (1 + problem.tuning.evaluate.settled_share)

    for factor in problem.tuning.waiting.synchronous_link_ratios:
        settled = pool.best is not None and pool.best.seconds <= settled_s
        if settled or pool.spent:
            return
        model = problem.synchronous(problem.link.slowed(factor))
        other = SynchronousSearch(search.space, model, problem.limits)
        try:
            other.best(precision=max(problem.precision, RESOLUTION))
        except OutOfTimeError:
            return
        met = [search.priced(path).stages for path in other.found]
        yield [*known, *met]
