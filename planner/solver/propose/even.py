"""Plans under 1f1b for models with tied weights: the stages with a copy have equally many replicas.

Replicas of a stage update in rounds. Copies on stages of unlike numbers of replicas would be
updated at unlike times, and differ. So the number is fixed, and a search with that number finds the
best plan, for each number in turn.

Every layer counts the tied weights that it uses. What stages hold to add up gradients counts as
buffers: up to `depth` rounds of what they send and receive, because the deeper the pipeline, the
more rounds wait for the sums.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cost.candidate import Candidate
from planner.cost.layer_costs import LayerCosts
from planner.cost.price_with_copies import price_with_copies
from planner.cost.weight_copies import counted_with_copies
from planner.cost.work import IMPOSSIBLE, Integers
from planner.formats.files import replace
from planner.plan.shared_weights import trained_parameters
from planner.solver.evaluate.evaluation import priced
from planner.solver.pool import Batch, Pool
from planner.solver.problem.problem import Limits, Problem
from planner.solver.problem.replica_models import ReplicaModel
from planner.solver.problem.result import CutPath, stages_along
from planner.solver.problem.states import Chain
from planner.solver.propose.regular import counts_to_try
from planner.solver.search.chain.search import ANY_TIME_S, Search


def users_of_tied_weights(costs: LayerCosts) -> list[tuple[int, ...]]:
    """Return the positions of the layers that use each weight with several users, ascending."""
    users: dict[str, list[int]] = {}
    for layer, weights in trained_parameters(costs.profile).items():
        for weight in weights:
            users.setdefault(weight, []).append(costs.position[layer])

    return sorted({tuple(sorted(layers)) for layers in users.values() if len(layers) > 1})


def counted(problem: Problem, depth: int) -> Problem:
    """Return the problem with tied weights counted in every layer that uses them."""
    held: list[tuple[int, int, int]] = []
    for first, *ends in users_of_tied_weights(problem.layer_costs):
        held.append((first, first, 2))  # a copy holds its gradient twice
        held.extend((other, first, 2 * depth + 1) for other in ends)

    profile = counted_with_copies(problem.layer_costs.profile, held)
    assert profile is not None, "the model has tied weights"
    return problem.with_profile(profile)


def propose_even(problem: Problem, pool: Pool) -> Iterator[Batch]:
    """Yield the best plan for each number of replicas of the stages with copies, at some depths."""
    users = sorted(set().union(*users_of_tied_weights(problem.layer_costs)))
    for depth in _depths(problem):
        copies = counted(problem, depth)
        space = Chain(copies.layer_costs)
        limits = replace(copies.limits, deepest=min(depth, copies.limits.deepest))
        for replicas in range(problem.cluster.gpus // 2, 0, -1):
            search = EvenSearch(space, copies.asynchronous(), limits, users, replicas)
            yield from _fitting(problem, copies, search, pool)


def _depths(problem: Problem) -> list[int]:
    """Return the depths at which to look; without a limit of memory, the greatest holds for
    all.
    """
    gpus = problem.cluster.gpus
    if problem.cluster.memory_bytes is None:
        return [gpus]
    return [depth for depth in counts_to_try(gpus, problem.tuning.restricted) if depth > 1]


def _fitting(
    problem: Problem, copies: Problem, search: "EvenSearch", pool: Pool
) -> Iterator[Batch]:
    """Yield the best plans of the search until one fits.

    What a stage holds at its peak is counted for its layers together with their copies, and then
    for its layers and its copies apart, which may be more. A plan that does not fit for that reason
    is sought again with less memory.
    """
    for _ in range(problem.tuning.propose.most_even_tries):
        if problem.clock.passed:
            return

        path = search.best(pool.best_s)
        if path is None:
            return

        stages = stages_along(search.space, path)
        yield [stages]

        memory_bytes = search.limits.memory_bytes
        missing_bytes = uncounted_bytes(problem, copies, stages)
        if memory_bytes is None or missing_bytes <= 0:
            return

        limits = replace(search.limits, memory_bytes=memory_bytes - missing_bytes)
        search = EvenSearch(search.space, search.model, limits, search.users, search.replicas)


def uncounted_bytes(problem: Problem, copies: Problem, stages: Sequence[Candidate]) -> int:
    """Return by how many bytes the search counts too little of the stage that holds most beyond the
    memory.
    """
    cluster = problem.cluster
    unlimited = replace(problem.setting, cluster=replace(cluster, memory_bytes=None))
    price = priced(problem, stages).price
    held = price_with_copies(problem.layer_costs, stages, price, unlimited).gpu_bytes
    known = priced(copies, stages).price.gpu_bytes

    missing_bytes = 0
    for held_bytes, known_bytes in zip(held, known, strict=True):
        if cluster.memory_bytes is not None and held_bytes > cluster.memory_bytes:
            missing_bytes = max(missing_bytes, held_bytes - known_bytes)

    return missing_bytes


class EvenSearch(Search):
    """Finds plans whose stages with any of the `users` have `replicas` replicas each."""

    space: Chain

    def __init__(
        self, space: Chain, model: ReplicaModel, limits: Limits, users: Sequence[int], replicas: int
    ) -> None:
        super().__init__(space, model, limits)
        self.users = users
        self.replicas = replicas
        self._holds = np.array([space.holds(layer) for layer in users])

    def best(self, below_s: float = np.inf, precision: float | None = None) -> CutPath | None:
        """Return the fastest plan up to `precision`, which is by default that of the record.

        More replicas than the fewest may miss a target that fewer met, so seconds are halved on a
        logarithmic scale, down to a time that no plan is below.
        """
        usual = self.limits.tuning.propose.even_precision
        if precision is None:
            precision = usual
        high_s = min(ANY_TIME_S, below_s)
        low_s = float(self._before_s[-1]) / self.gpus
        best: CutPath | None = None
        target_s = high_s

        while high_s - low_s > precision * high_s:
            path = self.within(target_s)
            if path is not None:
                high_s = min(target_s, path.seconds)
                if best is None or path.seconds < best.seconds:
                    best = path
            elif best is None and target_s == high_s:
                return None
            else:
                low_s = target_s

            target_s = float(np.sqrt(max(low_s, high_s * usual) * high_s))

        return best

    def suffixes(
        self, state: int, ends: Integers, target_s: float, after: Integers, room: int
    ) -> tuple[Integers, Integers, NDArray[np.bool_]]:
        """Return what `Search.suffixes` does, with `replicas` for stages that hold a user."""
        _, replicas, recomputes = super().suffixes(state, ends, target_s, after, room)
        holds = (self._holds[:, ends] & ~self._holds[:, state, None]).any(axis=0)
        fixed = np.where(replicas > self.replicas, IMPOSSIBLE, self.replicas)
        replicas = np.where(holds, fixed, replicas)
        gpus = np.where(replicas >= IMPOSSIBLE, IMPOSSIBLE, after + replicas)
        return gpus, replicas, recomputes
