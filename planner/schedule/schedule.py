"""What a schedule is, and the pipeline that it runs on.

A schedule is one object with everything that differs between schedules. A *unit* of work is one
microbatch, and a *round* all units between two updates of a stage: a minibatch, or under 1f1b a
minibatch on each of the stage's replicas.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from planner.schedule.instructions import Instruction, Unit, Units
from planner.schedule.versions import lag, sharers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# One number, or an array of them: the cost models ask about thousands of stages at once. No numpy
# at run time: the command line lists the schedules in its help, which shows at once.
Count = TypeVar("Count", int, "NDArray[np.int64]")
# The cost formula that bounds a plan's time and memory; `planner.cost` has one class for each.
Formula = Literal["asynchronous", "double-buffered", "synchronous", "chunked"]


@dataclass(frozen=True)
class Channel:
    """Stage `source` sends activations to the later stage `target`, and may receive their
    gradients.
    """

    source: int
    target: int
    gradient: bool = True


class Schedule(ABC):
    """An order of work for pipelines, and what follows from it; class attributes are the traits."""

    name: ClassVar[str]
    title: ClassVar[str]  # for people; {microbatches} and {chunks} are filled in
    summary: ClassVar[str]  # half a line of help
    known_as: ClassVar[str]  # its name in papers and other programs
    # None: no formula bounds it, so that only plans of chosen stages are simulated and trained
    formula: ClassVar[Formula | None]
    # updates without draining the pipeline: training differs from one device's
    asynchronous: ClassVar[bool] = False
    divides: ClassVar[bool] = True  # a minibatch is several microbatches
    stashes: ClassVar[bool] = False  # each unit in flight may have a weight version of its own
    splits_backward: ClassVar[bool] = False  # gradients of inputs first, gradients of weights later
    # the search knows which ranks a stage has, on clusters of several levels
    placed: ClassVar[bool] = True
    # more units in flight may hide messages, so the search tries that
    deepens: ClassVar[bool] = False
    fixed_chunks: ClassVar[int | None] = 1  # stages per worker; None where the user chooses
    # forward and backward in turn; False: all forwards of a minibatch first
    alternates: ClassVar[bool] = True
    weight_versions: ClassVar[int] = 1  # of a stage; where `stashes`, one per unit in flight
    torch_name: ClassVar[str] = "Schedule1F1B"  # the nearest class in torch.distributed.pipelining
    torch_differs: ClassVar[bool] = False  # that class has another order

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<schedule {self.name}>"

    def __reduce__(self) -> str:
        # Schedules are compared by identity, so a copy or an unpickled one must be the same object:
        # pickle looks up a string as a name in the module of the object's class.
        module = sys.modules[type(self).__module__]
        names = [name for name, value in vars(module).items() if value is self]
        if not names:
            raise TypeError(
                f"the schedule {self} is no variable of {module.__name__}, where other processes "
                f"would find it: write NAME = planner.register_schedule(...)"
            )
        return names[0]

    @property
    def chunked(self) -> bool:
        return self.fixed_chunks != 1

    @property
    def solved_as(self) -> Schedule:
        """The schedule whose best cuts this one uses: itself, unless it has no search of
        its own.
        """
        return self

    @property
    def unchunked(self) -> Schedule:
        """The nearest schedule with one stage per worker."""
        return self

    def worker_of(self, stage: int, workers: int) -> int:
        """Return which of the workers runs a stage."""
        return stage % workers

    def versions(self, in_flight: Count) -> Count:
        """Return how many versions of its weights a stage holds with so many units in flight."""
        if self.stashes:
            return in_flight
        return in_flight * 0 + self.weight_versions

    def staleness(self, in_flight: int) -> int:
        """Return how many updates late a stage's gradients are with so many units in flight; 0 as
        on one device.
        """
        # Where the schedule stashes, each unit but the oldest has an update between its forward and
        # its backward.
        return (in_flight if self.stashes else self.weight_versions) - 1

    def versions_suffice(self, microbatches: int, replicas: int, in_flight: int) -> bool:
        """Return whether a stage may have so many units in flight with the versions of weights that
        it holds.
        """
        return True

    def in_flight(self, replicas: Count, gpus_after: Count, microbatches: int) -> Count:
        """Return how many units are between forward and backward on one replica, for schedules
        without chunks.
        """
        return warm_up_depth(replicas, gpus_after)

    def depths(
        self, replicas: Sequence[int], microbatches: int, chunks: int = 1
    ) -> tuple[int, ...]:
        """Return the units in flight of each stage that the schedule asks for."""
        after = gpus_after(replicas)
        return tuple(
            self.in_flight(r, behind, microbatches)
            for r, behind in zip(replicas, after, strict=True)
        )

    def depths_of(self, shape: PipelineShape) -> tuple[int, ...]:
        """Return how many units one replica of each stage of `shape` has in flight where its plan
        does not say.
        """
        depths = self.depths(
            shape.replicas, shape.microbatches, len(shape.ranks) // shape.pipeline_length
        )
        most = [self.deepest(replicas, shape.microbatches) for replicas in shape.replicas]
        return tuple(
            depth if limit is None else min(depth, limit)
            for depth, limit in zip(depths, most, strict=True)
        )

    def deepest(self, replicas: int, microbatches: int) -> int | None:
        """Return the most units that one replica can have in flight whatever its memory; None
        without a limit.
        """
        return -(-microbatches // replicas)

    def turn(self, shape: PipelineShape, unit: Unit) -> int:
        """Return the number of `unit` in the order in which replicas take turns."""
        if shape.microbatches == 1:
            return unit.minibatch
        return unit.microbatch

    @abstractmethod
    def stream(
        self, shape: PipelineShape, stage: int, rank: int, minibatches: int
    ) -> Iterator[Instruction]:
        """Yield the instructions of worker `rank`, one of whose stages is `stage`, in the order it
        runs them.
        """


class Synchronous(Schedule):
    """A schedule that drains the pipeline after every minibatch."""

    formula: ClassVar[Formula | None] = "synchronous"

    def stream(
        self, shape: PipelineShape, stage: int, rank: int, minibatches: int
    ) -> Iterator[Instruction]:
        """See base class."""
        for minibatch in range(minibatches):
            yield from self.minibatch(shape, stage, rank, minibatch)

    @abstractmethod
    def minibatch(
        self, shape: PipelineShape, stage: int, rank: int, minibatch: int
    ) -> Iterator[Instruction]:
        """Yield the instructions of worker `rank` for one minibatch, its update included."""


@dataclass(frozen=True)
class PipelineShape:
    """What a schedule needs to know of a plan."""

    ranks: tuple[tuple[int, ...], ...]  # per stage, of its replicas
    channels: tuple[Channel, ...]
    schedule: Schedule
    microbatches: int = 1  # per minibatch; 1 for schedules that do not divide minibatches
    # per stage, the most units in flight on a replica; None: the schedule's own
    depths: tuple[int, ...] | None = None
    # pairs of stages that hold the same weights (`planner.schedule.versions`)
    shared: tuple[tuple[int, int], ...] = ()
    # whether a replica is several workers that add up their gradients, as ranks that divide
    # sequences do
    sums_in_replicas: bool = False

    def __post_init__(self) -> None:
        # What users ask for is checked where they ask (`planner.plan.shape`,
        # `planner.formats.plan`).
        assert self.schedule.divides or self.microbatches == 1

    @property
    def asynchronous(self) -> bool:
        return self.schedule.asynchronous

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(map(len, self.ranks))

    def sums_gradients(self, stage: int) -> bool:
        """Return whether several workers add up their gradients of a stage with every round."""
        return len(self.ranks[stage]) > 1 or self.sums_in_replicas

    @property
    def first_stages(self) -> dict[int, int]:
        """The first stage of every worker: its only one, unless the schedule has several chunks per
        worker.
        """
        return {
            rank: stage for stage, ranks in reversed(list(enumerate(self.ranks))) for rank in ranks
        }

    @cached_property
    def pipeline_length(self) -> int:
        """Stages on workers of their own; those beyond are further chunks of the same workers."""
        return len(set(self.ranks))

    def replica_of(self, stage: int, rank: int) -> int:
        """Return which replica of a stage a rank is."""
        return self._replicas[stage][rank]

    @cached_property
    def _replicas(self) -> tuple[dict[int, int], ...]:
        # So that a stage of thousands of replicas is not searched for each of them.
        return tuple({rank: n for n, rank in enumerate(ranks)} for ranks in self.ranks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank runs."""
        return tuple(stage for stage, replicas in enumerate(self._replicas) if rank in replicas)

    @cached_property
    def _by_end(self) -> dict[tuple[str, int], list[Channel]]:
        # So that a pipeline of a thousand stages does not search its channels.
        by_end: dict[tuple[str, int], list[Channel]] = {}
        for channel in self.channels:
            by_end.setdefault(("target", channel.target), []).append(channel)
            by_end.setdefault(("source", channel.source), []).append(channel)
        return by_end

    def arriving(self, stage: int) -> Sequence[Channel]:
        """Return the channels into a stage."""
        return self._by_end.get(("target", stage), ())

    def leaving(self, stage: int) -> Sequence[Channel]:
        """Return the channels out of a stage."""
        return self._by_end.get(("source", stage), ())

    def sharers(self, stage: int) -> tuple[int, ...]:
        """Return the other stages that hold weights of `stage`."""
        if not self.shared:
            return ()
        return sharers(self.shared, stage)

    def lag(self, stage: int) -> int:
        """Return by how many rounds gradients of shared weights are applied later than those of
        other weights.
        """
        if not self.schedule.stashes or not self.sharers(stage):
            return 0
        depths = [self.in_flight(other) for other in range(len(self.ranks))]
        return lag(self.shared, depths, stage)

    def minibatches_per_update(self, stage: int) -> int:
        """Return how many minibatches one update of `stage` averages over: a round."""
        if not self.schedule.stashes:
            return 1
        return len(self.ranks[stage])

    def late(self, stage: int) -> int:
        """Return how many updates late the gradients of `stage` are."""
        return self.schedule.staleness(self.in_flight(stage))

    def unsteady(self, rank: int) -> tuple[int, int]:
        """Return how many of a worker's first units fill the pipeline, and how many of its last
        ones empty it.
        """
        stages = self.stages_of(rank)
        first = self.replicas[0]
        last = self.in_flight(stages[0])
        depth = max(last, -(-self.in_flight(0) * first // max(first, self.replicas[stages[0]])))
        if not self.asynchronous:
            return 2 * depth * len(stages), 0
        # All stages are steady in the same time, in which later ones are ahead by what is in flight
        # between.
        return (3 * depth - last) * len(stages), last * len(stages)

    def rank_of(self, stage: int, unit: Unit) -> int:
        """Return the worker that runs `unit` at `stage`, forward and backward: replicas take turns
        (1F1B-RR).
        """
        replicas = self.ranks[stage]
        if len(replicas) == 1:
            return replicas[0]
        return replicas[self.schedule.turn(self, unit) % len(replicas)]

    def units_of(self, stage: int, rank: int, minibatch: int) -> Units:
        """Return the units of a minibatch that a rank runs at a stage."""
        # Turns grow by one with the microbatch.
        first = self.schedule.turn(self, Unit(minibatch, 0))
        period = len(self.ranks[stage])
        begin = (self.replica_of(stage, rank) - first) % period
        return Units(minibatch, range(begin, self.microbatches, period))

    def numbers_of_units(self, stage: int, minibatch: int) -> list[int]:
        """Return how many units of a minibatch each replica of a stage runs: see `units_of`."""
        replicas = len(self.ranks[stage])
        first = self.schedule.turn(self, Unit(minibatch, 0))
        return [
            len(range((replica - first) % replicas, self.microbatches, replicas))
            for replica in range(replicas)
        ]

    def shortened(self, least: int) -> PipelineShape:
        """Return the same pipeline with few microbatches per minibatch: `least` or more, if it has
        as many.

        Replicas, and chunks of a worker, take turns as before, and what is left over at the end is
        the same.
        """
        period = math.lcm(*self.replicas, len(self.first_stages))
        least = max(least, period)
        if self.microbatches <= least:
            return self
        microbatches = min(self.microbatches, least + (self.microbatches - least) % period)
        depths = tuple(min(self.in_flight(stage), microbatches) for stage in range(len(self.ranks)))
        return replace(self, microbatches=microbatches, depths=depths)

    def splits(self, stage: int) -> bool:
        """Return whether a stage's backward runs in two parts: where an earlier stage waits for
        gradients.
        """
        return self.schedule.splits_backward and any(
            channel.gradient for channel in self.arriving(stage)
        )

    def in_flight(self, stage: int) -> int:
        """Return the most units between forward and backward on one replica of `stage`."""
        return self._depths[stage]

    @cached_property
    def _depths(self) -> tuple[int, ...]:
        if self.depths is not None:
            return self.depths
        return self.schedule.depths_of(self)

    def versions(self, stage: int) -> int:
        """Return the most versions of its weights that one replica of `stage` holds: what memory is
        planned for.
        """
        return self.schedule.versions(self.in_flight(stage))


def gpus_after(replicas: Sequence[int]) -> list[int]:
    """Return for each stage the workers of all later stages."""
    return [sum(replicas) - done for done in accumulate(replicas)]


def warm_up_depth(replicas: Count, gpus_after: Count) -> Count:
    """Return what a replica admits before its first backward under 1F1B (NOAM: PipeDream, SOSP
    2019, section 3.2).
    """
    return 1 + -(-gpus_after // replicas)


def warm_up_depths(replicas: Sequence[int]) -> tuple[int, ...]:
    """Return the warm-up depth of every stage of a pipeline with so many replicas."""
    return tuple(map(warm_up_depth, replicas, gpus_after(replicas)))


def stream(shape: PipelineShape, stage: int, rank: int, minibatches: int) -> Iterator[Instruction]:
    """Yield all instructions of worker `rank`, one of whose stages is `stage`, in the order it runs
    them; lazily.
    """
    shape.replica_of(stage, rank)  # raises KeyError for a worker that does not run the stage
    yield from shape.schedule.stream(shape, stage, rank, minibatches)
