"""Schedules under which a worker has several stages, the chunks of the model that it holds.

Such a schedule says which stages a worker runs and in which order it works on them; streams and depths follow from it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

from planner.schedule.flush import FLUSH
from planner.schedule.instructions import BackwardWeight, Instruction
from planner.schedule.pieces import backward, finish_minibatch, forward
from planner.schedule.schedule import Count, PipelineShape, Schedule, Synchronous

# forward; backward; or the two parts of a backward, for the inputs' gradients and for the weights'.
Work = Literal["F", "B", "I", "W"]


class Chunked(Synchronous):
    """Base of schedules with several stages per worker; all stages have equally many replicas."""

    formula = "chunked"
    placed = False

    @property
    def unchunked(self) -> Schedule:
        return FLUSH

    @abstractmethod
    def order(self, workers: int, chunks: int, position: int, units: int) -> Iterator[tuple[Work, int, int]]:
        """Yield (work, chunk, unit) in the order in which the worker at `position` of the pipeline does it."""

    def own_stages(self, position: int, workers: int, chunks: int) -> list[int]:
        """Return the stages of the worker at `position`, its chunks in order."""
        return [stage for stage in range(workers * chunks) if self.worker_of(stage, workers) == position]

    def in_flight(self, replicas: Count, gpus_after: Count, microbatches: int) -> Count:
        raise NotImplementedError(f"{self} has chunks: see chunks_in_flight")

    def chunks_in_flight(self, workers: int, chunks: int, units: int) -> tuple[int, ...]:
        return _chunks_in_flight(self, workers, chunks, units)

    def minibatch(self, shape: PipelineShape, stage: int, rank: int, minibatch: int) -> Iterator[Instruction]:
        workers = shape.pipeline_length
        chunks = len(shape.ranks) // workers
        position = self.worker_of(stage, workers)
        own = self.own_stages(position, workers, chunks)
        mine = shape.units_of(stage, rank, minibatch)
        left = dict.fromkeys(own, len(mine))
        for work, chunk, index in self.order(workers, chunks, position, len(mine)):
            number, unit = own[chunk], mine[index]
            if work == "F":
                yield from forward(shape, number, unit)
                continue
            # The first stage sends no gradients, so nobody waits for the first part of its backwards.
            split = shape.splits(number)
            if work in "BI":
                left[number] -= work == "B" or not split
                last = left[number] == 0
                yield from backward(shape, number, unit, last_of_round=last, split=work == "I" and split)
            elif split:
                left[number] -= 1
                yield BackwardWeight(number, unit, last_of_round=left[number] == 0)
        # All-reduce in the order in which the stages' gradients are complete.
        yield from finish_minibatch(shape, own[::-1], rank, minibatch)


@lru_cache(maxsize=4096)
def _chunks_in_flight(schedule: Chunked, workers: int, chunks: int, units: int) -> tuple[int, ...]:
    most = [0] * (workers * chunks)
    for position in range(workers):
        flying, own = [0] * chunks, schedule.own_stages(position, workers, chunks)
        for work, chunk, _ in schedule.order(workers, chunks, position, units):
            flying[chunk] += {"F": 1, "B": -1, "I": 0, "W": -1}[work]
            most[own[chunk]] = max(most[own[chunk]], flying[chunk])
    return tuple(most)
