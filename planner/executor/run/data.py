"""Training data as a function of the minibatch number: every worker computes the same, so no data travels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset

from planner.errors import ModelFileError
from planner.executor.defaults import STEPS
from planner.model.batch import Batch, collate
from planner.model.spec import TrainingSpec
from planner.schedule.instructions import Unit

RANDOM_BATCHES = 8  # distinct random minibatches, used in turn: making a new one each time would be timed too


class BatchSource(Protocol):
    """The training data, the same for all workers."""

    random: bool
    last_sizes: tuple[int, ...]  # of the microbatches of a last, smaller minibatch; empty without one

    def batch(self, unit: Unit) -> Batch:
        """The samples of one microbatch; there is at least one."""
        ...

    def size(self, unit: Unit) -> int:
        """Samples of one microbatch; 0 where a last, smaller minibatch has fewer samples than microbatches."""
        ...

    def minibatch_size(self, minibatch: int) -> int:
        """Samples of a minibatch."""
        ...

    def minibatches(self, steps: int | None, epochs: int | None) -> int:
        """Minibatches in a run of `steps`, or of `epochs`, or of the default length."""
        ...


def make_batches(
    spec: TrainingSpec, microbatch_size: int, microbatches: int, seed: int, *, drop_last: bool = False
) -> BatchSource:
    """The model file's dataset in minibatches, or random ones where it has none."""
    dataset = spec.dataset()
    if dataset is None:
        return RandomBatches(spec.example_batch, microbatch_size, microbatches, seed)
    return DatasetBatches(dataset, microbatch_size, microbatches, seed, drop_last=drop_last)


class DatasetBatches:
    """Minibatches of a map-style dataset, shuffled anew each epoch by a generator seeded with (seed, epoch).

    The last minibatch of an epoch has the samples that are left. Its microbatches' sizes differ by one at most, larger
    ones first; where there are fewer samples than microbatches, the rest of these are empty.

    Args:
        dataset: items are (args, target) or (args, kwargs, target), without batch dimension.
        microbatch_size: samples.
        microbatches: per minibatch.
        seed: of the order.
        drop_last: leave a last, smaller minibatch out.
    """

    random = False

    def __init__(
        self, dataset: Dataset[Any], microbatch_size: int, microbatches: int, seed: int, *, drop_last: bool = False
    ) -> None:
        self._dataset = dataset
        self._size = microbatch_size * microbatches
        self._microbatches = microbatches
        self._seed = seed
        self._samples = len(dataset)  # type: ignore[arg-type]  # map-style datasets have a length, their base does not
        whole, rest = divmod(self._samples, self._size)
        self.last_size = 0 if drop_last else rest  # of a last, smaller minibatch; 0 without one
        self.minibatches_per_epoch = whole + (self.last_size > 0)
        if self.minibatches_per_epoch == 0:
            raise ModelFileError(
                f"dataset() has {self._samples} samples, fewer than one minibatch of {self._size}",
                hint="profile with a smaller --batch-size" + (", or train without --drop-last" if drop_last else ""),
            )
        self.last_sizes = tuple(even_sizes(self.last_size, microbatches)) if self.last_size else ()
        self._epoch = -1
        self._order: list[int] = []

    def minibatches(self, steps: int | None, epochs: int | None) -> int:
        """`steps`, or the minibatches of `epochs`, one by default."""
        return steps if steps is not None else (epochs or 1) * self.minibatches_per_epoch

    def batch(self, unit: Unit) -> Batch:
        """Microbatch `unit.microbatch` of minibatch `unit.minibatch`."""
        epoch, position = divmod(unit.minibatch, self.minibatches_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._order = torch.randperm(self._samples, generator=generator).tolist()
            self._epoch = epoch
        start = position * self._size + sum(self._sizes(unit.minibatch)[: unit.microbatch])
        return collate([self._dataset[index] for index in self._order[start : start + self.size(unit)]])

    def size(self, unit: Unit) -> int:
        """Samples of `unit`, perhaps 0."""
        return self._sizes(unit.minibatch)[unit.microbatch]

    def minibatch_size(self, minibatch: int) -> int:
        """Samples of a minibatch: fewer in the last one of an epoch."""
        last = minibatch % self.minibatches_per_epoch == self.minibatches_per_epoch - 1
        return self.last_size if last and self.last_size else self._size

    def _sizes(self, minibatch: int) -> list[int]:
        return even_sizes(self.minibatch_size(minibatch), self._microbatches)


class EvaluationBatches:
    """A map-style dataset in its own order, in batches of `size` samples; the last one has those that are left.

    Args:
        dataset: as for `DatasetBatches`.
        size: samples per batch.
        drop_last: leave out a last, smaller batch, for models that take one batch size only.
    """

    def __init__(self, dataset: Dataset[Any], size: int, *, drop_last: bool = False) -> None:
        self._dataset = dataset
        self._size = size
        samples = len(dataset)  # type: ignore[arg-type]  # as above
        self.samples = samples // size * size if drop_last else samples
        self.batches = -(-self.samples // size)
        if self.samples == 0:
            raise ModelFileError(
                f"evaluation_dataset() has {samples} samples, which make no batch of {size}",
                hint="return a dataset with samples",
            )

    def size(self, unit: Unit) -> int:
        """Samples of batch `unit.minibatch`."""
        return min(self._size, self.samples - unit.minibatch * self._size)

    def batch(self, unit: Unit) -> Batch:
        """Batch `unit.minibatch`."""
        start = unit.minibatch * self._size
        return collate([self._dataset[index] for index in range(start, start + self.size(unit))])


def even_sizes(samples: int, parts: int) -> list[int]:
    """Sizes that differ by one at most, larger ones first: (5, 3) -> [2, 2, 1]."""
    return [samples // parts + (part < samples % parts) for part in range(parts)]


class RandomBatches:
    """Random batches from the model file's `example_batch`, a few distinct ones in turn."""

    random = True
    last_sizes: tuple[int, ...] = ()

    def __init__(
        self, example_batch: Callable[[int], Batch], microbatch_size: int, microbatches: int, seed: int
    ) -> None:
        self._example_batch = example_batch
        self._microbatch_size = microbatch_size
        self._microbatches = microbatches
        self._seed = seed
        self._made: dict[int, Batch] = {}

    def minibatches(self, steps: int | None, epochs: int | None) -> int:
        """`steps`, or the default number.

        Raises:
            ModelFileError: when epochs of no dataset are asked for.
        """
        if epochs is not None:
            raise ModelFileError("--epochs needs a dataset() in the model file", hint="use --steps, or add dataset()")
        return steps if steps is not None else STEPS

    def batch(self, unit: Unit) -> Batch:
        """Microbatch `unit.microbatch` of minibatch `unit.minibatch`."""
        which = unit.minibatch % RANDOM_BATCHES * self._microbatches + unit.microbatch
        if which not in self._made:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._seed * 1_000_003 + which)
                self._made[which] = self._example_batch(self._microbatch_size)
        return self._made[which]

    def size(self, unit: Unit) -> int:
        """Samples of every unit."""
        return self._microbatch_size

    def minibatch_size(self, minibatch: int) -> int:
        """Samples of every minibatch."""
        return self._microbatch_size * self._microbatches
