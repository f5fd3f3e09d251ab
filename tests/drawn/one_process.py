"""One plain PyTorch process that trains a model file on whole minibatches: what every plan must
equal.

It is written from the documentation alone, and calls nothing of the package but what reads the
model file.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from planner.model.spec import TrainingSpec


@dataclass(frozen=True)
class Training:
    """The loss of each minibatch, and the weights before and after."""

    losses: list[float]
    before: dict[str, Tensor]
    after: dict[str, Tensor]

    @property
    def moved(self) -> float:
        """The largest change of a weight."""
        return largest_difference(self.before, self.after)


def largest_difference(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """Return the largest absolute difference of two states of floating-point numbers."""
    assert some.keys() == others.keys()
    return max(
        float((tensor.double() - others[name].double()).abs().max())
        for name, tensor in some.items()
        if tensor.is_floating_point()
    )


def train_alone(
    spec: TrainingSpec,
    reader: Reader,
    seed: int,
    steps: int,
) -> Training:
    """Train on so many minibatches."""
    function = spec.functions
    torch.manual_seed(seed)
    model = function["build_model"]()
    before = state_copy(model)
    optimizer = spec.optimizer({n: p for n, p in model.named_parameters() if p.requires_grad})
    scheduler = function["scheduler"](optimizer) if "scheduler" in function else None
    dataset = function["dataset"]()

    losses = []
    for number in range(steps):
        args, target = reader.minibatch(spec, dataset, number)
        optimizer.zero_grad()
        loss = function["loss"](model(*args), target)
        torch.autograd.backward(loss)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss.detach()))
    return Training(losses, before, state_copy(model))


def state_copy(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@dataclass(frozen=True)
class Reader:
    """Reads minibatches of a dataset in its order, epoch after epoch, the last of each perhaps
    smaller.

    Items, and batches that a model file's collate() makes, are drawn by seeds of their own, as the
    documentation says. A minibatch is made of microbatches, because collate() may mix the samples
    that it gets.
    """

    microbatch_size: int
    microbatches: int
    seed: int

    def minibatch(self, spec: TrainingSpec, dataset: Any, number: int) -> Any:
        """Return the arguments and the target of a minibatch, as one batch."""
        size = self.microbatch_size * self.microbatches
        per_epoch = -(-len(dataset) // size)
        epoch, position = divmod(number, per_epoch)
        start = position * size
        samples = min(size, len(dataset) - start)

        parts = []
        for part in range(self.microbatches):
            length = samples // self.microbatches + (part < samples % self.microbatches)
            if length:
                parts.append(self._microbatch(spec, dataset, epoch, range(start, start + length)))
            start += length
        return tree_map(lambda *tensors: torch.cat(tensors), *parts)

    def _microbatch(self, spec: TrainingSpec, dataset: Any, epoch: int, indices: range) -> Any:
        items = []
        for index in indices:
            seed_all(f"{self.seed}/{epoch}/item/{index}")
            items.append(dataset[index])

        seed_all(f"{self.seed}/{epoch}/collate/{indices.start}")
        if "collate" in spec.functions:
            return spec.functions["collate"](items)
        return _stacked(items)


def seed_all(text: str) -> None:
    """Seed Python's, NumPy's and PyTorch's generators by the digest of a text."""
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def _stacked(samples: list[Any]) -> Any:
    """Stack samples as PyTorch's DataLoader does."""
    args, target = default_collate(samples)
    return tuple(args), tuple(target) if isinstance(target, list) else target
