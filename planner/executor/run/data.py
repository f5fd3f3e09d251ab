"""Training data as a function of the minibatch's number: every worker computes the same, so no data
is sent.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from planner.errors import InputError, ModelFileError
from planner.executor.run.draws import reading_data, refuses_draws
from planner.executor.run.sample_reader import EVALUATION, Collate, SampleReader
from planner.formats.plan_parts import PlannedLengths
from planner.formats.profile import LossMean
from planner.model.batch import Batch, collate, make_batch, part_of
from planner.model.batch_digest import digest_of
from planner.model.capture.other_sizes import OtherSizes
from planner.model.capture.size import Extent
from planner.model.generators import data_seed, seed_generators, seeded
from planner.model.lengths import Length, lengths_of, varying
from planner.model.loss import Shares, check_labels, shares_by_samples, shares_function
from planner.model.randomness import CPU, generators_kept
from planner.model.spec import TrainingSpec
from planner.options.training import STEPS
from planner.schedule.instructions import POSTED, Unit
from planner.units import counted

# minibatches that a pipeline without weight stashing may have in flight, and one in the making
KEPT = 3
ENDLESS = 2**40  # minibatches of a run whose end is not known
# for the lengths of the data, and how far the mean may be from the plan's
MINIBATCHES_WATCHED = 16
DRIFT = 0.1
# distinct random minibatches, used in turn: making new ones would count as training time
RANDOM_BATCHES = 8
MOST_RANDOM = 4096  # distinct microbatches of them, all of which are made first and stay in memory

_log = logging.getLogger(__name__)

# microbatches of the first minibatch, and samples of each, to check its loss with
_CHECKED = 4
_EACH = 2
_SIZES = 4096  # of units, that are remembered


class Extents:
    """The extents of units, whose lengths are read off the batches that `read` returns.

    The newest `kept` batches stay, so that one is read once for its messages and for the stages of
    a worker.
    """

    def __init__(
        self,
        read: Callable[[Unit], Batch],
        size: Callable[[Unit], int],
        lengths: Sequence[Length],
        kept: int,
    ) -> None:
        self._read = read
        self._size = size
        self._lengths = lengths
        self._kept = kept
        self.forget()

    def forget(self) -> None:
        """Forget all units: others will have their numbers."""
        self._batches: dict[Unit, Batch] = {}
        self._found: dict[Unit, tuple[int, ...]] = {}

    def batch(self, unit: Unit) -> Batch:
        """Return the samples of a unit; raise ModelFileError for a length beyond what lengths()
        says.
        """
        if unit not in self._batches:
            batch = self._read(unit)
            what = f"microbatch {unit.microbatch} of minibatch {unit.minibatch}"
            self._found[unit] = lengths_of(batch, self._lengths, what)
            self._batches[unit] = batch
            for held, most in ((self._batches, self._kept), (self._found, _SIZES)):
                if len(held) > most:
                    del held[next(iter(held))]

        return self._batches[unit]

    def of(self, unit: Unit) -> Extent:
        """Return the samples of a unit, and its lengths if they vary."""
        samples = self._size(unit)
        # Without samples a microbatch has no lengths of its own; the first one of a minibatch has
        # samples.
        read = unit if samples else Unit(unit.minibatch)
        if read not in self._found:
            self.batch(read)
        return (samples, *self._found[read])


class BatchSource(ABC):
    """The training data, the same on all workers."""

    random = False  # whether it is made up, so that losses mean nothing
    device = CPU  # that the batches are copied to, from pinned memory
    fed = False  # whether a script hands it in
    last_size = 0  # samples of an epoch's last minibatch, if it is smaller
    dataset_samples: int | None = None  # None without a dataset

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches  # per minibatch
        self._sizes: dict[Unit, int] = {}  # every message asks for one

    @abstractmethod
    def batch(self, unit: Unit) -> Batch:
        """Return the samples of one microbatch, which has at least one."""

    @abstractmethod
    def minibatch_size(self, minibatch: int) -> int: ...

    @abstractmethod
    def minibatches(self, steps: int | None, epochs: int | None) -> int:
        """Return the number of minibatches in a run of `steps`, of `epochs`, or of the default
        length.
        """

    def size(self, unit: Unit) -> int:
        """Return the number of samples of one microbatch; 0 if a last minibatch has fewer samples
        than microbatches.
        """
        found = self._sizes.get(unit)
        if found is None:
            samples = self.minibatch_size(unit.minibatch)
            parts = self.microbatches
            if len(self._sizes) >= _SIZES:
                self._sizes.clear()
            found = self._sizes[unit] = samples // parts + (unit.microbatch < samples % parts)
        return found

    @property
    def draws(self) -> bool:
        """Whether reading drew random numbers from a global generator, as far as is known."""
        return False

    def order_digest(self, epoch: int) -> int | None:
        """Return the digest of an epoch's order of samples; None where it follows from the seed and
        the number of samples, and without a dataset.
        """
        return None

    def extent(self, unit: Unit) -> Extent:
        """Return the extent of one microbatch."""
        return self.size(unit)

    @property
    def last_sizes(self) -> tuple[int, ...]:
        """Microbatch sizes of an epoch's last minibatch, if it is smaller."""
        if not self.last_size:
            return ()
        return tuple(even_sizes(self.last_size, self.microbatches))

    def reading(self, units: Iterable[Unit]) -> AbstractContextManager[object]:
        """Return a context in which the source may read `units` ahead."""
        return nullcontext()

    def share(self, unit: Unit) -> float:
        """Return how much the microbatch's loss counts in its minibatch's: here, its share of the
        samples.
        """
        return self.size(unit) / self.minibatch_size(unit.minibatch)

    def numbered(self, unit: Unit) -> Unit:
        """Return the microbatch as all ranks of a group count them, for random numbers."""
        return unit


