"""Workers that are started to measure the links of this host."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import InputError, WorkerError
from planner.formats.cluster import Cluster, Level
from planner.profiler.links.measure_host import measure_host
from planner.report.tables.cluster import NO_OVERLAP, cluster_report
from planner.workers.place import cores_to_send


@pytest.mark.slow
def test_links_between_workers_of_this_host() -> None:
    cluster = measure_host(2, "cpu")
    assert cluster.backend == "gloo"
    (level,) = cluster.levels
    assert level.size == 2
    assert cluster.overlap == cores_to_send(2)
    assert level.bandwidth_bytes_per_s > 1e6


@pytest.mark.slow
def test_nothing_is_left_running_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # its name is in the command line of every process
    monkeypatch.setattr("planner.profiler.links.measure_host._LIMIT_S", 4.0)
    with pytest.raises(WorkerError, match="not measured within 4 s"):
        measure_host(2, "cpu")
    command_lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in command_lines if str(tmp_path).encode() in line]


def test_what_the_workers_refuse_is_told() -> None:
    with pytest.raises(InputError, match=r"`backend=nccl` sends from GPUs.*\nhint: leave out `backend`"):
        measure_host(2, "cpu", "nccl")


def test_a_core_for_each_worker_leaves_none_to_send_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    assert cores_to_send(2)
    assert not cores_to_send(3)
    level = Level(size=3, bandwidth_bytes_per_s=1e9)
    assert NO_OVERLAP in cluster_report(Cluster(levels=(level,), overlap=False))
    assert NO_OVERLAP not in cluster_report(Cluster(levels=(level,)))
