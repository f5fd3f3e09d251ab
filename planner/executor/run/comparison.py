"""Compare what workers read and make for themselves: it must be the same on each of them.

The first stage reads a microbatch for its inputs, the last one for its targets, and ranks that
divide layers read what their whole group does. Nothing of it is sent, so data that differs would
train on inputs of one sample and targets of another, without an error. The same holds for what
every worker makes of the model file: weights, the length and the order of the data, the groups of
an optimizer. Whoever has something first leaves its digest in the workers' store; others compare
theirs. That is one request to the store, of a tenth of a millisecond on one host, for each
microbatch of the first minibatches of a run and of a few later ones.

Replicas of a stage read different microbatches: what they read is compared by
`planner.executor.run.sample_checks`.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # exported by a star import

from planner.errors import ModelFileError
from planner.executor.run.data import BatchSource, ChangedBatches
from planner.model.batch import Batch
from planner.model.batch_digest import batch_digest
from planner.model.capture.size import Extent
from planner.schedule.instructions import Unit
from planner.workers.meeting import nth_time, worker_store
from planner.workers.secret_store import Part

FIRST = 16  # minibatches at the beginning that are compared
EVERY = 31  # later ones: a prime, so that each replica's turn comes
_TIMEOUT = timedelta(minutes=10)
_APART = (
    "RANK or WORLD_SIZE, on the clock, on hash() of a text, on the order of a set or of "
    "os.listdir(), nor on a host's "
    "own files: sort what has no order; or let PYTHONHASHSEED be 0 for all workers, by which sets "
    "and hash() are "
    "alike, as for those that `plan train` starts itself"
)
READ_HINT = (
    f"what a worker reads may depend on the seed, the epoch and the index alone, and not "
    f"on {_APART}"
)
MADE_HINT = (
    f"what a worker makes may depend on the seed alone, by the global generators, which "
    f"are seeded, and not on {_APART}"
)


@dataclass(frozen=True)
class Fact:
    """Something that every worker finds for itself, and all must find alike.

    Attributes:
        what: its name in messages.
        digest: of its value.
        hint: what to do where workers differ.
        turn: tells apart what has one name several times.
    """

    what: str
    digest: int
    hint: str = MADE_HINT
    turn: int = 0


class BatchComparison:
    """Compares this worker's facts and batches with those of others; it does nothing before
    `begin`.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store: Store | None = None

    def begin(self) -> None:
        """Begin to compare; all workers of a run call this, and it waits for none."""
        if dist.get_world_size() == 1:
            return
        store = worker_store(_TIMEOUT)
        self._store = Part(f"batches/{nth_time(store, 'batches')}", store)

    def check(self, what: str, batch: Batch, turn: int = 0) -> None:
        """Raise ModelFileError where another worker has read another batch than this one as
        `what`.
        """
        if self._store is not None:
            self.compare(Fact(what, batch_digest(batch), READ_HINT, turn))

    def compare(self, fact: Fact) -> None:
        """Raise ModelFileError where another worker has found another value."""
        if self._store is None:
            return
        # Sets a key that is not there, and returns what is there.
        earliest = self._store.compare_set(
            f"{fact.turn}/{fact.what}", "", f"{fact.digest}/{self._rank}"
        )
        other_digest, other_rank = earliest.decode().split("/")
        if other_digest == f"{fact.digest}":
            return
        raise ModelFileError(
            f"workers differ: {fact.what} has other values on rank {self._rank} than on rank "
            f"{other_rank}",
            hint=fact.hint,
        )


class ComparedBatches(ChangedBatches):
    """The batches of `source`, some of which are compared with what other workers read."""

    def __init__(self, source: BatchSource, comparison: BatchComparison) -> None:
        super().__init__(source)
        self._comparison = comparison
        self._first: int | None = None  # minibatch that this worker read

    def batch(self, unit: Unit) -> Batch:
        """See base class."""
        batch = self._source.batch(unit)
        if self._first is None:
            self._first = unit.minibatch
        if unit.minibatch < self._first + FIRST or unit.minibatch % EVERY == 0:
            same = self.numbered(unit)
            self._comparison.check(
                f"microbatch {same.microbatch} of minibatch {same.minibatch}", batch
            )

        return batch

    def size(self, unit: Unit) -> int:
        return self._source.size(unit)

    def extent(self, unit: Unit) -> Extent:
        return self._source.extent(unit)

    def numbered(self, unit: Unit) -> Unit:
        return self._source.numbered(unit)

    def reading(self, units: Iterable[Unit]) -> AbstractContextManager[object]:
        return self._source.reading(units)
