"""The reference of tests of training: the model of a file, trained whole in this process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from planner.executor.run.data import make_batches
from planner.model.spec import load_model_file
from planner.schedule.instructions import Unit


def one_process(path: Path, size: int, microbatches: int, seed: int, steps: int) -> nn.Module:
    """Train the model on the batches of so many samples that a run with this seed has."""
    spec = load_model_file(str(path))
    torch.manual_seed(seed)
    model = spec.build_model()
    optimizer = spec.optimizer(list(model.parameters()))
    batches = make_batches(spec, size, microbatches, seed)
    assert spec.loss is not None
    for minibatch in range(steps):
        optimizer.zero_grad()
        for number in range(microbatches):
            batch = batches.batch(Unit(minibatch, number))
            loss = spec.loss(model(*batch.args), batch.target) / microbatches
            torch.autograd.backward(loss)
        optimizer.step()
    return model