def even_sizes(samples: int, parts: int) -> list[int]:
    """Divide `samples` into sizes that differ by one at most, larger ones first: (5, 3) -> [2, 2,
    1].
    """
    return [samples // parts + (part < samples % parts) for part in range(parts)]


def make_batches(
    spec: TrainingSpec,
    microbatch_size: int,
    microbatches: int,
    seed: int,
    *,
    drop_last: bool = False,
    device: torch.device = CPU,
) -> BatchSource:
    """Divide the model file's dataset into minibatches, or make random ones if it has none.

    User code may draw on `device`, too.
    """
    with seeded(seed):
        dataset = spec.dataset()
    if dataset is None:
        return RandomBatches(spec.random_batch, microbatch_size, microbatches, seed)
    return DatasetBatches(
        dataset,
        microbatch_size,
        microbatches,
        seed,
        drop_last=drop_last,
        spec=spec,
        draws_on=device,
    )


class DatasetBatches(BatchSource):
    """Minibatches of a map-style dataset, shuffled in each epoch by a generator seeded with seed
    and epoch.

    The `spec` may have another order, and another way to make a batch of samples. Whatever user
    code draws, it draws by seeds that follow from seed, epoch and index: see `SampleReader`.

    The last minibatch of an epoch has the remaining samples, unless `drop_last` leaves it out.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        microbatch_size: int,
        microbatches: int,
        seed: int,
        *,
        drop_last: bool = False,
        spec: TrainingSpec | None = None,
        draws_on: torch.device = CPU,
    ) -> None:
        super().__init__(microbatches)
        together = collate if spec is None else spec.collate
        self.reader = SampleReader(dataset, together, seed, "dataset()", draws_on)
        with seeded(seed):
            sampler = self._sampler = (
                None if spec is None else spec.sampler(microbatch_size, microbatches, seed)
            )

        self._size = microbatch_size * microbatches
        self._seed = seed
        # Map-style datasets have a length, their base does not.
        self.dataset_samples = len(dataset)  # type: ignore[arg-type]
        self.samples = len(dataset if sampler is None else sampler)  # type: ignore[arg-type]
        whole, rest = divmod(self.samples, self._size)
        self.last_size = 0 if drop_last else rest
        self.minibatches_per_epoch = whole + (self.last_size > 0)
        if self.minibatches_per_epoch == 0:
            raise ModelFileError(
                f"dataset() has {self.samples} samples, fewer than one minibatch of {self._size}",
                hint="profile with a smaller `batch_size`"
                + (", or train without `drop_last`" if drop_last else ""),
            )

        self._epoch = -1
        self._order: list[int] = []

    def batch(self, unit: Unit) -> Batch:
        """See base class."""
        epoch, position = divmod(unit.minibatch, self.minibatches_per_epoch)
        usual, larger = divmod(self.minibatch_size(unit.minibatch), self.microbatches)
        start = position * self._size + unit.microbatch * usual + min(unit.microbatch, larger)
        indices = self.order(epoch)[start : start + self.size(unit)]
        return self.reader.read(epoch, indices, start).pinned(self.device)

    @property
    def draws(self) -> bool:
        return self.reader.draws

    def epoch_of(self, minibatch: int) -> int:
        """Return the epoch that a minibatch is in."""
        return minibatch // self.minibatches_per_epoch

    def order(self, epoch: int) -> list[int]:
        """Return the indices of an epoch's samples in their order."""
        if epoch != self._epoch:
            self._order = self._order_of(epoch)
            self._epoch = epoch
        return self._order

    def order_digest(self, epoch: int) -> int | None:
        """See base class."""
        if self._sampler is None:
            return None
        return digest_of([repr(self.order(epoch))])

    def _order_of(self, epoch: int) -> list[int]:
        if self._sampler is None:
            # A generator of its own: the order must not depend on what else draws random numbers.
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            found: list[int] = torch.randperm(self.samples, generator=generator).tolist()
            return found

        if (set_epoch := getattr(self._sampler, "set_epoch", None)) is not None:
            set_epoch(epoch)
        order = self._sampled(epoch)
        again = self._sampled(epoch)
        if order != again or len(order) != self.samples:
            what = "another order each time"
            if order == again:
                what = f"{len(order)} samples, and says {self.samples}"
            raise ModelFileError(
                f"{type(self._sampler).__name__}, which sampler() returned, gives {what}",
                hint="all workers must find the same order: let it depend on seed and "
                "set_epoch(epoch) alone, as "
                "planner.model.samplers.BucketSampler does, or draw from torch's global "
                "generator, which is seeded "
                "for each epoch",
            )

        return order

    def _sampled(self, epoch: int) -> list[int]:
        assert self._sampler is not None
        with reading_data(self.reader.device):
            if not refuses_draws():
                seed_generators(data_seed(self._seed, epoch, "order", 0))
            return list(self._sampler)

    def minibatch_size(self, minibatch: int) -> int:
        """See base class."""
        last = minibatch % self.minibatches_per_epoch == self.minibatches_per_epoch - 1
        if last and self.last_size:
            return self.last_size
        return self._size

    def minibatches(self, steps: int | None, epochs: int | None) -> int:
        if steps is not None:
            return steps
        return (epochs or 1) * self.minibatches_per_epoch


class RandomBatches(BatchSource):
    """Random batches from the model file's example_batch(): a few distinct ones, used in turn."""

    random = True

    def __init__(
        self,
        example_batch: Callable[[int], Batch],
        microbatch_size: int,
        microbatches: int,
        seed: int,
    ) -> None:
        super().__init__(microbatches)
        self._example_batch = example_batch
        self._microbatch_size = microbatch_size
        self._seed = seed
        self._made: dict[int, Batch] = {}

    def batch(self, unit: Unit) -> Batch:
        """See base class."""
        which = (
            unit.minibatch % RANDOM_BATCHES * self.microbatches + unit.microbatch
        ) % MOST_RANDOM
        if which not in self._made:
            # A seed of its own, so that workers agree on a batch whatever else they have made
            # before.
            with seeded(self._seed * 1_000_003 + which):
                made = self._example_batch(self.size(unit))
            self._made[which] = made.pinned(self.device)

        return self._made[which]

    def minibatch_size(self, minibatch: int) -> int:
        return self._microbatch_size * self.microbatches

    def minibatches(self, steps: int | None, epochs: int | None) -> int:
        """See base class."""
        if epochs is not None:
            raise ModelFileError(
                "`epochs` needs a dataset() in the model file", hint="use `steps`, or add dataset()"
            )
        if steps is not None:
            return steps
        return STEPS


class EvaluationData:
    """The batches of an evaluation; the minibatch of a unit is the number of its batch."""

    sizes: Sequence[int]  # samples of each batch
    batches: Sequence[Batch]

    def batch(self, unit: Unit) -> Batch:
        return self.batches[unit.minibatch]

    def size(self, unit: Unit) -> int:
        return self.sizes[unit.minibatch]


class EvaluationBatches(EvaluationData):
    """A map-style dataset in its own order, in batches of `size` samples; the last one may be
    smaller.

    What user code draws is drawn alike each time, so that evaluations can be compared with each
    other.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        size: int,
        *,
        drop_last: bool = False,
        collate: Collate = collate,
        seed: int = 0,
        draws_on: torch.device = CPU,
    ) -> None:
        self.reader = SampleReader(dataset, collate, seed, "evaluation_dataset()", draws_on)
        self._size = size
        samples = len(dataset)  # type: ignore[arg-type]  # as above
        self.sizes = [size] * (samples // size) + [samples % size] * (
            not drop_last and samples % size > 0
        )
        if not self.sizes:
            raise ModelFileError(
                f"evaluation_dataset() has {samples} samples, which make no batch of {size}",
                hint="return a dataset with samples",
            )

    def batch(self, unit: Unit) -> Batch:
        """See base class."""
        start = unit.minibatch * self._size
        return self.reader.read(EVALUATION, range(start, start + self.size(unit)), start)


class ChangedBatches(BatchSource):
    """The batches of `source`, of which a subclass changes something."""

    def __init__(self, source: BatchSource) -> None:
        super().__init__(source.microbatches)
        self.random = source.random
        self.last_size = source.last_size
        self.fed = source.fed
        self.dataset_samples = source.dataset_samples
        self._source = source

    def batch(self, unit: Unit) -> Batch:
        return self._source.batch(unit)

    @property
    def draws(self) -> bool:
        return self._source.draws

    def order_digest(self, epoch: int) -> int | None:
        """See base class."""
        return self._source.order_digest(epoch)

    def minibatch_size(self, minibatch: int) -> int:
        return self._source.minibatch_size(minibatch)

    def minibatches(self, steps: int | None, epochs: int | None) -> int:
        return self._source.minibatches(steps, epochs)

    def share(self, unit: Unit) -> float:
        return self._source.share(unit)


class LengthDrift:
    """Warns once, after some minibatches, if their lengths are not those that a plan was
    made for.
    """

    def __init__(self, plan: PlannedLengths, microbatches: int, spec: TrainingSpec) -> None:
        self._plan = plan
        self._each = microbatches
        self._rows = list[tuple[int, ...]]()
        with generators_kept():  # example batches draw random numbers
            self._varying = varying(spec, 2)

    def see(self, batch: Batch) -> None:
        """Count the lengths of a batch; warn once where they differ from the plan's."""
        watched = MINIBATCHES_WATCHED * self._each
        if self._varying is None or len(self._rows) == watched:
            return
        self._rows.append(self._varying.named(batch, "a microbatch"))
        columns = zip(*self._rows, strict=True) if len(self._rows) == watched else ()
        for name, planned, column in zip(self._plan.names, self._plan.means, columns, strict=False):
            means = [
                fmean(column[start : start + self._each]) for start in range(0, watched, self._each)
            ]
            # Those of a minibatch may be alike, so minibatches say how much is chance.
            if abs(fmean(means) - planned) > max(
                DRIFT * planned, 4 * stdev(means) / MINIBATCHES_WATCHED**0.5
            ):
                _log.warning(
                    f"warning: the mean length '{name}' of microbatches is {fmean(means):.1f}, "
                    f"and the plan was made "
                    f"for {planned:.1f}; hint: profile and solve again with these data"
                )


class VaryingBatches(ChangedBatches):
    """Batches of which some `lengths` vary, so that every worker reads those that pass it."""

    def __init__(
        self, source: BatchSource, lengths: Sequence[Length], drift: LengthDrift | None = None
    ) -> None:
        super().__init__(source)
        kept = KEPT * source.microbatches + POSTED
        self._drift = drift
        self._extents = Extents(self._read, self.size, lengths, kept)

    def _read(self, unit: Unit) -> Batch:
        batch = self._source.batch(unit)
        if self._drift is not None:
            self._drift.see(batch)
        return batch

    def batch(self, unit: Unit) -> Batch:
        return self._extents.batch(unit)

    def extent(self, unit: Unit) -> Extent:
        return self._extents.of(unit)

    def reading(self, units: Iterable[Unit]) -> AbstractContextManager[object]:
        return self._source.reading(units)


class OfRank(ChangedBatches):
    """What one of so many ranks has of each microbatch, as which `source` has as many
    smaller ones.
    """

    def __init__(self, source: BatchSource, place: int, ranks: int) -> None:
        super().__init__(source)
        self._place = place
        self._ranks = ranks
        self.microbatches = source.microbatches // ranks
        self._check(source.last_size or source.microbatches)
        self.last_size = source.last_size // ranks

    def reading(self, units: Iterable[Unit]) -> AbstractContextManager[object]:
        return self._source.reading(map(self.numbered, units))

    def batch(self, unit: Unit) -> Batch:
        return self._source.batch(self.numbered(unit))

    def size(self, unit: Unit) -> int:
        """See base class."""
        self._check(self.minibatch_size(unit.minibatch))
        return self._source.size(self.numbered(unit))

    def share(self, unit: Unit) -> float:
        return self._source.share(self.numbered(unit))

    def numbered(self, unit: Unit) -> Unit:
        """Return the number that a unit of this rank has among those of all ranks."""
        return Unit(unit.minibatch, unit.microbatch * self._ranks + self._place)

    def _check(self, samples: int) -> None:
        if samples < (least := self.microbatches * self._ranks):
            problem = (
                f"a minibatch has {samples} samples, and ranks that shard experts take "
                f"{least} or more"
            )
            raise InputError(problem, hint="leave out an epoch's last minibatch with `drop_last`")


def first_samples(source: BatchSource) -> list[Batch]:
    """Return some samples of the first minibatch, from several microbatches: one batch, unless
    lengths differ.

    Nothing where the data are made up.
    """
    if source.random:
        return []
    with generators_kept():
        units = [Unit(0, number) for number in range(min(source.microbatches, _CHECKED))]
        parts = [source.batch(unit) for unit in units if source.size(unit)]

    samples = [part_of(part, range(min(part.size, _EACH))) for part in parts]
    columns = list(zip(*(each.flatten()[0] for each in samples), strict=True))
    if not all(_stackable(column) for column in columns):
        return samples  # of lengths of their own
    joined = [torch.cat(column) if _has_rows(column[0]) else column[0] for column in columns]
    _, structure = samples[0].flatten()
    return [Batch(*structure.unflatten(joined))]


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _stackable(leaves: Sequence[Any]) -> bool:
    return len({leaf.shape[1:] for leaf in leaves if _has_rows(leaf)}) <= 1


def weighted(
    source: BatchSource, mean: LossMean | None, spec: TrainingSpec, *, whole: bool = True
) -> BatchSource:
    """Return the batches with the shares that the loss asks for, checked where they are read for
    it.
    """
    if whole and mean is not None and mean.forbidden:
        source = CheckedLabels(source, mean, spec.origin)
    shares = shares_function(mean, spec)
    if shares is None or source.microbatches == 1:
        return source
    return WeightedBatches(source, shares, whole=whole)


class CheckedLabels(ChangedBatches):
    """Batches that have no labels with which the loss is another."""

    def __init__(self, source: BatchSource, mean: LossMean, origin: str) -> None:
        super().__init__(source)
        self._mean = mean
        self._origin = origin

    def batch(self, unit: Unit) -> Batch:
        """See base class."""
        batch = self._source.batch(unit)
        check_labels(batch, self._mean, self._origin)
        return batch


class WeightedBatches(ChangedBatches):
    """Batches whose shares of the loss depend on what is in them, such as labels that are not
    padded.

    A worker that computes the loss reads `whole` minibatches, also where replicas of its stage
    divide them.
    """

    def __init__(self, source: BatchSource, shares: Shares, *, whole: bool) -> None:
        super().__init__(source)
        self._shares = shares
        self._whole = whole
        self._read: dict[int, tuple[list[Batch], list[float]]] = {}
        # a thread reads ahead while the training thread asks for shares
        self._lock = threading.Lock()

    def batch(self, unit: Unit) -> Batch:
        """See base class."""
        if self._whole:
            batch = self._minibatch(unit.minibatch)[0][unit.microbatch]
        else:
            batch = self._source.batch(unit)
        return batch.pinned(self.device)

    def share(self, unit: Unit) -> float:
        """Return the share of a unit in its minibatch's loss; 0 without samples."""
        if not self.size(unit):
            return 0.0
        return self._minibatch(unit.minibatch)[1][unit.microbatch]

    def _minibatch(self, number: int) -> tuple[list[Batch], list[float]]:
        with self._lock:
            if number not in self._read:
                # Larger microbatches come first, so that empty ones are the last.
                units = [Unit(number, microbatch) for microbatch in range(self.microbatches)]
                parts = [self._source.batch(unit) for unit in units if self.size(unit)]
                while len(self._read) >= KEPT:
                    del self._read[min(self._read)]
                self._read[number] = parts, self._shares(parts)
            return self._read[number]


class FedBatches(BatchSource):
    """Minibatches that were handed in, the newest `kept` of them; their `shares` follow the samples
    by default.
    """

    fed = True

    def __init__(self, microbatches: int, kept: int, shares: Shares | None = None) -> None:
        super().__init__(microbatches)
        self._kept = kept
        self._shares_of = shares or shares_by_samples
        # samples, microbatches and their shares
        self._fed: dict[int, tuple[int, list[Batch], list[float]]] = {}
        self.count = 0  # minibatches handed in, those before a checkpoint included
        self._other_sizes: OtherSizes | None = None

    def check_sizes_by(self, other_sizes: OtherSizes) -> None:
        """Let `feed` refuse microbatches of sizes that the captured model does not take."""
        self._other_sizes = other_sizes

    def feed(self, batch: Batch) -> None:
        """Take the next minibatch; raise InputError where the model does not take microbatches of
        its sizes.
        """
        parts = batch.split(min(self.microbatches, batch.size))
        for part in {part.size: part for part in parts}.values():
            problem = None
            if self._other_sizes is not None:
                problem = self._other_sizes.problem(part)
            if problem is not None:
                raise InputError(
                    f"a minibatch of {counted(batch.size, 'sample')} has microbatches of "
                    f"{counted(part.size, 'sample')}: {problem}",
                    hint="leave it out, as DataLoader(..., drop_last=True) does",
                )

        self._fed[self.count] = batch.size, parts, self._shares_of(parts)
        self._fed.pop(self.count - self._kept, None)
        self.count += 1

    def batch(self, unit: Unit) -> Batch:
        return self._fed[unit.minibatch][1][unit.microbatch]

    def share(self, unit: Unit) -> float:
        """Return the share of a unit in its minibatch's loss; 0 without samples."""
        if not self.size(unit):
            return 0.0
        return self._fed[unit.minibatch][2][unit.microbatch]

    def parts_of(self, minibatch: int) -> int:
        """Count the parts of a minibatch's loss: its microbatches that have samples."""
        return len(self._fed[minibatch][1])

    def minibatch_size(self, minibatch: int) -> int:
        return self._fed[minibatch][0]

    def minibatches(self, steps: int | None, epochs: int | None) -> int:
        return ENDLESS


class FedEvaluation(EvaluationData):
    """The batches of one evaluation."""

    def __init__(self, size: int, *, fixed: bool) -> None:
        self._size = size
        self._fixed = fixed

    def feed(self, batches: Iterable[object]) -> None:
        """Take the batches of the next evaluation; raise InputError for none, or of a size that
        stages do not take.
        """
        taken = [make_batch(batch, "a batch given to evaluate()") for batch in batches]
        if not taken:
            raise InputError("evaluate() was given no batches", hint="give an iterable of batches")
        for batch in taken:
            if batch.size > self._size or (self._fixed and batch.size < self._size):
                most = "exactly" if self._fixed else "at most"
                raise InputError(
                    f"a batch of {batch.size} samples was given to evaluate(), and stages take "
                    f"{most} {self._size}",
                    hint="make the batches of the evaluation as large as the plan's microbatches",
                )

        self.batches = taken
        self.sizes = [batch.size for batch in taken]
