"""What the replicas of a stage divide: ZeRO's levels, by all replicas or by groups that repeat each other (HSDP).

Rajbhandari et al. 2020, section 5, number what is divided, each with all before it:

    0  nothing
    1  the optimizer's state and its update, in any stage of a plan
    2  the gradients, of a plan's only stage
    3  the weights, of a plan's only stage: FSDP

All replicas divide it between them. At levels 2 and 3 groups of them may do so instead, each of which has the whole
model: hybrid sharding (Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.2.2). A group fills a server, so what is
exchanged for every microbatch stays on its links, and between servers the parts of the gradients are all-reduced once
per update.

This is the only file that compares a level with a number. Where an option is not asked about but carried out: costs are
in `planner.cost.fully_sharded`, training in `planner.executor.communication`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

NOTHING, OPTIMIZER, GRADIENTS, WEIGHTS = range(4)
ALL_LEVELS = OPTIMIZER, GRADIENTS, WEIGHTS  # that divide something


class Sharding(NamedTuple):
    """What replicas divide, and how many of them divide it between them."""

    level: int = NOTHING
    group: int = 0  # replicas that have the whole between them; 0 for all of them


class ShardedReplicas:
    """The questions that others ask a stage about what its replicas divide."""

    if TYPE_CHECKING:  # pydantic would take these for fields

        @property
        def replicas(self) -> int: ...

        @property
        def sharding(self) -> Sharding: ...

    @property
    def shards_optimizer(self) -> bool:
        """Whether each replica has a part of the optimizer's state, and perhaps of more."""
        return self.sharding.level >= OPTIMIZER

    @property
    def shards_optimizer_alone(self) -> bool:
        return self.sharding.level == OPTIMIZER

    @property
    def shards_gradients(self) -> bool:
        """Whether each replica has a part of the gradients, too: such a stage is a plan's only one."""
        return self.sharding.level >= GRADIENTS

    @property
    def shards_weights(self) -> bool:
        """Whether each replica has a part of the weights, too, and gathers them before it computes."""
        return self.sharding.level >= WEIGHTS

    @property
    def shards(self) -> int:
        """How many parts there are of what is divided; 1 where nothing is."""
        if not self.shards_optimizer:
            return 1
        return self.sharding.group or self.replicas

    @property
    def copies(self) -> int:
        """How many groups of replicas divide the same, each the whole of it; 1 where all divide it together."""
        return self.replicas // self.shards if self.shards_optimizer else 1

    @property
    def repeats_shards(self) -> bool:
        """Whether groups of replicas repeat what others have (HSDP)."""
        return self.copies > 1

    def shard_groups(self, ranks: Iterable[int]) -> list[tuple[int, ...]]:
        """Return the ranks of the stage in groups that divide what there is; ranks next to each other are in one."""
        ordered = sorted(ranks)
        return [tuple(ordered[first : first + self.shards]) for first in range(0, len(ordered), self.shards)]


def why_no_group(sharding: Sharding, replicas: int) -> str | None:
    """Return why replicas cannot divide anything in such groups; None if they can."""
    level, group = sharding
    if not group:
        return None
    if level < GRADIENTS:
        return "only replicas that divide gradients or weights do so in groups"
    if not 1 < group < replicas or replicas % group:
        return f"{replicas} replicas are no groups of {group} that repeat each other"
    return None


def variants(levels: Iterable[int], replicas: int, groups: Sequence[int], *, whole: bool) -> Iterator[Sharding]:
    """Yield what the replicas of a stage may divide, of these levels.

    Args:
        groups: sizes in which they may divide gradients and weights, beside all together.
        whole: whether the stage is a plan's only one, and gives its replicas equally many microbatches.
    """
    for level in levels if replicas > 1 else (NOTHING,):
        if level < GRADIENTS:
            yield Sharding(level)
        elif whole:
            hybrid = (Sharding(level, group) for group in groups)
            yield Sharding(level)
            yield from (each for each in hybrid if why_no_group(each, replicas) is None)
