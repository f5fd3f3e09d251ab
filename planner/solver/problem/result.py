"""What searches return: paths through the cuts, evaluated candidates, and the best of them with a
bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.cost.candidate import Candidate, StageOptions
from planner.cost.network.topology import ranks_of
from planner.cost.overheads import Price
from planner.cost.work import Integers
from planner.formats.cluster import Cluster
from planner.formats.files import replace
from planner.formats.plan_parts import config_of
from planner.solver.problem.states import CutSpace
from planner.stages.tensor import degrees_of

# An answer is proven optimal up to this relative difference in time: rounding, not search.
RESOLUTION = 1e-12


@dataclass(frozen=True)
class CutPath:
    """A plan as a path through the cuts: stage s runs the layers from `states[s]` to `states[s +
    1]`.

    It takes the sum of one part of its stages' seconds plus the maximum of another, per minibatch.
    """

    states: tuple[int, ...]
    options: tuple[StageOptions, ...]
    max_s: float
    sum_s: float = 0.0
    ranks: tuple[tuple[int, ...], ...] = ()  # of each stage, where GPUs are of several kinds

    def __len__(self) -> int:
        """The number of stages."""
        return len(self.options)

    @property
    def seconds(self) -> float:
        return self.sum_s + self.max_s

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(each.replicas for each in self.options)

    @property
    def gpus(self) -> int:
        """Ranks of all stages."""
        return sum(each.gpus for each in self.options)

    def that_takes(self, seconds: float) -> CutPath:
        """Return the path with another price."""
        return CutPath(self.states, self.options, seconds, ranks=self.ranks)

    def over(self, states: Integers) -> CutPath:
        """Return a path over some states of a space as a path over the space."""
        return replace(self, states=tuple(states[list(self.states)].tolist()))


@dataclass(frozen=True)
class BoundedPath:
    """The best path found, and seconds that no plan is below; on clusters of several levels, none
    on consecutive ranks.
    """

    path: CutPath | None  # None if no plan fits the memory
    bound_s: float


def with_replicas(path: CutPath, replicas: Sequence[int]) -> CutPath:
    """Return the path with other replicas of its stages."""
    options = (each.with_replicas(r) for each, r in zip(path.options, replicas, strict=True))
    return replace(path, options=tuple(options))


def stages_along(space: CutSpace, path: CutPath) -> list[Candidate]:
    """Return the stages of a path over a space."""
    ranks = path.ranks or [()] * len(path)
    return [
        Candidate(space.members(0, start), space.members(start, end), options, own)
        for (start, end), options, own in zip(
            pairwise(path.states), path.options, ranks, strict=True
        )
    ]


@dataclass(frozen=True)
class Evaluation:
    """A candidate plan and its price, by the cost model or by simulation."""

    stages: tuple[Candidate, ...]
    price: Price

    @property
    def seconds(self) -> float:
        return self.price.seconds_per_minibatch

    @property
    def simulated(self) -> bool:
        return self.price.cost_model_s is not None

    @property
    def price_s(self) -> float:
        """Seconds by the cost model, also of a plan that was simulated."""
        if self.price.cost_model_s is None:
            return self.seconds
        return self.price.cost_model_s

    @property
    def in_order(self) -> bool:
        """Whether all stages are consecutive layers of the profile's order."""
        return all(stage.before == frozenset(range(len(stage.before))) for stage in self.stages)

    @property
    def config(self) -> str:
        """The config of the plan that these stages make."""
        degrees = degrees_of(stage.options for stage in self.stages)
        return config_of(tuple(stage.replicas for stage in self.stages), self.price.chunks, degrees)

    @property
    def gpus(self) -> int:
        """Ranks of all stages."""
        return sum(stage.options.gpus for stage in self.stages)

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each stage: its own, or consecutive ones in the order of the workers; groups of
        ranks count once.
        """
        return tuple(map(tuple, ranks_of(self.stages, self.price.workers)))

    def divided(self, degree: int) -> Evaluation:
        """Return a plan of a cluster's groups of so many ranks as one of its ranks."""
        stages = tuple(
            replace(stage, options=replace(stage.options, tensor=degree)) for stage in self.stages
        )
        price = replace(self.price, communication_bytes=self.price.communication_bytes * degree)
        return Evaluation(stages, price)

    def fits(self, cluster: Cluster) -> bool:
        """Return whether each stage fits the memory of its GPUs, with the GPU's other stages."""
        return self.over_bytes(cluster) == 0

    def over_bytes(self, cluster: Cluster) -> int:
        """Return by how many bytes the GPU that lacks most exceeds its memory; 0 if all fit."""
        limits = (cluster.memory_of(stage.options.kind) for stage in self.stages)
        held = zip(self.price.gpu_bytes, limits, strict=True)
        return max(0, *(total - limit for total, limit in held if limit is not None), 0)


@dataclass(frozen=True)
class BoundedPlans:
    """Plans that a search proposes, the best first, and seconds that no plan of its is below."""

    plans: tuple[Evaluation, ...]
    bound_s: float


@dataclass(frozen=True)
class Answer:
    """The best plan of a question, and a bound on all its plans."""

    best: Evaluation
    bound_s: float  # seconds per minibatch that no plan is below
    name: str = "search"  # of the method
    bound_of: str = ""  # of which plans, where not of all
    # which were searched, where there are others than those along the profile's order
    cuts: str = ""
    # numbers of ranks that divide layers, for which the time did not suffice
    untried_degrees: tuple[int, ...] = ()
    # the fastest plan, where the best one is nearly as fast and less late
    staler: Evaluation | None = None

    def with_best(self, best: Evaluation) -> Answer:
        """Return the answer with another plan; no bound is above the time of a plan that exists."""
        return replace(self, best=best, bound_s=min(self.bound_s, best.seconds))

    def divided(self, degree: int) -> Answer:
        """Return the answer for the cluster whose groups of so many ranks were its devices."""
        staler = None if self.staler is None else self.staler.divided(degree)
        return replace(self, best=self.best.divided(degree), staler=staler)


@dataclass(frozen=True)
class IlpAnswer:
    """The answer of an integer program: the best plan found, and whether it is proven to be the
    best.
    """

    stages: tuple[Candidate, ...]
    seconds: float
    bound_s: float  # that no plan is below
    optimal: bool
    kinds: tuple[frozenset[int], ...] = ()  # of the GPUs of each stage, by their numbers
