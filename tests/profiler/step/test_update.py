"""Time of gradient accumulation: per layer, and not negative for noise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planner.formats.profile import load_profile, save_profile
from planner.model.spec import load_model_file
from planner.profiler.estimated.estimate import EstimateOptions, estimate_profile
from planner.profiler.measured.profiling import ProfilingOptions, profile_model
from planner.profiler.step.timing import Clock
from planner.profiler.step.update import AccumulationTime, AccumulationTimer, bounded

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


class Counter(Clock):
    """A clock with given times between marks, and twice as much in the thread's time."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.now = 0.0
        self.steps: Iterator[float] = iter(())

    def mark(self) -> tuple[float, float]:
        self.now += next(self.steps, 0.0)
        return self.now, 2 * self.now


def test_times_are_differences_of_medians_and_never_negative() -> None:
    """Layers of 24, 0, 16 and 36 bytes: even steps keep the gradients of the first, odd ones those of the last two."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    last = nn.Linear(2, 3)
    layers = [dict(first.named_parameters()), {}, dict(second.named_parameters()), dict(last.named_parameters())]
    clock = Counter()
    times = AccumulationTimer(clock, layers)
    seen: list[list[bool]] = []

    def step() -> None:
        parameters = [parameter for layer in layers for parameter in layer.values()]
        seen.append([parameter.grad is not None for parameter in parameters])
        last(second(first(torch.ones(1, 2)))).sum().backward()

    def note(of_last: float, of_second: float, of_first: float) -> None:
        # Two marks per weight, from the last layer with two weights to the second with one and the first with two.
        clock.steps = iter([0.0, of_last, 0.0, of_last, 0.0, of_second, 0.0, of_first, 0.0, of_first])
        times.time(step)

    step()
    assert times.times() is None
    note(1.0, 1.0, 6.0)
    assert times.times() is None
    for of_last, of_second, of_first in ((5.0, 0.5, 2.0), (2.0, 1.0, 5.0), (50.0, 0.5, 3.0), (2.0, 1.0, 70.0)):
        note(of_last, of_second, of_first)
    assert seen[1:] == [[True, True, False, False, False], [False, False, True, True, True]] * 2 + [seen[1]]
    found = times.times()
    assert found is not None
    expected = [2 * (6.0 - 2.5), 0.0, 0.0, 2 * (27.5 - 2.0)]  # noise would make the third -0.5
    assert [each.seconds for each in found] == pytest.approx(expected)
    assert [each.thread_seconds for each in found] == pytest.approx([2 * seconds for seconds in expected])


def test_noise_is_no_more_than_the_memory_can_take() -> None:
    """A busy machine makes 12 ms of four bytes; large layers keep what was measured."""
    small, large = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2**22))
    times = [AccumulationTime(12e-3, 12e-3), AccumulationTime(), AccumulationTime(1e-6, 1e-6)]
    found = bounded(times, [{"small": small}, {}, {"large": large}], Clock(torch.device("cpu")))
    assert 0.0 < found[0].seconds < 1e-3
    assert found[0].thread_seconds == found[0].seconds
    assert found[1:] == times[1:]


def test_gradients_and_hooks_are_left_as_they_were() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    times = AccumulationTimer(Clock(torch.device("cpu")), [dict(model.named_parameters())])
    for _ in range(2):
        times.time(lambda: model(torch.ones(1, 2)).sum().backward())
    # The first step set them, the second one added.
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.full_like(parameter, 2.0))
    assert times.times() is not None
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    seen: list[Tensor] = []
    model.weight.register_post_accumulate_grad_hook(seen.append)  # type: ignore[no-untyped-call]
    model(torch.ones(1, 2)).sum().backward()
    assert len(seen) == 1


def test_layers_without_weights_take_no_time_to_add_and_the_profile_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    profile = profile_model(load_model_file(path), 2, ProfilingOptions(seconds=0.5, repeats=10))
    adding = {layer.name: layer.accumulate_s for layer in profile.layers}
    small, none, large, _, loss = adding.values()
    assert none == loss == 0.0
    assert min(small, large) >= 0.0  # a difference, which a busy machine can swallow
    assert all((layer.accumulate_thread_s or 0.0) >= 0.0 for layer in profile.layers)
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
