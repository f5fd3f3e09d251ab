"""A fit finds the shares that a device achieves from what was measured on it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu_truth.fit_device import Timed, fit, fit_times, scaled
from planner.model.spec import load_model_file
from planner.profiler.estimated.devices import COMPUTE_CLASSES, DEVICES, DeviceSpec
from planner.profiler.estimated.estimate import profile_of_trace
from planner.profiler.estimated.execution import Execution
from planner.profiler.estimated.trace import StepTrace, trace_step

# Products of many sizes, so that each of arithmetic, memory and launches limits some of them.
MODEL = """
import torch
from torch import nn

def build_model():
    widths = [64, 2048, 2048, 256, 4096, 32, 1024, 1024, 16]
    layers = []
    for before, after in zip(widths, widths[1:]):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers)

def example_batch(batch_size):
    return torch.randn(batch_size, 64), torch.randint(0, 16, (batch_size,))

def loss(output, target):
    return nn.functional.cross_entropy(output, target)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def test_known_shares_are_recovered(folder: Path) -> None:
    table = DEVICES["cpu"]
    truth = replace(
        table,
        achieved_arithmetic={**table.achieved_arithmetic, "gemm": 0.21},
        achieved_bandwidth={
            **table.achieved_bandwidth,
            "gemm": 0.83,
            "pointwise": 0.4,
            "update": 0.7,
        },
        launch_s=2.5e-5,
    )
    training_spec = load_model_file(folder / "model.py")
    trace = trace_step(training_spec, 64)
    fitted = fit(table, [(trace, profile_of_trace(trace, truth))])
    assert fitted.achieved_arithmetic["gemm"] == pytest.approx(0.21, rel=0.03)
    assert fitted.achieved_bandwidth["pointwise"] == pytest.approx(0.4, rel=0.1)
    assert fitted.achieved_bandwidth["update"] == pytest.approx(0.7, rel=0.03)
    assert fitted.launch_s == pytest.approx(2.5e-5, rel=0.03)
    assert totals(trace.layer_seconds(fitted)) == pytest.approx(
        totals(trace.layer_seconds(truth)), rel=0.02
    )
    # no profile depends on it
    assert fitted.achieved_arithmetic["attention"] == table.achieved_arithmetic["attention"]


def totals(times: tuple[list[float], list[float], list[float]]) -> list[float]:
    return [float(np.sum(part)) for part in times]


def test_noise_does_not_lead_it_astray(folder: Path) -> None:
    truth = replace(
        DEVICES["cpu"], launch_s=1e-4, achieved_arithmetic=dict.fromkeys(COMPUTE_CLASSES, 0.05)
    )
    training_spec = load_model_file(folder / "model.py")
    trace = trace_step(training_spec, 64)
    measured = profile_of_trace(trace, truth)
    noise = np.random.default_rng(0).lognormal(0, 0.1, len(measured.layers))
    layers = tuple(
        layer.model_copy(
            update={
                "forward_s": layer.forward_s * float(factor),
                "backward_s": layer.backward_s / float(factor),
            }
        )
        for layer, factor in zip(measured.layers, noise, strict=True)
    )
    fitted = fit(DEVICES["cpu"], [(trace, measured.model_copy(update={"layers": layers}))])
    assert totals(trace.layer_seconds(fitted)) == pytest.approx(
        totals(trace.layer_seconds(truth)), rel=0.1
    )


def steps_of(
    folder: Path, truth: DeviceSpec, factors: tuple[float, ...] = (1.0, 1.0, 1.0)
) -> list[list[Timed]]:
    """Return steps of several batch sizes, as long as they take on the device, times the factors;
    each size is a group.
    """
    training_spec = load_model_file(folder / "model.py")
    groups = []
    for size, factor in zip((2048, 4096, 8192), factors, strict=False):
        trace = trace_step(training_spec, size, execution=Execution("cuda"))
        sums = [partial(_sum_of, trace, part) for part in range(3)]
        groups.append([Timed(factor * estimated_s(truth), estimated_s) for estimated_s in sums])
    return groups


def _sum_of(trace: StepTrace, part: int, spec: DeviceSpec) -> float:
    return sum(trace.layer_seconds(spec)[part])


def test_whole_steps_tell_two_factors(folder: Path) -> None:
    """The table's shares are a guess that weighs as much as a step within 16% does, so nothing is
    recovered exactly.
    """
    table = DEVICES["l4"]
    truth = scaled(table, 0.8, 1.25)
    fitted = fit_times(table, steps_of(folder, truth))
    assert fitted is not None
    trace = trace_step(load_model_file(folder / "model.py"), 4096, execution=Execution("cuda"))
    measured, before, close = (
        sum(map(sum, trace.layer_seconds(spec))) for spec in (truth, table, fitted)
    )
    assert abs(close / measured - 1) < 0.03 < abs(before / measured - 1)
    share = fitted.achieved_arithmetic["gemm"] / table.achieved_arithmetic["gemm"]
    assert share == pytest.approx(0.8, rel=0.05)


def test_two_groups_are_no_evidence(folder: Path) -> None:
    groups = steps_of(folder, scaled(DEVICES["l4"], 0.8, 1.25), (1.0, 1.0))
    assert fit_times(DEVICES["l4"], groups) is None


# Each tells another clock; or one is slow, which helps with none of the others.
@pytest.mark.parametrize("factors", [(0.7, 1 / 0.7, 1.0), (1.9, 1.0, 1.0)])
def test_steps_that_contradict_each_other_are_declined(
    folder: Path, factors: tuple[float, ...]
) -> None:
    groups = steps_of(folder, DEVICES["l4"], factors)
    assert fit_times(DEVICES["l4"], groups) is None
