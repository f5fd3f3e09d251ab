"""Schedules under which a worker has several stages, the chunks of the model that it holds."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from planner.schedule.instructions import BackwardWeight, Instruction
from planner.schedule.one_stage import FLUSH
from planner.schedule.pieces import backward, finish_minibatch, forward
from planner.schedule.schedule import PipelineShape, Synchronous

# forward; backward; or the two parts of a backward, for the inputs' gradients and for the weights'.
Work = Literal["F", "B", "I", "W"]


class Chunked(Synchronous):
    """Base of schedules with several stages per worker: streams and depths follow from `worker_of`
    and `order`.
    """

    formula = "chunked"
    placed = False
    unchunked = FLUSH

    @abstractmethod
    def order(
        self, workers: int, chunks: int, position: int, units: int
    ) -> Iterator[tuple[Work, int, int]]:
        """Yield (work, chunk, unit) in the order in which the worker at `position` of the pipeline
        does it.
        """

    def own_stages(self, position: int, workers: int, chunks: int) -> list[int]:
        """Return the stages of a worker."""
        return [
            stage for stage in range(workers * chunks) if self.worker_of(stage, workers) == position
        ]

    def depths(
        self, replicas: Sequence[int], microbatches: int, chunks: int = 1
    ) -> tuple[int, ...]:
        """See base class."""
        # Where the copies of the pipeline cannot share the microbatches evenly, some have one more
        # than others.
        shares = {-(-microbatches // replicas[0]), microbatches // replicas[0]} - {0}
        workers = len(replicas) // chunks
        # In groups of equally many, no later group has more in flight than the first ones.
        shares = {min(units, 4 * workers) if units % workers == 0 else units for units in shares}
        each = [_in_flight(self, workers, chunks, units) for units in shares]
        return tuple(max(counts) for counts in zip(*each, strict=True))

    def minibatch(
        self, shape: PipelineShape, stage: int, rank: int, minibatch: int
    ) -> Iterator[Instruction]:
        """See base class."""
        workers = shape.pipeline_length
        chunks = len(shape.ranks) // workers
        position = self.worker_of(stage, workers)
        own = self.own_stages(position, workers, chunks)
        mine = shape.units_of(stage, rank, minibatch)
        left = dict.fromkeys(own, len(mine))
        for work, chunk, index in self.order(workers, chunks, position, len(mine)):
            number = own[chunk]
            unit = mine[index]
            if work == "F":
                yield from forward(shape, number, unit)
                continue
            # The first stage sends no gradients, so nobody waits for the first part of its
            # backwards.
            split = shape.splits(number)
            if work in "BI":
                left[number] -= work == "B" or not split
                last = left[number] == 0
                yield from backward(
                    shape, number, unit, last_of_round=last, split=work == "I" and split
                )
            elif split:
                left[number] -= 1
                yield BackwardWeight(number, unit, last_of_round=left[number] == 0)

        # All-reduce in the order in which the stages' gradients are complete.
        yield from finish_minibatch(shape, own[::-1], rank, minibatch)


# Units in flight that a piece of work adds to its stage's.
_ADDED: Mapping[Work, int] = {"F": 1, "B": -1, "I": 0, "W": -1}


@lru_cache(maxsize=4096)
def _in_flight(schedule: Chunked, workers: int, chunks: int, units: int) -> tuple[int, ...]:
    """Return the most units in flight of each stage."""
    most = [0] * (workers * chunks)
    for position in range(workers):
        stages = schedule.own_stages(position, workers, chunks)
        flying = [0] * chunks
        for work, chunk, _ in schedule.order(workers, chunks, position, units):
            flying[chunk] += _ADDED[work]
            stage = stages[chunk]
            most[stage] = max(most[stage], flying[chunk])

    return tuple(most)


class Interleaved(Chunked):
    """Megatron-LM's interleaved 1F1B (Narayanan et al., SC 2021, section 2.2): stage i of K·v on
    worker i mod K.

    Microbatches go in groups of about K: a group passes a worker's first chunk, then its second,
    and so on, the backwards from the last chunk to the first, so that the bubble is that of chunks,
    not of whole workers. Worker p begins with (v-1)·K + 2·(K-1-p) forwards, and alternates from
    there on.
    """

    name = "interleaved"
    known_as = "Megatron's interleaved 1F1B"
    title = "interleaved, {chunks} chunks per GPU, {microbatches} microbatches per minibatch"
    summary = "synchronous, several chunks of the model per GPU"
    fixed_chunks = None
    torch_name = "ScheduleInterleaved1F1B"

    def order(
        self, workers: int, chunks: int, position: int, units: int
    ) -> Iterator[tuple[Work, int, int]]:
        """See base class."""
        # Some groups have a few units more where the number of groups leaves a remainder.
        count = max(1, units // workers)
        borders = [units * number // count for number in range(count + 1)]
        groups = [range(begin, end) for begin, end in pairwise(borders)]

        forwards = [(chunk, unit) for group in groups for chunk in range(chunks) for unit in group]
        backwards = [
            (chunk, unit) for group in groups for chunk in reversed(range(chunks)) for unit in group
        ]

        largest = max(len(group) for group in groups)
        ahead = min(len(forwards), (chunks - 1) * largest + 2 * (workers - 1 - position))

        for step in range(len(forwards) + ahead):
            if step < len(forwards):
                yield "F", *forwards[step]
            if step >= ahead:
                yield "B", *backwards[step - ahead]


INTERLEAVED = Interleaved()
