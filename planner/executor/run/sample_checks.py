"""Check during training that a dataset gives all workers the same items, and the same ones as
before.

Replicas of a stage read different microbatches, so nothing that they read for training can be
compared. A dataset may differ between them by the order of a set, of a folder, or by RANK: labels
of another meaning, without an error. So all workers that read data read one common item more, at
the start and then at the minibatches that `comparison` compares, and compare its digest.

A dataset may also depend on how much was read before, and not within the first batch: a cache that
was filled, a curriculum that counts. Then replicas, which read different numbers of items, train on
data that no single process has. So the common item of the check before is read again, and its
digest must be what it was.

The order of an epoch and the number of samples are compared as well. All reads are seeded, and
leave the generators as they were: see `SampleReader`.
"""

from dataclasses import dataclass

from planner.errors import ModelFileError
from planner.executor.run.comparison import EVERY, FIRST, READ_HINT, BatchComparison, Fact
from planner.executor.run.data import ChangedBatches, DatasetBatches
from planner.executor.run.sample_reader import SAME_ITEM_HINT, SampleReader
from planner.model.batch import Batch
from planner.schedule.instructions import Unit

_START = -1  # number of the check before the first minibatch, whichever that is for a worker
# about as many items are taken in turn, so that all workers know them without the order of an epoch
_COMMON = 64


@dataclass(frozen=True)
class _Reading:
    """An item that was read: with the random numbers of `epoch`, and what it was."""

    epoch: int | str
    index: int
    digest: int


class ItemChecks:
    """Compares single items of a dataset with what other workers read, and with what they were."""

    def __init__(self, reader: SampleReader, comparison: BatchComparison) -> None:
        self._reader = reader
        self._comparison = comparison
        self._earlier: _Reading | None = None

    def check(self, turn: int, epoch: int | str, index: int) -> None:
        """Read an item as all workers do in this turn.

        Raises:
            ModelFileError: where another worker finds another item, or where the one of the turn
                before has changed.
        """
        reading = _Reading(epoch, index, self._reader.item_digest(epoch, index))
        self._comparison.compare(
            Fact(self._reader.item_name(index), reading.digest, READ_HINT, turn)
        )

        earlier = self._earlier
        if (
            earlier is not None
            and self._reader.item_digest(earlier.epoch, earlier.index) != earlier.digest
        ):
            raise ModelFileError(
                f"{self._reader.item_name(earlier.index)} is another sample than before, when it "
                f"was read with the "
                "same random numbers: it depends on how much was read in between",
                hint=SAME_ITEM_HINT,
            )

        # Only now: a check that fails in a thread that reads ahead is done again.
        self._earlier = reading


class CheckedSamples(ChangedBatches):
    """The batches of a dataset, with checks of its order and of single items at some
    minibatches.
    """

    def __init__(self, source: DatasetBatches, comparison: BatchComparison) -> None:
        super().__init__(source)
        self._dataset = source
        self._comparison = comparison
        self._items = ItemChecks(source.reader, comparison)
        self._first: int | None = None  # minibatch that this worker read
        self._common: list[int] = []  # indices of items that all workers may read
        self._checked = _START  # number of the newest check
        self._ordered: int | None = None  # epoch whose order was compared

    def batch(self, unit: Unit) -> Batch:
        """See base class."""
        self._check(unit.minibatch)
        return self._source.batch(unit).pinned(self.device)

    def _check(self, minibatch: int) -> None:
        """Do what is due before `minibatch` is read: other replicas do the same when they read that
        or a later one.
        """
        if self._first is None:
            self._check_order(0)
            order = self._dataset.order(0)
            self._common = order[:: max(1, len(order) // _COMMON)]
            self._check_item(_START, 0)
            self._first = minibatch

        epoch = self._dataset.epoch_of(minibatch)
        if epoch != self._ordered:
            self._check_order(epoch)

        number = minibatch
        if minibatch >= self._first + FIRST:
            number = minibatch // EVERY * EVERY
        if number > self._checked:
            self._check_item(number, self._dataset.epoch_of(number))
            self._checked = number

    def _check_order(self, epoch: int) -> None:
        digest = self._dataset.order_digest(epoch)
        if digest is not None:
            self._comparison.compare(
                Fact(f"the order of epoch {epoch}, which sampler() gives,", digest, READ_HINT)
            )
        self._ordered = epoch

    def _check_item(self, number: int, epoch: int) -> None:
        self._items.check(number, epoch, self._common[number % len(self._common)])
