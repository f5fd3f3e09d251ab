"""How a stage runs, beside which layers it has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from planner.formats.cluster import DeviceKind

# Which layers run their forward again, and do not keep what their backward needs: as few as memory demands, none, all
# of every stage, or every unit of every stage by itself (`planner.cost.recomputation`).
RecomputeRule = Literal["auto", "never", "always", "blocks"]
# Whether a stage's replicas divide the optimizer's state: where that is better, never, always.
ShardRule = Literal["auto", "never", "always"]

Groups = tuple[frozenset[int], ...]  # positions of layers


def whole_stage(layers: Iterable[int], recompute: bool = True) -> Groups:
    """Return the groups of a stage that recomputes all of its layers at once, or none of them."""
    return (frozenset(layers),) if recompute else ()


@dataclass(frozen=True)
class StageOptions:
    """How a stage runs. `LayerCosts` says what that does to its time and memory.

    Attributes:
        replicas: workers that run the stage, each on its share of the units.
        sharded: divide the optimizer's state and its update over the replicas, of which there are 2 or more (ZeRO-1,
            Rajbhandari et al. 2020, section 5).
        recompute: groups of layers, by position. Each keeps only the values that enter it, and runs its forward again
            before its own backward. One group of all layers keeps the stage's input alone.
        kind: of the devices, where the cluster has several; None for the profiled one.
        tensor: ranks of a replica, which divide every layer between them (`planner.cost.tensor`).
    """

    replicas: int = 1
    sharded: bool = False
    recompute: Groups = ()
    kind: DeviceKind | None = None
    tensor: int = 1

    def __post_init__(self) -> None:
        assert not self.sharded or self.replicas > 1

    @property
    def gpus(self) -> int:
        """Ranks of all replicas."""
        return self.replicas * self.tensor

    @property
    def shards(self) -> int:
        """Parts of the optimizer's state, each on another replica."""
        return self.replicas if self.sharded else 1
