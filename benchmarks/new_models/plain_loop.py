"""Train a model file in plain PyTorch: the loop that people write, without stages and without
microbatches.

Nothing of the product computes here. It only reads the tuples of a model file as batches.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from planner.model.batch import Batch, collate, make_batch
from planner.model.spec import import_file


@dataclass(frozen=True)
class Recipe:
    """How the model file is trained.

    Attributes:
        samples: of a minibatch.
        parts: into which a minibatch is divided, for models that normalise over the samples that
            they see together; 1 for all others.
        steps: minibatches.
        seed: of the weights, the order of the data, and what is drawn for a sample.
        ignored: the label that the loss does not count, where parts are weighed by their labels.
    """

    samples: int
    parts: int
    steps: int
    seed: int
    ignored: int | None = None


@dataclass(frozen=True)
class Finished:
    """What a run gives: the loss of each minibatch, and the model's state before and after."""

    losses: list[float]
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def train_plainly(path: Path, recipe: Recipe, *, noise: float = 0.0) -> Finished:
    """Train the file's model, and return its losses and its state.

    With `noise` each number of the first weights is another by about that share. Such a run tells
    how much of rounding a training makes by itself.
    """
    file = import_file(path)
    seed_generators(recipe.seed)
    model = file.build_model()
    _disturb(model, noise)
    before = _state(model)

    optimizer = _optimizer(file, model)
    scheduler = file.scheduler(optimizer) if hasattr(file, "scheduler") else None

    losses = []
    for parts in _minibatches(file, recipe):
        optimizer.zero_grad()
        losses.append(sum(_backward(file, model, batch, share) for batch, share in parts))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()

    return Finished(losses, before, _state(model))


def _disturb(model: nn.Module, noise: float) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if noise and weight.is_floating_point():
                weight.mul_(1 + noise * torch.randn(weight.shape, generator=generator))


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: value.detach().clone()
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    }


def _optimizer(file: ModuleType, model: nn.Module) -> torch.optim.Optimizer:
    """Call the file's optimizer with what trains, by names where it asks for names."""
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    function: Callable[..., torch.optim.Optimizer] = file.optimizer
    if function.__code__.co_varnames[0] == "named_parameters":
        return function(named)
    return function([weight for _, weight in named])


def _backward(file: ModuleType, model: nn.Module, batch: Batch, share: float) -> float:
    """Add the gradients of one part of a minibatch, and return its part of the loss."""
    output = model(*batch.args, **batch.kwargs)
    loss = file.loss(output, batch.target) if hasattr(file, "loss") else _own_loss(output)
    shared = loss * share
    shared.backward()
    return float(shared.detach())


def _own_loss(output: Any) -> Tensor:
    loss: Tensor = output["loss"] if isinstance(output, dict) else output.loss
    return loss


def _minibatches(file: ModuleType, recipe: Recipe) -> Iterator[list[tuple[Batch, float]]]:
    """Yield the parts of each minibatch, with what each counts of the minibatch's mean."""
    seed_generators(recipe.seed)
    data = file.dataset()
    epoch = 0
    steps = 0
    while True:
        order = _order(len(data), recipe.seed, epoch)
        for start in range(0, len(order), recipe.samples):
            if steps == recipe.steps:
                return
            places = torch.arange(start, min(start + recipe.samples, len(order)))
            batches = [
                _batch(file, data, order, part.tolist(), recipe.seed, epoch)
                for part in places.tensor_split(recipe.parts)
                if part.numel()
            ]
            counts = [_count(batch, recipe.ignored) for batch in batches]
            yield [
                (batch, count / sum(counts)) for batch, count in zip(batches, counts, strict=True)
            ]
            steps += 1
        epoch += 1


def _order(samples: int, seed: int, epoch: int) -> list[int]:
    """Return the order that docs/guides/own-model.md promises."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order: list[int] = torch.randperm(samples, generator=generator).tolist()
    return order


def _batch(
    file: ModuleType, data: Any, order: list[int], places: list[int], seed: int, epoch: int
) -> Batch:
    """Read the samples at these places of the order, each item and the batch under a seed of its
    own.
    """
    samples = []
    for index in (order[place] for place in places):
        seed_generators(data_seed(seed, epoch, "item", index))
        samples.append(data[index])
    seed_generators(data_seed(seed, epoch, "collate", places[0]))
    if hasattr(file, "collate"):
        return make_batch(file.collate(samples), "collate(samples)")
    return collate(samples)


def data_seed(seed: int, epoch: int, what: str, number: int) -> int:
    """Return the seed of an item, by its index, or of a batch, by its first sample's place in the
    order.
    """
    text = f"{seed}/{epoch}/{what}/{number}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def seed_generators(seed: int) -> None:
    """Seed the three global generators from which people draw."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _count(batch: Batch, ignored: int | None) -> float:
    """Return what the loss of these samples is a mean over."""
    if ignored is None:
        return batch.size
    labels = batch.kwargs["labels"] if batch.target is None else batch.target
    return float((labels != ignored).sum())
