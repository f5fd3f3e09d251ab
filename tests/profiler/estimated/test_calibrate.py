"""Calibration finds the shares that a device achieves from a profile measured on it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.errors import InputError
from planner.formats.profile import Profile, save_profile
from planner.model.spec import load_model_file
from planner.profiler.estimated.calibrate import calibrated, fit, load_calibration, scaled
from planner.profiler.estimated.devices import COMPUTE_CLASSES, DEVICES, DeviceSpec
from planner.profiler.estimated.estimate import EstimateOptions, estimate_profile, profile_of_trace
from planner.profiler.estimated.execution import Execution
from planner.profiler.estimated.trace import trace_step
from planner.profiler.measured.profiling import ProfilingOptions, profile_model

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


def as_measured(profile: Profile) -> Profile:
    provenance = profile.provenance.model_copy(update={"source": "measured"})
    return profile.model_copy(update={"provenance": provenance})


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


def test_the_profile_names_what_it_is_calibrated_on(folder: Path) -> None:
    training_spec = load_model_file(folder / "model.py")
    measured = profile_model(training_spec, 8, ProfilingOptions(seconds=0.05, repeats=3))
    save_profile(measured, folder / "cpu.json")
    profile = estimate_profile(
        training_spec,
        16,
        EstimateOptions(device="cpu", calibration=load_calibration(folder / "cpu.json")),
    )
    assert profile.device.name.endswith(f"calibrated on {folder.name}")
    assert profile.device.memory_bytes == measured.device.memory_bytes
    assert profile.provenance.source == "estimated"


def test_without_profiles_the_table_stands() -> None:
    spec: DeviceSpec = DEVICES["h100"]
    assert calibrated(spec, [], "float32") is spec


def test_profiles_that_say_nothing_about_the_device(folder: Path) -> None:
    training_spec = load_model_file(folder / "model.py")
    estimated = estimate_profile(training_spec, 8, EstimateOptions(device="cpu"))
    save_profile(estimated, folder / "estimated.json")
    with pytest.raises(InputError, match=r"estimated\.json' is estimated, not measured"):
        load_calibration(folder / "estimated.json")
    save_profile(as_measured(estimated), folder / "cpu.json")
    calibration = load_calibration(folder / "cpu.json")
    with pytest.raises(InputError, match="cannot calibrate NVIDIA"):
        estimate_profile(training_spec, 8, EstimateOptions(device="v100", calibration=calibration))
    (folder / "model.py").write_text(MODEL.replace("2048, 2048", "2048, 1024"))
    with pytest.raises(InputError, match=r"not of the model in '.*model\.py'"):
        estimate_profile(
            training_spec,
            8,
            EstimateOptions(device="cpu", calibration=load_calibration(folder / "cpu.json")),
        )


def steps_of(
    folder: Path, truth: DeviceSpec, sizes: tuple[int, ...], factors: tuple[float, ...] = (1.0,)
) -> Path:
    """Write steps of these batch sizes, as long as they take on the device, times the factors."""
    steps = list[dict[str, object]]()
    for size in sizes:
        trace = trace_step(load_model_file(folder / "model.py"), size, execution=Execution("cuda"))
        parts = [sum(part) for part in trace.layer_seconds(truth)]
        for factor in factors:
            names = ("forward_s", "backward_s", "update_s")
            times = {name: seconds * factor for name, seconds in zip(names, parts, strict=True)}
            steps.append({"model": "model.py", "batch_size": size, **times})
    (folder / "steps.json").write_text(json.dumps({"schema_version": 1, "steps": steps}))
    return folder / "steps.json"


def test_whole_steps_tell_two_factors(folder: Path) -> None:
    """The table's shares are a guess that weighs as much as a step within 16% does, so nothing is
    recovered exactly.
    """
    truth, training_spec = scaled(DEVICES["l4"], 0.8, 1.25), load_model_file(folder / "model.py")
    calibration = load_calibration(steps_of(folder, truth, (2048, 4096, 8192)))
    fitted = calibrated(DEVICES["l4"], calibration, "float32", training_spec)
    assert fitted.name.endswith(f"calibrated on {folder.name}")
    trace = trace_step(training_spec, 4096, execution=Execution("cuda"))
    measured, table, close = (
        sum(map(sum, trace.layer_seconds(spec))) for spec in (truth, DEVICES["l4"], fitted)
    )
    assert abs(close / measured - 1) < 0.03 < abs(table / measured - 1)
    share = fitted.achieved_arithmetic["gemm"] / DEVICES["l4"].achieved_arithmetic["gemm"]
    assert share == pytest.approx(0.8, rel=0.05)
    # They are all of one model, which cannot say whether they help with another.
    other = calibrated(DEVICES["l4"], calibration, "float32")
    assert other.name.endswith("not calibrated: that takes steps of 3 models")
    assert other.achieved_arithmetic == DEVICES["l4"].achieved_arithmetic


def test_repeated_steps_are_no_evidence(folder: Path) -> None:
    truth, training_spec = scaled(DEVICES["l4"], 0.8, 1.25), load_model_file(folder / "model.py")
    calibration = load_calibration(steps_of(folder, truth, (2048, 4096), (1.0, 1.0)))
    fitted = calibrated(DEVICES["l4"], calibration, "float32", training_spec)
    assert fitted.name.endswith("not calibrated: that takes steps of 3 batch sizes")


# Each tells another clock; or one is slow, which helps with none of the others.
@pytest.mark.parametrize("factors", [(0.7, 1 / 0.7, 1.0), (1.9, 1.0, 1.0)])
def test_steps_that_contradict_each_other_are_declined(
    folder: Path, factors: tuple[float, ...]
) -> None:
    training_spec, steps = load_model_file(folder / "model.py"), []
    for size, factor in zip((2048, 4096, 8192), factors, strict=True):
        trace = trace_step(training_spec, size, execution=Execution("cuda"))
        seconds = sum(map(sum, trace.layer_seconds(DEVICES["l4"])))
        steps.append({"model": "model.py", "batch_size": size, "step_s": seconds * factor})
    (folder / "steps.json").write_text(json.dumps({"schema_version": 1, "steps": steps}))
    fitted = calibrated(
        DEVICES["l4"], load_calibration(folder / "steps.json"), "float32", training_spec
    )
    assert fitted.name.endswith("not calibrated: known steps do not predict each other any better")
    assert fitted.achieved_arithmetic == DEVICES["l4"].achieved_arithmetic


def test_steps_that_say_nothing(folder: Path) -> None:
    path = folder / "steps.json"
    path.write_text(
        json.dumps({"schema_version": 1, "steps": [{"model": "model.py", "batch_size": 4}]})
    )
    with pytest.raises(InputError, match="none of step_s, forward_s"):
        load_calibration(path)
    path.write_text(
        json.dumps(
            {
                "schema_version": 1,
                "steps": [
                    {"model": "model.py", "batch_size": 4, "fusion": "compiler", "step_s": 1.0}
                ],
            }
        )
    )
    with pytest.raises(InputError, match=r"'model\.py' ran on a GPU"):
        calibrated(DEVICES["cpu"], load_calibration(path), "float32")
