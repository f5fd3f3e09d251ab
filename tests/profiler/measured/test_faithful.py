"""Captured models compute the losses of the models themselves, or are refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.errors import CaptureError
from planner.formats.cluster import flat_cluster
from planner.formats.profile import Profile
from planner.model.spec import in_memory
from planner.model.stage.stage import build_stage
from planner.profiler.measured.profile import ProfilingOptions, profile_model
from planner.solver import solve

OPTIONS = ProfilingOptions(device="cpu", seconds=0.0, repeats=1)
Rule = Callable[["_Own", Tensor], Tensor]


class _Own(nn.Module):
    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.calls = 0
        self._rule = rule

    def forward(self, x: Tensor) -> Tensor:
        return self._rule(self, self.norm(self.layer(x)))


def _depth(model: _Own, x: Tensor) -> Tensor:
    return x * random.random() if model.training else x


def _noise(_: _Own, x: Tensor) -> Tensor:
    return x + torch.as_tensor(np.random.randn(6).astype("float32"))


def _count(model: _Own, x: Tensor) -> Tensor:
    model.calls += 1
    return x / model.calls


def _dropout(_: _Own, x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


def _profile(rule: Rule) -> Profile:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), _Own(rule), nn.Linear(6, 3))
    batch = torch.randn(8, 6), torch.randint(0, 3, (8,))
    return profile_model(in_memory(model, example_batch=batch, loss=F.cross_entropy), 8, OPTIONS)


@pytest.mark.parametrize("rule", [_depth, _noise, _count])
def test_what_changes_from_call_to_call_is_refused(rule: Rule) -> None:
    with pytest.raises(CaptureError, match="two calls of the model with the same batch") as refused:
        _profile(rule)
    assert refused.value.hint is not None
    assert "counts of calls in buffers" in refused.value.hint


def test_layers_that_compute_something_else_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any) -> Callable[..., dict[str, Tensor]]:
        stage = build_stage(*args)
        return lambda *values: {name: 1.01 * value for name, value in stage(*values).items()}

    monkeypatch.setattr("planner.profiler.measured.faithful.build_stage", wrong)
    with pytest.raises(CaptureError, match="the model and its captured layers give losses of"):
        _profile(lambda _, x: x)


def test_noise_of_torch_is_no_fault_and_tells_nothing_of_the_mean() -> None:
    """As a diffusion model, whose loss draws its noise: divided minibatches draw other noise and are not refused."""
    profile = _profile(_dropout)
    assert profile.loss is None
    cluster = flat_cluster(gpus=2, bandwidth_bytes_per_s=1e9)
    assert solve(profile, cluster, schedule="gpipe", microbatches=2).microbatches == 2
