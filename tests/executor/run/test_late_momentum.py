"""Advice for optimizers whose momentum adds to the delay of gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, NAdam, Optimizer

from planner.executor.run.train import late_momentum
from planner.optim import NewestMuon


def _one() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2, 2))]


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (AdamW(_one(), lr=1e-3), "AdamW's momentum of 0.9"),
        (NAdam(_one(), lr=1e-3, betas=(0.99, 0.98)), "NAdam's momentum of 0.99"),
        (SGD(_one(), lr=1e-3, momentum=0.9), "SGD's momentum of 0.9"),
        (SGD(_one(), lr=1e-3), None),
        (AdamW(_one(), lr=1e-3, betas=(0.0, 0.98)), None),
        (NewestMuon([("0.weight", _one()[0])]), None),
    ],
)
def test_large_momentum_under_late_gradients(optimizer: Optimizer, words: str | None) -> None:
    advice = late_momentum(3, optimizer)
    if words is None:
        assert advice is None
    else:
        assert advice is not None
        assert words in advice
        assert "3 updates late" in advice
    assert late_momentum(1, optimizer) is None
