"""GNMT-8 on sentences of 4 to 50 words, for `plan profile`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.kept import ROOT
from benchmarks.testbed.lengths.sentences import LONGEST, SHORTEST, WMT, pairs
from planner.model.samplers import BucketSampler
from planner.model.spec import import_file

GNMT8 = import_file(ROOT / "profiles" / "gnmt8" / "model.py")
SENTENCES = 8192

build_model, loss, optimizer = GNMT8.build_model, GNMT8.loss, GNMT8.optimizer
PAIRS = pairs(WMT, SENTENCES)


def lengths() -> dict[str, tuple[int, int]]:
    """Return what varies."""
    return {"source": (SHORTEST, LONGEST), "target": (SHORTEST, LONGEST)}


def example_batch(
    batch_size: int, source: int = LONGEST, target: int = LONGEST
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return random sentences."""
    words = torch.randint(0, GNMT8.VOCABULARY, (batch_size, target + 1))
    return (torch.randint(0, GNMT8.VOCABULARY, (batch_size, source)), words[:, :-1]), words[:, 1:]


class Sentences(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Random words."""

    def __len__(self) -> int:
        return SENTENCES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        source, target = PAIRS[index]
        return torch.randint(0, GNMT8.VOCABULARY, (source,)), torch.randint(
            0, GNMT8.VOCABULARY, (target + 1,)
        )


def dataset() -> Sentences:
    """Return pairs of sentences with WMT's lengths."""
    return Sentences()


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Pad to the longest of a batch; labels that are padding count in no loss."""

    def padded(rows: list[Tensor], value: int) -> Tensor:
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    sources, targets = zip(*samples, strict=True)
    words, labels = (
        padded([each[:-1] for each in targets], 0),
        padded([each[1:] for each in targets], -100),
    )
    return (padded(list(sources), 0), words), labels


def sampler(microbatch_size: int, microbatches: int, seed: int) -> BucketSampler:
    """Return the order of buckets."""
    return BucketSampler([sum(pair) for pair in PAIRS], microbatch_size, microbatches, seed=seed)
