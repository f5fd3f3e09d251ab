"""What it takes to add to gradients: whose time it is, and that noise makes none of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planner.model.file import load_model_file
from planner.profile_file import load_profile, save_profile
from planner.profiler import profile_model
from planner.profiler.adding import AddingTimes
from planner.profiler.clock import CpuClock
from planner.profiler.estimate import estimate_profile

WIDTH = 2048
MODEL = f"""
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(8, {WIDTH}), nn.ReLU(), nn.Linear({WIDTH}, {WIDTH}), nn.Linear({WIDTH}, 1))

def example_batch(batch_size):
    return torch.randn(batch_size, 8), torch.randn(batch_size, 1)

def loss(output, target):
    return nn.functional.mse_loss(output, target)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""


class Counter(CpuClock):
    """A clock whose marks are as far apart as it is told, and twice as far in the thread's time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.steps: Iterator[float] = iter(())

    def mark(self) -> tuple[float, float]:
        self.now += next(self.steps, 0.0)
        return self.now, 2 * self.now


def test_times_are_differences_of_medians_and_never_negative() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    layers = [dict(first.named_parameters()), {}, dict(second.named_parameters())]
    clock = Counter()
    times = AddingTimes(clock, layers)
    assert times.times() is None

    def backward() -> None:
        second(first(torch.ones(1, 2))).sum().backward()

    def note(seconds: float, *, adds: bool) -> None:
        # Two marks for each of four parameters, the last layer's first, of which that of the second layer take longer.
        clock.steps = iter([0.0, seconds, 0.0, seconds, 0.0, 1.0, 0.0, 1.0])
        times.note(backward, adds=adds)

    for seconds in (3.0, 1.0, 2.0):
        for parameter in (*first.parameters(), *second.parameters()):
            parameter.grad = None
        note(seconds, adds=False)
    for seconds in (6.0, 5.0, 70.0):
        note(seconds, adds=True)
    found = times.times()
    assert found is not None
    assert [each.seconds for each in found] == [0.0, 0.0, pytest.approx(2 * 6.0 - 2 * 2.0)]
    assert [each.thread_seconds for each in found] == [0.0, 0.0, pytest.approx(2 * (2 * 6.0 - 2 * 2.0))]
    assert times.backwards == 3


def test_gradients_and_hooks_are_left_as_they_were() -> None:
    model = nn.Linear(2, 2)
    times = AddingTimes(CpuClock(), [dict(model.named_parameters())])
    times.note(lambda: model(torch.ones(1, 2)).sum().backward(), adds=False)
    times.note(lambda: model(torch.ones(1, 2)).sum().backward(), adds=True)
    before = [parameter.grad for parameter in model.parameters()]
    assert all(torch.equal(gradient, 2 * torch.ones_like(gradient)) for gradient in before if gradient is not None)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    seen: list[Tensor] = []
    model.weight.register_post_accumulate_grad_hook(seen.append)  # type: ignore[no-untyped-call]
    model(torch.ones(1, 2)).sum().backward()
    assert len(seen) == 1


def test_layers_with_many_weights_take_time_to_add_and_those_without_take_none(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    profile = profile_model(load_model_file(path), 2, seconds=0.5, repeats=10)
    adding = {layer.name: layer.accumulate_s for layer in profile.layers}
    small, none, large, _, loss = adding.values()
    # 17 MB against 74 kB; the hooks alone take microseconds.
    assert large > 1e-4
    assert large > 4 * small
    assert none == loss == 0.0
    assert all((layer.accumulate_thread_s or 0.0) >= 0.0 for layer in profile.layers)
    assert profile.layers[2].accumulate_thread_s is not None
    save_profile(profile, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == profile


def test_an_estimate_reads_both_and_writes_the_sum(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    layers = estimate_profile(load_model_file(path), 2, device="v100").layers
    moved = 3 * 4 * (WIDTH * WIDTH + WIDTH)
    assert layers[2].accumulate_s >= moved / 900e9
    assert layers[2].accumulate_s == pytest.approx(moved / 900e9 / 0.75, rel=0.5)
    assert layers[1].accumulate_s == 0.0
