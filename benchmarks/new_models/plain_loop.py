"""Train a model file in plain PyTorch: the loop that people write, without stages and without microbatches.

Nothing of the product computes here. It only reads the tuples of a model file as batches.
"""

from __future__ import annotations

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
        parts: into which a minibatch is divided, for models that normalise over the samples that they see together;
            1 for all others.
        steps: minibatches.
        seed: of the weights, the order of the data, and what is drawn for a sample.
    """

    samples: int
    parts: int
    steps: int
    seed: int


@dataclass(frozen=True)
class Finished:
    """What a run gives: the loss of each minibatch, and the model's state before and after."""

    losses: list[float]
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def train_plainly(path: Path, recipe: Recipe) -> Finished:
    """Train the file's model, and return its losses and its state."""
    file = import_file(path)
    torch.manual_seed(recipe.seed)
    model = file.build_model()
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
    data = file.dataset()
    epoch = 0
    steps = 0
    while True:
        order = _order(len(data), recipe.seed, epoch)
        for start in range(0, len(order), recipe.samples):
            if steps == recipe.steps:
                return
            indices = order[start : start + recipe.samples]
            batches = [
                _batch(file, data, part.tolist(), recipe.seed, epoch)
                for part in torch.tensor(indices).tensor_split(recipe.parts)
                if part.numel()
            ]
            counts = [_count(file, batch) for batch in batches]
            yield [(batch, count / sum(counts)) for batch, count in zip(batches, counts, strict=True)]
            steps += 1
        epoch += 1


def _order(samples: int, seed: int, epoch: int) -> list[int]:
    """Return the order that docs/guides/own-model.md promises."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order: list[int] = torch.randperm(samples, generator=generator).tolist()
    return order


def _batch(file: ModuleType, data: Any, indices: list[int], seed: int, epoch: int) -> Batch:
    samples = []
    for index in indices:
        seed_generators(seed, epoch, index)
        samples.append(data[index])
    seed_generators(seed, epoch, indices[0])
    if hasattr(file, "collate"):
        return make_batch(file.collate(samples), "collate(samples)")
    return collate(samples)


def seed_generators(seed: int, epoch: int, index: int) -> None:
    """Seed the three global generators from which datasets draw, before an item or a collate."""
    number = seed * 1_000_003 + epoch * 1_009 + index
    torch.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)


def _count(file: ModuleType, batch: Batch) -> float:
    """Return what the loss of these samples is a mean over: samples, or what the file counts."""
    if hasattr(file, "loss_weight"):
        return float(file.loss_weight(batch.target))
    return batch.size
