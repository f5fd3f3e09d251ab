"""Measuring beside other processes: those that are started to contend, and those that a profile
warns of.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from planner.errors import InputError, WorkerError
from planner.formats.profile import Disturbance, Profile, load_profile, save_profile
from planner.model.options import PLAIN
from planner.model.spec import in_memory, load_model_file
from planner.profiler.measured import step_measurement
from planner.profiler.measured.other_processes import check_processes, contention, disturbance
from planner.profiler.measured.profiling import ProfilingOptions, profile_model
from planner.profiler.step.timing import Effort, StepTimes
from planner.reporting.tables.profile import disturbance_words, profile_report


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


def test_a_busy_machine_is_said(tmp_path: Path) -> None:
    with busy_machine():
        # many turns of the scheduler, of which a process that has just started gets more
        profile = measured(0.5)
    save_profile(profile, tmp_path / "profile.json")
    found = load_profile(tmp_path / "profile.json").provenance.disturbance
    assert found is not None
    assert found.waited_share is not None
    assert found.waited_share > 0.1  # where each core was to be shared by two
    words = disturbance_words(profile)
    assert words is not None
    assert "steps waited" in words
    assert words in profile_report(profile)


def times(forward_s: list[float], thread_share: float = 1.0) -> StepTimes:
    backward_s = [2 * seconds for seconds in forward_s]
    processor = [[thread_share * seconds for seconds in part] for part in (forward_s, backward_s)]
    return StepTimes(forward_s, backward_s, [0.0] * len(forward_s), *processor)


def test_waiting_and_drift() -> None:
    found = disturbance([times([1.0, 1.0, 5.0], 0.9), times([1.2], 0.9)], threads=1)
    assert found.waited_share == pytest.approx(0.1)
    assert found.drift == pytest.approx(0.2)
    assert disturbance([times([1.0])], threads=1) == Disturbance(waited_share=0.0)
    # The first of two threads waits for the second, too.
    assert disturbance([times([1.0], 0.5)], threads=2).waited_share is None


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
    # many turns of the scheduler, of which a process that has just started gets more
    profile = measured(0.5)
    assert profile.whole_step is not None
    assert profile.whole_step.forward_s < 1.0
    assert max(layer.forward_s for layer in profile.layers) < 1.0
    assert profile.provenance.disturbance is not None
    assert profile.provenance.disturbance.drift is not None
    assert profile.provenance.disturbance.drift < 0
    assert "a second measurement took" in (disturbance_words(profile) or "")


def test_a_quiet_machine_needs_no_words() -> None:
    # many turns of the scheduler, of which a process that has just started gets more
    profile = measured(0.5)
    quiet = profile.provenance.model_copy(
        update={"disturbance": Disturbance(waited_share=0.01, drift=-0.02)}
    )
    assert disturbance_words(profile.model_copy(update={"provenance": quiet})) is None
    before = profile.provenance.model_copy(update={"disturbance": None})  # as in older files
    assert disturbance_words(profile.model_copy(update={"provenance": before})) is None


MODEL = """
import torch
from torch import nn
def build_model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
def example_batch(batch_size):
    return (torch.randn(batch_size, 8),), torch.randn(batch_size, 1)
def loss(output, target):
    return ((output - target) ** 2).mean()
"""
needs_two_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one core: no others beside it"
)


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL, encoding="utf-8")
    return path


def children() -> set[int]:
    """Return the processes that this one started and that still run."""
    return set(
        map(
            int, Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split()
        )
    )


def processor_ticks(pid: int) -> int:
    return sum(
        map(
            int,
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:13],
        )
    )


def test_others_work_as_long_as_the_block(model_path: Path) -> None:
    before = children()
    with contention(load_model_file(model_path), 4, 2, options=PLAIN):
        others = sorted(children() - before)
        assert len(others) == 2
        start = [processor_ticks(pid) for pid in others]
        deadline = time.monotonic() + 60
        while any(processor_ticks(pid) <= ticks for pid, ticks in zip(others, start, strict=True)):
            assert time.monotonic() < deadline, "they do nothing"
            time.sleep(0.05)
    assert children() == before


def test_others_end_with_an_error_in_the_block(model_path: Path) -> None:
    before = children()
    with (
        pytest.raises(ZeroDivisionError),
        contention(load_model_file(model_path), 4, 1, options=PLAIN),
    ):
        raise ZeroDivisionError
    assert children() == before


@needs_two_cores
def test_profile_says_how_many_were_at_work(model_path: Path) -> None:
    spec = load_model_file(model_path)
    assert profile_model(spec, 4, ProfilingOptions(seconds=0.1, processes=2)).device.processes == 2
    assert profile_model(spec, 4, ProfilingOptions(seconds=0.1)).device.processes is None


@needs_two_cores
def test_others_train_weights_in_half_precision_as_the_measured_one(model_path: Path) -> None:
    options = ProfilingOptions(seconds=0.1, processes=2, dtype="bfloat16", master_weights=True)
    assert profile_model(load_model_file(model_path), 4, options).device.processes == 2


def test_a_step_that_fails_there_is_told(model_path: Path) -> None:
    spec = load_model_file(model_path)
    model_path.write_text(
        MODEL.replace("(output - target)", "(output - target[:, :0].sum(2))"), encoding="utf-8"
    )
    told = r"process 1, which was to train next to the measured one, failed: .*Dimension"
    with pytest.raises(WorkerError, match=told), contention(spec, 4, 1, options=PLAIN):
        pass


def test_numbers_that_do_not_fit(model_path: Path) -> None:
    spec, cpu = load_model_file(model_path), torch.device("cpu")
    cores = len(os.sched_getaffinity(0))
    check_processes(cores, 1, cpu, spec)
    with pytest.raises(
        InputError, match=f"{cores + 1} processes of 1 threads need {cores + 1} cores"
    ):
        check_processes(cores + 1, 1, cpu, spec)
    with pytest.raises(InputError, match=r"`processes=0` is less than 1"):
        check_processes(0, 1, cpu, spec)
    with pytest.raises(InputError, match="`processes=2` cannot be measured on 'cuda'"):
        check_processes(2, 1, torch.device("cuda"), spec)


@needs_two_cores
def test_a_model_in_memory_cannot_be_loaded_by_others() -> None:
    held = in_memory(torch.nn.Linear(2, 1), example_batch=(torch.ones(1, 2), torch.ones(1, 1)))
    with pytest.raises(InputError, match="in this process's memory"):
        check_processes(2, 1, torch.device("cpu"), held)
