"""What the replicas of a stage divide: ZeRO's levels, by all replicas or by groups that repeat each
other (HSDP).

Rajbhandari et al. 2020, section 5, number what is divided, each with all before it:

    0  nothing
    1  the optimizer's state and its update, in any stage of a plan
    2  the gradients, of a plan's only stage
    3  the weights, of a plan's only stage: FSDP

All replicas divide it between them. At levels 2 and 3 groups of them may do so instead, each of
which has the whole model: hybrid sharding (Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.2.2).
A group fills a server, so what is exchanged for every microbatch stays on its links, and between
servers the parts of the gradients are all-reduced once per update.

Nobody else knows what a level's number means: all others ask a stage the questions of
`ShardedReplicas`. What an option costs is in `planner.cost.fully_sharded` and
`planner.cost.models`, how its module is built in `planner.executor.communication`, and how it is
exported in `planner.exports`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from planner.schedule.schedule import Schedule

_NOTHING, _OPTIMIZER, _GRADIENTS, _WEIGHTS = range(4)
_PARTS = ("optimizer", "gradients", "weights")  # that are divided, by level
_TITLES = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3, FSDP")
_HYBRID = "HSDP"


class Sharding(NamedTuple):
    """What replicas divide, and how many of them divide it between them."""

    level: int = _NOTHING
    group: int = 0  # replicas that have the whole between them; 0 for all of them

    @property
    def divides_anything(self) -> bool:
        return self.level >= _OPTIMIZER

    @property
    def divides_gradients(self) -> bool:
        return self.level >= _GRADIENTS

    @property
    def divides_weights(self) -> bool:
        return self.level >= _WEIGHTS

    @property
    def divides_optimizer_alone(self) -> bool:
        return self.level == _OPTIMIZER

    @property
    def zero_stage(self) -> int:
        """ZeRO's number for what is divided, as trainers write it: its place in `ZERO_STAGES`."""
        return self.level

    @property
    def words(self) -> str:
        """What is divided: "the optimizer's state, gradients and weights"."""
        if not self.level:
            return "nothing"
        *first, last = ("the optimizer's state", "gradients", "weights")[: self.level]
        return f"{', '.join(first)} and {last}" if first else last

    def in_groups(self, group: int) -> "Sharding":
        """Return the same in groups of so many replicas; 0 for all of them."""
        return self._replace(group=group)

    @property
    def level_in_files(self) -> int:
        """The level of `sharding_level`, which counts where the stage is `sharded`."""
        return self.level or _OPTIMIZER

    @property
    def title(self) -> str:
        """The name in tables of ways to train."""
        if self.group:
            return _HYBRID
        return _TITLES[self.level]

    def less(self) -> Iterator["Sharding"]:
        """Yield what divides less, the least first, in the same groups where these are possible."""
        for level in range(self.level):
            yield Sharding(level, self.group if level >= _GRADIENTS else 0)

    def of_optimizer_alone(self) -> "Sharding":
        """Return the same replicas or groups, dividing nothing but the optimizer's state."""
        return self._replace(level=_OPTIMIZER)


UNSHARDED = Sharding()
# Of all replicas, by ZeRO's number.
ZERO_STAGES = (UNSHARDED, Sharding(_OPTIMIZER), Sharding(_GRADIENTS), Sharding(_WEIGHTS))
_, ZERO_1, ZERO_2, ZERO_3 = ZERO_STAGES


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
        return self.sharding.divides_anything

    @property
    def shards_optimizer_alone(self) -> bool:
        return self.sharding.level == _OPTIMIZER

    @property
    def shards_gradients(self) -> bool:
        """Whether each replica has a part of the gradients, too: such a stage is a plan's
        only one.
        """
        return self.sharding.divides_gradients

    @property
    def shards_weights(self) -> bool:
        """Whether each replica has a part of the weights, too, and gathers them before it
        computes.
        """
        return self.sharding.level >= _WEIGHTS

    @property
    def shards(self) -> int:
        """How many parts there are of what is divided; 1 where nothing is."""
        if not self.shards_optimizer:
            return 1
        return self.sharding.group or self.replicas

    @property
    def copies(self) -> int:
        """How many groups of replicas divide the same, each the whole of it; 1 where all divide it
        together.
        """
        if not self.shards_optimizer:
            return 1
        return self.replicas // self.shards

    @property
    def repeats_shards(self) -> bool:
        """Whether groups of replicas repeat what others have (HSDP)."""
        return self.copies > 1

    @property
    def sharded_parts(self) -> Sequence[str]:
        """What is divided, in words."""
        return _PARTS[: self.sharding.level]

    @property
    def sharding_words(self) -> str:
        """Say what replicas of a whole model do, in a few words."""
        if not self.shards_optimizer:
            return "data parallel"
        words = f"data parallel, ZeRO-{self.sharding.level}"
        if self.repeats_shards:
            words += f" in {self.copies} groups of {self.shards}, {_HYBRID}"
        return words

    def shard_groups(self, ranks: Iterable[int]) -> list[tuple[int, ...]]:
        """Return the ranks of the stage in groups that divide what there is; ranks next to each
        other are in one.
        """
        ordered = sorted(ranks)
        return [
            tuple(ordered[first : first + self.shards])
            for first in range(0, len(ordered), self.shards)
        ]


