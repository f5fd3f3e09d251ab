"""Peaks of memory: on the CPU as measured, on a GPU from a pretended device."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from planner.executor.observe.memory import PeakMemory
from planner.profiler.this_machine import describe_device
from planner.reporting.tables.runs import workers_table
from planner.workers.job import WorkerReport

GB = 10**9


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU of 40 GB: 30 reserved, 1 for the context and communicators."""
    for name, value in {
        "reset_peak_memory_stats": None,
        "memory_stats": {
            "requested_bytes.all.current": 10 * GB,
            "requested_bytes.all.peak": 28 * GB,
        },
        "max_memory_reserved": 30 * GB,
        "memory_reserved": 30 * GB,
        "mem_get_info": (9 * GB, 40 * GB),
        "get_device_properties": SimpleNamespace(name="pretended", total_memory=40 * GB),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    return torch.device("cuda", 0)


def test_memory_in_use_grows_with_what_is_held() -> None:
    # A process of its own, because threads that other tests left behind free memory at any time.
    grown = """
import torch
from planner.executor.observe.memory import PeakMemory
peak = PeakMemory(torch.device("cpu"), already_bytes=10**9)
held = torch.ones(50_000_000 // 4)
print(peak.now_bytes() - 10**9)
"""
    done = subprocess.run(
        [sys.executable, "-c", grown], capture_output=True, text=True, check=True, timeout=60
    )
    assert 45_000_000 <= int(done.stdout) < 80_000_000


def test_a_gpus_peaks_are_allocated_reserved_and_used(gpu: torch.device) -> None:
    peak = PeakMemory(gpu, already_bytes=2 * GB)
    assert peak.bytes() == 20 * GB
    assert peak.fields() == {
        "peak_memory_bytes": 20 * GB,
        "reserved_memory_bytes": 30 * GB,
        "used_memory_bytes": 31 * GB,
    }


def test_a_cpus_peak_is_one_number() -> None:
    peak = PeakMemory(torch.device("cpu"), already_bytes=5)
    (found,) = peak.fields().items()
    assert found[0] == "peak_memory_bytes"
    assert found[1] >= 5


def test_the_profile_knows_the_context_unless_others_use_the_gpu(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert describe_device(gpu, 1, 1).context_bytes == 1 * GB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 * GB, 40 * GB))
    assert describe_device(gpu, 1, 1).context_bytes is None


def test_the_table_tells_what_a_gpu_holds_where_there_is_one() -> None:
    fields = {"rank": 0, "stage": 0, "busy_share": 1.0, "samples_per_s": 1.0, "weight_versions": 1}
    memory = {"peak_memory_bytes": 20 * GB, "predicted_memory_bytes": 21 * GB}
    on_cpu = WorkerReport.model_validate(fields | memory)
    on_gpu = on_cpu.model_copy(
        update={"reserved_memory_bytes": 30 * GB, "used_memory_bytes": 31 * GB}
    )
    assert "used of the GPU" not in workers_table([on_cpu])
    heading, *_, row = workers_table([on_gpu]).splitlines()
    assert heading.split()[-7:] == ["reserved", "used", "of", "the", "GPU", "weight", "versions"]
    assert row.split()[-7:] == ["20", "GB", "30", "GB", "31", "GB", "1"]
