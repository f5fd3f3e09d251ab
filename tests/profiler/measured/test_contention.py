"""Measuring while other processes contend for the machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from planner.errors import InputError, WorkerError
from planner.model.options import PLAIN
from planner.model.spec import in_memory, load_model_file
from planner.profiler.measured.contention import check_processes, contention
from planner.profiler.measured.profile import ProfilingOptions, profile_model

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
needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: no others beside it")


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL, encoding="utf-8")
    return path


def children() -> set[int]:
    """Return the processes that this one started and that still run."""
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split()))


def processor_ticks(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]))


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
    with pytest.raises(ZeroDivisionError), contention(load_model_file(model_path), 4, 1, options=PLAIN):
        raise ZeroDivisionError
    assert children() == before


@needs_two_cores
def test_profile_says_how_many_were_at_work(model_path: Path) -> None:
    spec = load_model_file(model_path)
    assert profile_model(spec, 4, ProfilingOptions(seconds=0.1, processes=2)).device.processes == 2
    assert profile_model(spec, 4, ProfilingOptions(seconds=0.1)).device.processes is None


def test_a_step_that_fails_there_is_told(model_path: Path) -> None:
    spec = load_model_file(model_path)
    model_path.write_text(MODEL.replace("(output - target)", "(output - target[:, :0].sum(2))"), encoding="utf-8")
    told = r"process 1, which was to train beside the measured one, failed: .*Dimension"
    with pytest.raises(WorkerError, match=told), contention(spec, 4, 1, options=PLAIN):
        pass


def test_numbers_that_do_not_fit(model_path: Path) -> None:
    spec, cpu = load_model_file(model_path), torch.device("cpu")
    cores = len(os.sched_getaffinity(0))
    check_processes(cores, 1, cpu, spec)
    with pytest.raises(InputError, match=f"{cores + 1} processes of 1 threads need {cores + 1} cores"):
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
