"""Propose interleaved plans, several chunks of the model per worker, along the profile's order."""

from collections.abc import Iterator

from planner.cost.network.topology import places_matter
from planner.errors import InfeasibleError, InputError
from planner.formats.files import replace
from planner.options.solving import RecomputeRule
from planner.solver.evaluate.evaluation import priced
from planner.solver.pool import Batch, Pool
from planner.solver.problem.infeasible import UnexplainedError, explain
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import CutPath, Evaluation, stages_along
from planner.solver.problem.states import Chain
from planner.solver.search.chain.interleaved import InterleavedSearch
from planner.units import counted


def propose_interleaved(problem: Problem, pool: Pool) -> Iterator[Batch]:
    """Yield the best plan of each number of workers and copies, as one batch; raise the pool's
    bound.

    Raises:
        InputError: if nothing can be interleaved with so few devices, cuts or microbatches.
        InfeasibleError: if no plan fits the memory.
    """
    space = Chain(problem.layer_costs)
    search = InterleavedSearch(space, problem.setting, problem.limits)
    _check_shapes(problem, space, search)

    paths, bound_s = search.best()
    if not paths:
        raise UnexplainedError(lambda: _explanation(problem, space))

    if places_matter(problem.cluster):
        # With all links as near as the nearest no plan takes longer, so its bound holds, and the
        # cuts suit plans whose pipelines stay within servers.
        near = InterleavedSearch(space, problem.setting, problem.limits, problem.topology.link(0))
        near_paths, bound_s = near.best()
        paths = _distinct([*paths, *near_paths])

    pool.raise_bound(bound_s)
    yield [stages_along(space, path) for path in paths]


def _distinct(paths: list[CutPath]) -> list[CutPath]:
    by_stages = {(path.states, path.options): path for path in paths}
    return list(by_stages.values())


def _check_shapes(problem: Problem, space: Chain, search: InterleavedSearch) -> None:
    if search.shapes():
        return
    chunks = problem.setting.chunks
    raise InputError(
        f"nothing can be interleaved with {counted(problem.limits.gpus, 'GPU')}, "
        f"{len(space) - 1} places to end a stage and {problem.microbatches} microbatches",
        hint=f"it takes 2 GPUs, {2 * chunks} such places for {chunks} chunks each, and 2 "
        f"microbatches",
    )


def _explanation(problem: Problem, space: Chain) -> InfeasibleError:
    """Return the error that says which memory would do."""
    rule = problem.rules.recompute
    others = {}
    if rule == "never":
        others["`recompute=auto`"] = _Fits(problem, space, "auto")
    return explain(problem, _Fits(problem, space, rule), others)


class _Fits:
    """Finds any plan that fits so many GPUs of so much memory under a rule; None where there is
    none.
    """

    def __init__(self, problem: Problem, space: Chain, recompute: RecomputeRule) -> None:
        self._problem = problem
        self._space = space
        self._rules = replace(problem.rules, recompute=recompute)

    def __call__(self, gpus: int, memory_bytes: int) -> Evaluation | None:
        problem = self._problem
        limits = replace(problem.limits, gpus=gpus, memory_bytes=memory_bytes, rules=self._rules)
        paths, _ = InterleavedSearch(self._space, problem.setting, limits).best()
        if not paths:
            return None
        return priced(problem, stages_along(self._space, paths[0]))
