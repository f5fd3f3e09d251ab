"""Propose any plan that fits the memory, where time is over and no regular plan fits."""

from collections.abc import Iterator

from planner.formats.files import replace
from planner.solver.evaluate.leaner import Leaner
from planner.solver.pool import Batch
from planner.solver.problem.budget import Budget
from planner.solver.problem.problem import Problem
from planner.solver.problem.states import Chain
from planner.solver.search.pipeline_search import PipelineSearch


def any_plan(problem: Problem) -> Iterator[Batch]:
    """Yield a plan of stages as large as their memory allows: one walk over some of the cuts.

    This is what is left to do when the time is over, so it does not end with it, and takes none for
    choices of what recomputes.
    """
    memory_bytes = problem.cluster.memory_bytes
    if memory_bytes is None or problem.schedule.chunked:
        return
    rules = problem.rules
    if rules.recompute == "auto":
        rules = replace(rules, recompute="blocks")
    tuning = problem.tuning
    unhurried = replace(problem, budget=Budget(tuning=tuning.budget), rules=rules)

    chain = Chain(problem.layer_costs)
    search = PipelineSearch(unhurried, chain.only(chain.spread(tuning.propose.most_any_plan_cuts)))
    plan = search.fits(problem.cluster.gpus, memory_bytes)
    if plan is None:
        return
    lean = Leaner(problem).lean_enough(plan.stages)
    yield [plan.stages if lean is None else lean.stages]
