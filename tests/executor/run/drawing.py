"""A model file in which everything draws from all global generators, and its training in plain
PyTorch.

The plain training follows docs/guides/own-model.md and shares nothing with the product.
"""

from __future__ import annotations

import hashlib
import importlib.util
import random
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

SAMPLES = 44  # of which the last minibatch of an epoch has four, for minibatches of eight

DRAWING = """
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, RandomSampler

OFFSET = random.random() + np.random.rand() + float(torch.rand(()))

def drawn():
    return random.gauss(0, 1) + np.random.randn() + float(torch.randn(()))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        with torch.no_grad():
            self.first.bias.fill_(drawn())

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))

def build_model():
    return Net()

def example_batch(batch_size):
    x = torch.randn(batch_size, 4)
    return (x,), x.sum(1, keepdim=True)

def loss(output, target):
    return nn.functional.mse_loss(output, target)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05)

class Drawn(Dataset):
    def __init__(self, samples):
        self.centres = np.random.randn(samples)

    def __len__(self):
        return len(self.centres)

    def __getitem__(self, index):
        x = torch.tensor([drawn() for _ in range(4)]) + float(self.centres[index]) + OFFSET
        return (x.float(),), x.sum(0, keepdim=True).float()

def dataset():
    return Drawn(SAMPLES)

def evaluation_dataset():
    return Drawn(6)

def sampler(microbatch_size, microbatches, seed):
    return RandomSampler(range(SAMPLES))

def collate(samples):
    inputs, targets = torch.utils.data.default_collate(samples)
    return (inputs[0] * (1 + 0.1 * drawn()),), targets
"""


def write_drawing(folder: Path, more: str = "") -> Path:
    """Write the model file, and `more` at its end."""
    path = folder / "drawing.py"
    path.write_text(DRAWING.replace("SAMPLES", str(SAMPLES)) + more, encoding="utf-8")
    return path


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def part_seed(seed: int, epoch: int | str, what: str, number: int) -> int:
    text = f"{seed}/{epoch}/{what}/{number}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def plain_losses(
    path: Path, seed: int, microbatch: int, microbatches: int, steps: int
) -> list[float]:
    """Train in one process and return the losses by minibatch, then the loss of an evaluation at
    the end.
    """
    seed_all(0)
    module = _imported(path)
    seed_all(seed)
    model = module.build_model()
    optimizer = module.optimizer(model.parameters())
    seed_all(seed)
    dataset = module.dataset()
    seed_all(seed)
    sampler = module.sampler(microbatch, microbatches, seed)

    losses: list[float] = []
    epoch = 0
    while len(losses) < steps:
        seed_all(part_seed(seed, epoch, "order", 0))
        order = list(sampler)
        minibatch = microbatch * microbatches
        for start in range(0, len(order), minibatch):
            samples = min(minibatch, len(order) - start)
            sizes = [
                samples // microbatches + (part < samples % microbatches)
                for part in range(microbatches)
            ]
            optimizer.zero_grad()
            total = 0.0
            place = start
            for size in filter(None, sizes):
                batch = _read(module, dataset, seed, epoch, order[place : place + size], place)
                loss = module.loss(model(*batch[0]), batch[1]) * (size / samples)
                loss.backward()
                total += float(loss.detach())
                place += size
            optimizer.step()
            losses.append(total)
        epoch += 1

    return losses[:steps]


def plain_evaluation(path: Path, seed: int, microbatch: int) -> list[torch.Tensor]:
    """Return the inputs of the evaluation's batches."""
    seed_all(0)
    module = _imported(path)
    seed_all(seed)
    dataset = module.evaluation_dataset()
    starts = range(0, len(dataset), microbatch)
    order = list(range(len(dataset)))
    return [
        _read(module, dataset, seed, "evaluation", order[start : start + microbatch], start)[0][0]
        for start in starts
    ]


def _read(
    module: Any,
    dataset: Any,
    seed: int,
    epoch: int | str,
    indices: Sequence[int],
    start: int,
) -> Any:
    samples = []
    for index in indices:
        seed_all(part_seed(seed, epoch, "item", index))
        samples.append(dataset[index])
    seed_all(part_seed(seed, epoch, "collate", start))
    return module.collate(samples)


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("drawing_in_one_process", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
