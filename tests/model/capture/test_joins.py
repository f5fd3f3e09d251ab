"""Where many operations share a layer, the profile says how many and why, and what it names
helps.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.formats.profile import Profile
from planner.model.batch import Batch
from planner.model.capture.capture import capture
from planner.model.spec import in_memory
from planner.profiler.measured.profiling import ProfilingOptions, profile_model
from planner.reporting.tables.profile import profile_report, uncut_notes

LAYERS = 6
Rule = Callable[["_Counting", Tensor], Tensor]


class _Counting(nn.Module):
    """Counts its calls in a buffer, and divides what each layer makes by something of that."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = (
            nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS)),
            nn.Linear(8, 3),
        )
        self.register_buffer("calls", torch.zeros(()))
        self._rule = rule

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self._rule(self, x))
        return result


def _by_buffer(model: _Counting, x: Tensor) -> Tensor:
    model.get_buffer("calls").add_(1)
    for layer in model.layers:
        x = torch.tanh(layer(x)) / (1 + torch.exp(-model.get_buffer("calls")))
    return x


def _by_copy(model: _Counting, x: Tensor) -> Tensor:
    model.get_buffer("calls").add_(1)
    calls = model.get_buffer("calls").clone()
    for layer in model.layers:
        x = torch.tanh(layer(x)) / (1 + torch.exp(-calls))
    return x


def _into_input(model: _Counting, x: Tensor) -> Tensor:
    start = x
    for layer in model.layers:
        x = torch.tanh(layer(x))
    return x + start.mul_(2)


def _into_copy(model: _Counting, x: Tensor) -> Tensor:
    return _into_input(model, x.clone())


def _in_place(model: _Counting, x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for layer in model.layers:
        x = torch.tanh(layer(x))
        total += x
    return total


def _out_of_place(model: _Counting, x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for layer in model.layers:
        x = torch.tanh(layer(x))
        total = total + x
    return total


def _profile(rule: Rule) -> Profile:
    batch = torch.randn(4, 8), torch.randint(0, 3, (4,))
    spec = in_memory(_Counting(rule), example_batch=batch, loss=F.cross_entropy)
    return profile_model(spec, 4, ProfilingOptions(device="cpu", seconds=0.0, repeats=1))


@pytest.mark.parametrize(
    ("rule", "reason", "way_out"),
    [
        (_by_buffer, "they use buffer 'calls', which forward writes", _by_copy),
        (
            _in_place,
            "an operation writes, in place, a value that is made before them",
            _out_of_place,
        ),
    ],
)
def test_the_reason_is_said_and_the_way_out_helps(rule: Rule, reason: str, way_out: Rule) -> None:
    profile = _profile(rule)
    (uncut,) = profile.uncut
    assert uncut.cause.reason == reason
    assert uncut.operations > 0.25 * uncut.of
    ((text, _),) = uncut_notes(profile)
    assert (
        f"of {uncut.of} operations are one layer, 'layers.0', and cannot be cut: {reason}" in text
    )
    assert text in profile_report(profile)
    assert Profile.model_validate_json(profile.model_dump_json()) == profile

    other = _profile(way_out)
    assert not other.uncut
    assert len(other.layers) == LAYERS + 2
    assert "not cut" not in profile_report(other)


@pytest.mark.parametrize(("rule", "is_written"), [(_into_input, True), (_into_copy, False)])
def test_an_input_that_is_written(rule: Rule, is_written: bool) -> None:
    batch = Batch((torch.randn(4, 8),), {}, torch.randint(0, 3, (4,)))
    graph = capture(_Counting(rule), batch, F.cross_entropy)
    reasons = [layer.cause.reason for layer in graph.layers if layer.cause is not None]
    assert ("they use an input of the model, which forward writes" in reasons) == is_written
