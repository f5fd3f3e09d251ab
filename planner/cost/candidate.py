"""Candidates: stages that are to be priced, how each of them runs, and the values that cross
between them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.cost.work import Floats
from planner.formats.cluster import DeviceKind
from planner.formats.files import replace
from planner.formats.profile import Shares
from planner.stages.recomputation import Recomputes
from planner.stages.sharding import UNSHARDED, ShardedReplicas, Sharding
from planner.stages.tensor import DividedLayers

Groups = tuple[frozenset[int], ...]  # positions of layers


def whole_stage(layers: Iterable[int], recompute: bool = True) -> Groups:
    """Return the groups of a stage that recomputes all of its layers at once, or none of them."""
    if not recompute:
        return ()
    return (frozenset(layers),)


@dataclass(frozen=True)
class StageOptions(ShardedReplicas, DividedLayers, Recomputes):
    """How a stage runs. `LayerCosts` says what that does to its time and memory."""

    replicas: int = 1  # workers that run the stage, each on its share of the units
    level: int = 0  # what two replicas or more divide, as `planner.stages.sharding` numbers it
    # Each group keeps only the values that enter it, and runs its forward again before its own
    # backward.
    recompute: Groups = ()
    # of the devices, where the cluster has several; None for the profiled one
    kind: DeviceKind | None = None
    # ranks of a replica, which divide every layer between them (`planner.cost.tensor`)
    tensor: int = 1
    # replicas that divide it between them, where other groups repeat the same; 0 for all of them
    group: int = 0

    def __post_init__(self) -> None:
        assert not self.shards_optimizer or self.replicas > 1
        assert self.replicas % self.shards == 0

    def with_sharding(self, sharding: Sharding) -> "StageOptions":
        """Return the options with another sharding."""
        return replace(self, level=sharding.level, group=sharding.group)

    def with_replicas(self, count: int) -> "StageOptions":
        """Return the options of so many replicas; a single one divides nothing."""
        sharding = UNSHARDED
        if count > 1:
            sharding = self.sharding
        return replace(self, replicas=count, level=sharding.level, group=sharding.group)

    @property
    def gpus(self) -> int:
        return self.replicas * self.ranks_per_replica

    @property
    def sharding(self) -> Sharding:
        return Sharding(self.level, self.group)


@dataclass(frozen=True)
class Traffic:
    """A value, with the positions of the layer that makes it and of the layers that use it."""

    name: str
    producer: int
    users: tuple[int, ...]  # ascending
    output_bytes: int
    gradient_bytes: int
    sent_bytes: int  # of the value on a link, which codes it
    returned_bytes: int  # of its gradient
    shares: Shares = ()  # of these two, by the terms of a microbatch's lengths

    @property
    def amounts(self) -> Floats:
        """Bytes on a link, messages, and bytes as tensors: of activations, then of gradients."""
        sizes = self.output_bytes, self.gradient_bytes
        return np.array(
            [self.sent_bytes, self.returned_bytes, 1, sizes[1] > 0, *sizes], dtype=np.float64
        )


@dataclass(frozen=True)
class Candidate:
    """A stage to be priced: positions of its layers, and of all layers in the stages before it."""

    before: frozenset[int]
    layers: frozenset[int]
    options: StageOptions = field(default_factory=StageOptions)
    ranks: tuple[int, ...] = ()  # of its devices; consecutive ones when empty

    @property
    def replicas(self) -> int:
        return self.options.replicas


def candidates(groups: Sequence[Sequence[int]], replicas: Sequence[int]) -> list[Candidate]:
    """Return stages of these groups of layers, each with so many replicas, one after the other."""
    before: frozenset[int] = frozenset()
    stages = []
    for layers, r in zip(groups, replicas, strict=True):
        stages.append(Candidate(before, frozenset(layers), StageOptions(r)))
        before |= frozenset(layers)
    return stages
