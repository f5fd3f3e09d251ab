"""Time of gradient accumulation, per layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.formats.profile import load_profile, save_profile
from planner.model.spec import load_model_file
from planner.profiler.estimated.estimate import EstimateOptions, estimate_profile
from planner.profiler.measured.profiling import ProfilingOptions, profile_model
from planner.profiler.step.timing import Clock
from planner.profiler.step.update import layer_updates

WIDTH = 2048
MODEL = f"""
import torch
from torch import nn

def build_model():
    return nn.Sequential(
        nn.Linear(8, {WIDTH}), nn.ReLU(), nn.Linear({WIDTH}, {WIDTH}), nn.Linear({WIDTH}, 1)
    )

def example_batch(batch_size):
    return torch.randn(batch_size, 8), torch.randn(batch_size, 1)

def loss(output, target):
    return nn.functional.mse_loss(output, target)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""


def test_measuring_leaves_weights_and_gradients_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    spec = load_model_file(path)
    model = spec.build_model()
    model(torch.ones(1, 8)).sum().backward()
    before = [(parameter.clone(), parameter.grad) for parameter in model.parameters()]
    layers = [dict(layer.named_parameters()) for layer in model.children()][:3]
    first, none, large = layer_updates(
        spec, layers, Clock(torch.device("cpu")), torch.device("cpu")
    )
    for parameter, (value, gradient) in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.grad is gradient
    assert none.accumulate_s == 0.0
    assert 0.0 < first.accumulate_s < large.accumulate_s
    assert 0.0 < (large.accumulate_thread_s or 0.0) <= 1.1 * large.accumulate_s


OF_SOME = """
def optimizer(named_parameters):
    return torch.optim.Adam([each for name, each in named_parameters if name.startswith("2.")])
"""
OF_THE_LAST = """
def optimizer(parameters):
    return torch.optim.Adam(list(parameters)[2:4])
"""


@pytest.mark.parametrize("optimizer", [OF_SOME, OF_THE_LAST])
@pytest.mark.parametrize("estimated", [False, True])
def test_layers_of_which_the_optimizer_takes_nothing_have_no_update(
    optimizer: str, estimated: bool, tmp_path: Path
) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL + optimizer)
    spec = load_model_file(path)
    if estimated:
        profile = estimate_profile(spec, 2, EstimateOptions(device="v100"))
    else:
        profile = profile_model(spec, 2, ProfilingOptions(seconds=0.1, repeats=2))

    first, _, taken, last, _ = profile.layers
    assert first.update_s == last.update_s == 0.0
    assert first.optimizer_bytes == last.optimizer_bytes == 0
    assert taken.update_s > 0.0
    assert taken.optimizer_bytes >= 2 * 4 * WIDTH * WIDTH


def test_layers_without_weights_take_no_time_to_add_and_the_profile_keeps_the_others(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    profile = profile_model(load_model_file(path), 2, ProfilingOptions(seconds=0.5, repeats=10))
    adding = {layer.name: layer.accumulate_s for layer in profile.layers}
    small, none, large, _, loss = adding.values()
    assert none == loss == 0.0
    assert 0.0 < small < large
    assert profile.layers[2].accumulate_thread_s is not None
    save_profile(profile, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == profile


def test_an_estimate_reads_both_and_writes_the_sum(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    layers = estimate_profile(load_model_file(path), 2, EstimateOptions(device="v100")).layers
    moved = 3 * 4 * (WIDTH * WIDTH + WIDTH)
    assert layers[2].accumulate_s >= moved / 900e9
    assert layers[2].accumulate_s == pytest.approx(moved / 900e9 / 0.75, rel=0.5)
    assert layers[1].accumulate_s == 0.0
