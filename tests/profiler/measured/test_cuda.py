"""Profiles measured on a GPU, where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.model.spec import load_model_file
from planner.profiler.measured.profile import ProfilingOptions, profile_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device"),
]


def test_profile_on_a_gpu() -> None:
    path = Path(__file__).parents[3] / "profiles" / "lstm_lm" / "model.py"
    profile = profile_model(load_model_file(f"{path}:build_tiny"), 8, ProfilingOptions(device="cuda", seconds=1.0))
    assert profile.device.kind == "cuda"
    assert profile.whole_step is not None
    layers_s = sum(layer.forward_s + layer.backward_s for layer in profile.layers)
    assert 0 < layers_s < 10 * (profile.whole_step.forward_s + profile.whole_step.backward_s)
