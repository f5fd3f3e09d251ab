"""`plan solve --run` after runs of two real workers: it finds the slow device and the slow link."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import planner
from benchmarks.netns import INTERFACE, NetworkUnavailableError, shaped_network
from planner.formats.cluster import flat_cluster
from planner.options.training import DriftOptions, RunOptions
from planner.workers.job import Job
from tests.cli.in_process import plan
from tests.executor.processes import run_jobs
from tests.executor.sleeping import (
    sleeping_plan,
    sleeping_profile,
    slow_down,
    write_sleeping,
)

TIMEOUT_S = 240
PORT = 29517
RATE = "40mbit"
RATE_BYTES_PER_S = 5e6
MESSAGE_BYTES = 256_000


def write_plan(folder: Path, bytes_per_s: float, length: int = 1) -> Path:
    """Write a model, its profile and a plan "1-1"; return the model's path."""
    path = write_sleeping(folder, length=length)
    profile = sleeping_profile(path)
    planner.save_profile(profile, folder / "profile.json")
    cluster = flat_cluster(2, bytes_per_s)
    solved = sleeping_plan(profile, (1, 1), "1f1b-flush", 6, cluster)
    planner.save_plan(solved, folder / "plan.json")
    return path


def solved_again(folder: Path) -> tuple[planner.Plan, str]:
    """Return the plan for the cluster that the run measured, and what was said of it."""
    done = plan("solve", "--run", "run.json", "-o", "next.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    return planner.load_plan(folder / "next.json"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("slow", [0, 1])
def test_the_slow_one_of_two_workers_is_found(tmp_path: Path, slow: int) -> None:
    path = write_plan(tmp_path, 1e9)
    slow_down(tmp_path, [(slow, 0, 10**9, 2.5)])
    job = Job(
        model=str(path),
        plan=planner.load_plan(tmp_path / "plan.json"),
        steps=20,
        drift=DriftOptions(drift_window=0),
        run_options=RunOptions(trace="run.json", trace_minibatches=15),
    )
    run_jobs([job], tmp_path)
    (tmp_path / "job-0.json.timeline").rename(tmp_path / "run.json")

    after, said = solved_again(tmp_path)

    speeds = [after.cluster.kind_of(rank).speed for rank in range(2)]
    assert speeds[slow] == pytest.approx(1 / 2.5, rel=0.3)
    assert speeds[1 - slow] > 1.6 * speeds[slow]
    assert f"worker {slow} (stage {slow}) takes" in said
    # It gets one of the four layers.
    layers = {stage.ranks: len(stage.layers) for stage in after.stages}
    assert layers.get((slow,), 0) <= 2 < layers[1 - slow,]


def train_on_two_hosts(folder: Path, arguments: Sequence[str]) -> None:
    """Run `plan train` on two hosts whose links have `RATE`."""
    try:
        with shaped_network(2, burst="16kb") as net:
            net.shape(RATE)
            hosts = net.hosts
            started = []
            for index, host in enumerate(hosts):
                variables = [
                    f"RANK={index}",
                    "WORLD_SIZE=2",
                    f"MASTER_ADDR={hosts[0].address}",
                    f"MASTER_PORT={PORT}",
                ]
                command = ["env", *variables, sys.executable, "-m", "planner", "train", *arguments]
                started.append(
                    host.popen(
                        [*command, "--interface", INTERFACE],
                        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())},
                        cwd=folder,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                    )
                )
            for process in started:
                output, _ = process.communicate(timeout=TIMEOUT_S)
                assert process.returncode == 0, output
    except NetworkUnavailableError as cause:
        pytest.skip(f"no network namespaces here: {cause}")


@pytest.mark.slow
def test_a_shaped_link_is_found(tmp_path: Path) -> None:
    path = write_plan(tmp_path, 1e9, length=MESSAGE_BYTES // 256)
    train_on_two_hosts(tmp_path, (path.name, "--steps", "20", "--trace", "run.json"))

    after, said = solved_again(tmp_path)

    (level,) = after.cluster.levels
    assert level.bandwidth_bytes_per_s == pytest.approx(RATE_BYTES_PER_S, rel=0.35)
    assert "was planned" in said.partition("links carry ")[2]