def why_no_group(sharding: Sharding, replicas: int) -> str | None:
    """Return why replicas cannot divide anything in such groups; None if they can."""
    group = sharding.group
    if not group:
        return None
    if not sharding.divides_gradients:
        return "only replicas that shard gradients or weights do so in groups"
    if not 1 < group < replicas or replicas % group:
        return f"{replicas} replicas are no groups of {group} that repeat each other"
    return None


def why_whole(
    schedule: Schedule, microbatches: int, replicas: Sequence[int]
) -> tuple[str, str] | None:
    """Return why replicas of these stages cannot divide gradients and weights, with a hint; None if
    they can.

    Each replica may be a group of ranks that divide its layers.
    """
    problem = None
    if len(replicas) > 1 or replicas[0] == 1:
        problem = (
            "only replicas of the whole model shard gradients or weights",
            "give one stage of several replicas",
        )
    elif not schedule.divides or schedule.asynchronous or schedule.chunked:
        problem = (
            f"replicas do not shard gradients or weights under {schedule}",
            "use `schedule=1f1b-flush`",
        )
    elif microbatches % replicas[0]:
        each = -(-microbatches // replicas[0])
        problem = (
            f"{replicas[0]} replicas that shard gradients or weights cannot share {microbatches} "
            f"microbatches equally",
            f"give `microbatches={each * replicas[0]}`",
        )

    return problem


class PossibleSharding(NamedTuple):
    """What the replicas of a question's stages may divide."""

    always: bool = False  # whether replicas must divide something
    optimizer: bool = False  # whether they may divide the optimizer's state
    # whether those of a plan's only stage may divide gradients and weights, too
    gradients: bool = False
    groups: Sequence[int] = ()  # sizes in which they may do so, beside all together

    @property
    def levels(self) -> tuple[int, ...]:
        """The sharding levels that the rules allow, ascending."""
        if not self.optimizer:
            return (_NOTHING,)
        plain = (_OPTIMIZER,) if self.always else (_NOTHING, _OPTIMIZER)
        if not self.gradients:
            return plain
        return (*plain, _GRADIENTS, _WEIGHTS)

    def allows(self, sharding: Sharding) -> bool:
        return sharding.level in self.levels

    def of_replicas(self, replicas: int, *, whole: bool) -> Iterator[Sharding]:
        """Yield what the replicas of a stage may divide.

        Args:
            whole: whether the stage is a plan's only one, and gives its replicas equally many
                microbatches.
        """
        if replicas == 1:
            yield UNSHARDED
            return

        for level in self.levels:
            if level < _GRADIENTS:
                yield Sharding(level)
            elif whole:
                hybrid = (Sharding(level, group) for group in self.groups)
                yield Sharding(level)
                yield from (each for each in hybrid if why_no_group(each, replicas) is None)


def usual_shardings(replicas: int, server: int | None, *, whole: bool) -> Iterator[Sharding]:
    """Yield what people let replicas divide, whatever a question allows: ZeRO-1 to 3, and HSDP
    inside a server.
    """
    yield Sharding(_OPTIMIZER)
    if whole:
        yield Sharding(_GRADIENTS)
        yield Sharding(_WEIGHTS)
        hybrid = Sharding(_WEIGHTS, server or 0)
        if server is not None and why_no_group(hybrid, replicas) is None:
            yield hybrid


def is_level(number: int) -> bool:
    """Whether a number says what to divide."""
    return _OPTIMIZER <= number <= _WEIGHTS
