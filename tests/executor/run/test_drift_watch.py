"""Real workers whose devices become slower: the run says so, once, and what another plan would
give.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import planner
from planner.executor.run.drift_watch import DriftWatch
from planner.formats.drift import Drift
from planner.formats.profile import save_profile
from planner.formats.timeline import load_timeline
from planner.options.training import DriftOptions, RunOptions
from planner.workers.job import Job
from tests.executor.processes import run_jobs, run_workers
from tests.executor.sleeping import (
    BATCH_SIZE,
    WIDTH,
    sleeping_plan,
    sleeping_profile,
    slow_down,
    write_sleeping,
)

# Enough that a pipeline pays on devices of which one is much slower.
CASES = [("1f1b-flush", 6, 10), ("1f1b", 1, 30)]  # schedule, microbatches, window


def job_of(folder: Path, windows: int, schedule: str, microbatches: int, window: int) -> Job:
    path = write_sleeping(folder)
    profile = sleeping_profile(path)
    save_profile(profile, folder / "profile.json")
    return Job(
        model=str(path),
        plan=sleeping_plan(profile, (1, 1), schedule, microbatches),
        steps=windows * window + 5,
        drift=DriftOptions(drift_window=window, profile=str(folder / "profile.json")),
        run_options=RunOptions(trace=str(folder / "run.json"), trace_minibatches=5),
    )


@pytest.mark.slow  # beside other tests devices are not as planned
@pytest.mark.parametrize(("schedule", "microbatches", "window"), CASES)
def test_a_slow_device_is_told_with_a_better_plan(
    tmp_path: Path, schedule: str, microbatches: int, window: int
) -> None:
    job = job_of(tmp_path, 10, schedule, microbatches, window)
    slow_from = 2 * microbatches * int(1.5 * window)  # forwards of two layers
    slow_down(tmp_path, [(1, slow_from, 10**9, 2.5)])

    (result,) = run_jobs([job], tmp_path)

    drift = result.drift[0]  # a busy machine may slow down the other one later
    slow = next(worker for worker in drift.workers if worker.rank == 1)
    assert slow.stage == 1
    assert 1.8 < slow.ratio < 3.5
    assert window <= drift.since <= 2 * window
    assert drift.why_not == ""
    assert drift.expected_samples_per_s is not None
    assert drift.expected_samples_per_s < drift.planned_samples_per_s
    assert drift.better_samples_per_s is not None
    assert drift.better_samples_per_s > drift.expected_samples_per_s
    trace = load_timeline(tmp_path / "job-0.json.timeline")
    assert trace.drift[0] == str(drift)
    assert str(drift) in (tmp_path / "workers.log").read_text("utf-8")


@pytest.mark.slow  # as above
def test_devices_as_planned_are_not_told_of(tmp_path: Path) -> None:
    (result,) = run_jobs([job_of(tmp_path, 6, *CASES[0])], tmp_path)
    assert not result.drift


def test_without_a_window_nothing_is_watched(tmp_path: Path) -> None:
    job = job_of(tmp_path, 2, "1f1b-flush", 2, 10)
    slow_down(tmp_path, [(1, 0, 10**9, 2.5)])
    unwatched = job.model_copy(update={"drift": DriftOptions(drift_window=0)})
    (result,) = run_jobs([unwatched], tmp_path)
    assert not result.drift


def test_windows_that_pass_beside_a_search_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search takes time from the workers of its host, which then look slow."""
    watch = DriftWatch.__new__(DriftWatch)
    watch._ending = threading.Event()
    watch._due = deque([3, 4, 5, 6])
    watch._undisturbed_from = 0
    looked: list[int] = []

    def look(_judge: object, told: Sequence[Any]) -> None:
        looked.append(told[0])
        if told[0] == 3:
            watch._undisturbed_from = 6  # as a search does that ends in window 5

    monkeypatch.setattr(watch, "_all_told", lambda number: [number])
    monkeypatch.setattr(watch, "_look", look)
    watch._judge_all_told(None)  # type: ignore[arg-type]
    assert looked == [3, 6]
    assert not watch._due


def run_loop(arguments: Sequence[str]) -> None:
    """Train in a loop of one's own, and write what was found, once something was."""
    job_path, answer = arguments
    job = Job.model_validate_json(Path(job_path).read_text("utf-8"))
    assert job.steps is not None
    drawn = torch.Generator().manual_seed(0)
    shape = (BATCH_SIZE * job.plan.microbatches, 1, WIDTH)
    window, profile = job.drift.drift_window, job.drift.profile
    with planner.pipeline(job.plan, job.model, drift_window=window, profile=profile) as pipeline:
        assert pipeline.drift() is None
        for _ in range(job.steps):
            sample = torch.randn(shape, generator=drawn)
            pipeline.step(((sample,), sample))
        deadline = time.monotonic() + 60
        while (found := pipeline.drift()) is None and time.monotonic() < deadline:
            time.sleep(0.1)
    text = "" if found is None else found.model_dump_json()
    Path(f"{answer}-{os.environ['RANK']}").write_text(text, encoding="utf-8")


def test_all_workers_of_a_loop_of_ones_own_are_told(tmp_path: Path) -> None:
    job = job_of(tmp_path, 6, *CASES[0])
    slow_down(tmp_path, [(1, 0, 10**9, 2.5)])
    path = tmp_path / "job.json"
    path.write_text(job.model_dump_json(), encoding="utf-8")

    run_workers(run_loop, [str(path), str(tmp_path / "found")], tmp_path / "workers.log", 2)

    first, second = ((tmp_path / f"found-{rank}").read_text("utf-8") for rank in range(2))
    assert first == second
    # Beside other tests the first device may count as slow before the second one does.
    assert Drift.model_validate_json(first).workers
