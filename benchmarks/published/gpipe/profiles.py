"""Estimate profiles of the paper's two models at any size, without allocating weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.published.gpipe.models import amoebanet, transformer
from planner.formats.profile import Profile
from planner.model.spec import in_memory
from planner.profiler.estimated.devices import device_spec
from planner.profiler.estimated.estimate import profile_of_trace
from planner.profiler.estimated.execution import Execution
from planner.profiler.estimated.trace import trace_step

DEVICE = "p100"  # GPipe's GPUs; its TPUs are not in our table of devices


@cache
def amoebanet_profile(cells: int, filters: int, microbatch: int) -> Profile:
    """Return the profile of AmoebaNet-D (cells, filters)."""
    batch = amoebanet.example(1)
    return _estimated(
        lambda: amoebanet.AmoebaNetD(cells, filters), batch, F.cross_entropy, microbatch
    )


@cache
def transformer_profile(layers: int, microbatch: int) -> Profile:
    """Return the profile of Transformer-L."""
    return _estimated(
        lambda: transformer.Transformer(layers), transformer.example(1), _token_loss, microbatch
    )


def parameters_of(profile: Profile) -> int:
    """Return the number of parameters, of four bytes each."""
    return sum(layer.weight_bytes for layer in profile.layers) // 4


def _token_loss(scores: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), tokens.flatten())


def _rmsprop(parameters: Any) -> torch.optim.Optimizer:
    """Return the paper's optimizer: 8 bytes of state per parameter, 12 with the parameter
    itself.
    """
    return torch.optim.RMSprop(parameters, momentum=0.9)


def _estimated(
    build: Callable[[], nn.Module],
    batch: Any,
    loss: Callable[[Tensor, Tensor], Tensor],
    microbatch: int,
) -> Profile:
    with torch.device("meta"):
        model = build()
    described = in_memory(model, example_batch=batch, loss=loss, optimizer=_rmsprop)
    return profile_of_trace(
        trace_step(described, microbatch, execution=Execution("cuda")),
        device_spec(DEVICE, "float32"),
    )
