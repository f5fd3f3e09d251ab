"""Choose the plan whose gradients are least late among those that are nearly as fast as the
best.
"""

from planner.solver.pool import Pool
from planner.solver.problem.result import Evaluation


def least_late(pool: Pool) -> None:
    """Let the pool's best plan be the least late one of those that were simulated, and are nearly
    as fast.
    """
    best = pool.best
    if best is None or not best.simulated or not pool.problem.schedule.stashes:
        return
    seen = pool.problem.budget.seen.values()
    nearly_s = best.seconds * pool.problem.tuning.evaluate.min_speedup_per_stale_update
    near = [plan for plan in seen if plan.seconds < nearly_s]
    allowed = [plan for plan in near if pool.problem.allows(plan) and pool.trains(plan)]
    pool.best = min([best, *allowed], key=_lateness)


def _lateness(plan: Evaluation) -> tuple[int, float]:
    return max(plan.price.in_flight), plan.seconds
