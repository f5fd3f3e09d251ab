"""Read samples of a dataset such that all workers, whatever else they read before, find the same
ones.

Around each item and each batch all global generators are seeded, as docs/guides/own-model.md says,
and restored afterwards. What a dataset draws is then a function of seed, epoch and index, under any
plan and after any resume.

A dataset may still depend on what was read before: by a generator of its own, by what it counts or
keeps. So the first batch is read twice, in another order, and what differs is refused. Later single
items are read again: see `planner.executor.run.sample_checks`.

Seeding takes about 8 microseconds per item, and 100 per batch, on one core of an EPYC.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Dataset

from planner.errors import ModelFileError
from planner.executor.run.draws import reading_data, refuses_draws
from planner.model.batch import Batch
from planner.model.batch_digest import batch_digest, digest_of
from planner.model.generators import State, data_seed, seed_quickly, state_of_generators
from planner.model.randomness import CPU
from planner.model.torch_private import tree_leaves

Collate = Callable[[Sequence[Any]], Batch]

EVALUATION = "evaluation"  # in place of an epoch: evaluation data are drawn alike each time

# Datasets are read by one thread at a time: those of training and of evaluation may share an open
# file.
_ONE_READER = threading.Lock()

SAME_ITEM_HINT = (
    "every worker reads the data for itself, and all must find the same: draw from the global "
    "generators of torch, "
    "numpy.random or random, which are seeded for each item, or from a generator that __getitem__ "
    "makes from the "
    "index, such as numpy.random.default_rng(index); and keep nothing that was drawn or counted"
)


@dataclass
class _Trace:
    """What a batch consisted of, and the state in which each item and collate left the
    generators.
    """

    items: dict[int, int] = field(default_factory=dict)  # place in the batch -> digest
    states: dict[int, State] = field(default_factory=dict)
    batch: int = 0
    collate_state: State = ()
    drew: bool = False


class SampleReader:
    """Reads batches of a map-style dataset.

    Args:
        dataset: the user's.
        collate: makes a batch of samples.
        seed: of the run.
        name: of the user's function that returned the dataset, for messages.
        device: whose generator is seeded beside the host's.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Collate,
        seed: int,
        name: str,
        device: torch.device = CPU,
    ) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed
        self._name = name
        self._checked = False
        self.device = device
        self.draws = False  # whether the first batch drew from a global generator

    def read(self, epoch: int | str, indices: Sequence[int], start: int) -> Batch:
        """Return the batch of the samples `indices`, the first of which has place `start` in the
        epoch's order.

        Raises:
            ModelFileError: where the first batch differs when it is read again.
        """
        with _ONE_READER, reading_data(self.device):
            if refuses_draws():
                return self._collate([self._dataset[index] for index in indices])

            if self._checked:
                return self._read(epoch, enumerate(indices), start)

            self._checked = True
            return self._read_and_check(epoch, indices, start)

    def item_digest(self, epoch: int | str, index: int) -> int:
        """Return the digest of one item, read as for a batch of `epoch`."""
        with _ONE_READER, reading_data(self.device):
            if not refuses_draws():
                self._seed_for(epoch, "item", index)
            return digest_of(tree_leaves(self._dataset[index]))

    def item_name(self, index: int) -> str:
        """Return how messages call an item."""
        return f"{self._name}[{index}]"

    def _read(
        self,
        epoch: int | str,
        places: Iterable[tuple[int, int]],
        start: int,
        trace: _Trace | None = None,
    ) -> Batch:
        """Read the items at (place in the batch, index), in this order, and collate them by their
        places.
        """
        samples: dict[int, Any] = {}
        for place, index in places:
            self._seed_for(epoch, "item", index)
            before = () if trace is None else state_of_generators(self.device)
            samples[place] = self._dataset[index]
            if trace is not None:
                trace.items[place] = digest_of(tree_leaves(samples[place]))
                trace.states[place] = state_of_generators(self.device)
                trace.drew |= trace.states[place] != before

        self._seed_for(epoch, "collate", start)
        before = () if trace is None else state_of_generators(self.device)
        batch = self._collate([samples[place] for place in sorted(samples)])
        if trace is not None:
            trace.batch = batch_digest(batch)
            trace.collate_state = state_of_generators(self.device)
            trace.drew |= trace.collate_state != before

        return batch

    def _seed_for(self, epoch: int | str, what: str, number: int) -> None:
        seed_quickly(data_seed(self._seed, epoch, what, number), self.device)

    def _read_and_check(self, epoch: int | str, indices: Sequence[int], start: int) -> Batch:
        places = list(enumerate(indices))
        first = _Trace()
        batch = self._read(epoch, places, start, first)
        self.draws = first.drew

        if not first.drew:
            # What draws nothing is the same under other seeds. If not, it draws, and puts the
            # states back itself.
            other = _Trace()
            self._read(f"not {epoch}", reversed(places), start, other)
            if (other.items, other.batch, other.drew) == (first.items, first.batch, False):
                return batch
            self.draws = True

        again = _Trace()
        self._read(epoch, reversed(places), start, again)
        self._compare(indices, first, again)
        return batch

    def _compare(self, indices: Sequence[int], first: _Trace, again: _Trace) -> None:
        """Raise ModelFileError for what a second reading under the same seeds found otherwise."""
        for place, index in enumerate(indices):
            what = self.item_name(index)
            if first.items[place] != again.items[place]:
                raise ModelFileError(
                    f"{what} is another sample when it is read again with the same random numbers",
                    hint=SAME_ITEM_HINT,
                )
            if first.states[place] != again.states[place]:
                raise ModelFileError(
                    f"{what} draws other random numbers when it is read again, so it depends on "
                    f"what was read before",
                    hint=SAME_ITEM_HINT,
                )

        if (first.batch, first.collate_state) != (again.batch, again.collate_state):
            raise ModelFileError(
                f"collate() makes another batch of the same samples of {self._name} when it is "
                f"called again with the "
                "same random numbers",
                hint=SAME_ITEM_HINT.replace(
                    "__getitem__ makes from the index", "collate() makes from the samples"
                ),
            )
