"""What a profile says of the machine that it was measured on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from planner.formats.profile import Disturbance, Profile, load_profile, save_profile
from planner.model.spec import in_memory
from planner.profiler.measured import step_measurement
from planner.profiler.measured.disturbance import OtherProcesses, disturbance
from planner.profiler.measured.profile import ProfilingOptions, profile_model
from planner.profiler.measured.steps import Effort, StepTimes
from planner.report.tables.profile import disturbance_words, profile_report

on_linux = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the system does not tell who uses its cores")


@contextmanager
def busy_machine() -> Iterator[None]:
    """Let a process spin for each core."""
    spinning = [sys.executable, "-S", "-c", "print(flush=True)\nwhile True: pass"]
    with ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            process = stack.enter_context(subprocess.Popen(spinning, stdout=subprocess.PIPE))
            stack.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()
        yield


def measured(seconds: float) -> Profile:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    spec = in_memory(model, example_batch=(torch.ones(1, 256), torch.ones(1, 4)), loss=nn.MSELoss())
    return profile_model(spec, 64, ProfilingOptions(device="cpu", seconds=seconds))


@on_linux
def test_a_busy_machine_is_said(tmp_path: Path) -> None:
    with busy_machine():
        profile = measured(0.1)
    save_profile(profile, tmp_path / "profile.json")
    found = load_profile(tmp_path / "profile.json").provenance.disturbance
    assert found is not None
    assert found.others_cores is not None
    assert found.others_cores > 0.5  # of the two at least that were to spin
    words = disturbance_words(profile)
    assert words is not None
    assert "other processes used" in words
    assert words in profile_report(profile)


@on_linux
def test_own_work_is_no_disturbance() -> None:
    company = OtherProcesses(10**6)  # more than there can be: whatever others do, nothing is left
    assert company.cores() == 0.0


def times(forward_s: list[float], thread_share: float = 1.0) -> StepTimes:
    backward_s = [2 * seconds for seconds in forward_s]
    processor = [[thread_share * seconds for seconds in part] for part in (forward_s, backward_s)]
    return StepTimes(forward_s, backward_s, [0.0] * len(forward_s), *processor)


def test_waiting_and_drift() -> None:
    found = disturbance([times([1.0, 1.0, 5.0], 0.9), times([1.2], 0.9)], 0.0, threads=1)
    assert found.waited_share == pytest.approx(0.1)
    assert found.drift == pytest.approx(0.2)
    assert disturbance([times([1.0])], None, threads=1) == Disturbance(waited_share=0.0)
    # The first of two threads waits for the second, too.
    assert disturbance([times([1.0], 0.5)], None, threads=2).waited_share is None


def test_the_quieter_of_two_measurements_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    original = step_measurement.StepMeasurement._measure_steps

    def disturbed(
        self: step_measurement.StepMeasurement, effort: Effort, phase: str = "measuring"
    ) -> tuple[list[StepTimes], StepTimes]:
        layers, whole = original(self, effort, phase)
        if phase == "measuring":  # something else has the core for a second in each step
            for each in (*layers, whole):
                each.forward_s = [seconds + 1.0 for seconds in each.forward_s]
        return layers, whole

    monkeypatch.setattr(step_measurement.StepMeasurement, "_measure_steps", disturbed)
    profile = measured(0.1)
    assert profile.whole_step is not None
    assert profile.whole_step.forward_s < 1.0
    assert max(layer.forward_s for layer in profile.layers) < 1.0
    assert profile.provenance.disturbance is not None
    assert profile.provenance.disturbance.drift is not None
    assert profile.provenance.disturbance.drift < 0
    assert "a second measurement took" in (disturbance_words(profile) or "")


def test_a_quiet_machine_needs_no_words() -> None:
    profile = measured(0.1)
    quiet = profile.provenance.model_copy(
        update={"disturbance": Disturbance(waited_share=0.01, others_cores=0.2, drift=-0.02)}
    )
    assert disturbance_words(profile.model_copy(update={"provenance": quiet})) is None
    before = profile.provenance.model_copy(update={"disturbance": None})  # as in older files
    assert disturbance_words(profile.model_copy(update={"provenance": before})) is None
