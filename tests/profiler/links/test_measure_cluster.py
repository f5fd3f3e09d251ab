"""Links between real processes, on one machine and between network namespaces with shaped links."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.netns import NetworkUnavailableError, network
from planner.cli.main import main
from planner.cost.network.topology import Topology
from planner.errors import InputError, WorkerError
from planner.formats.cluster import Cluster, Level, load_cluster
from planner.formats.plan import load_plan
from planner.profiler.links.levels import pairs_by_turn
from planner.profiler.links.measure_cluster import measure_cluster, measure_host
from planner.reporting.tables.plan import cluster_line
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
def test_nothing_is_left_running_when_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # its name is in the command line of every process
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(WorkerError, match="not measured within 4 s"):
        measure_host(2, "cpu", limit_s=4.0)
    command_lines = [
        path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()
    ]
    assert not [line for line in command_lines if str(tmp_path).encode() in line]


def test_what_the_workers_refuse_is_told() -> None:
    with pytest.raises(
        InputError, match=r"`backend=nccl` sends from GPUs.*\nhint: leave out `backend`"
    ):
        measure_host(2, "cpu", "nccl")


def test_a_core_for_each_worker_leaves_none_to_send_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    assert cores_to_send(2)
    assert not cores_to_send(3)
    level = Level(size=3, bandwidth_bytes_per_s=1e9)
    assert "take time from computation" in cluster_line(Cluster(levels=(level,), overlap=False))
    assert "take time from computation" not in cluster_line(Cluster(levels=(level,)))


TIMEOUT_S = 280  # it took 90 s beside other tests
COMMAND = [sys.executable, "-m", "planner", "profile", "--links", "-o"]
# What the command does, with the least that says something: its default takes 30 s of a core.
BRIEF = [
    sys.executable,
    "-c",
    """
import sys
from planner.formats.cluster import save_cluster
from planner.profiler.links.measure_cluster import measure_cluster
cluster = measure_cluster(
    budget_s=2.0,
    announce=lambda workers, seconds: print(
        f"measuring the links between {workers} workers takes about {seconds:.0f} s"
    ),
)
if cluster is not None:
    save_cluster(cluster, sys.argv[1])
""",
]


def _environment(
    rank: int, hosts: int, workers: int, master: str, port: int, interface: str
) -> dict[str, str]:
    """Return the variables that torchrun sets."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(hosts * workers),
        "LOCAL_RANK": str(rank % workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _finish(workers: list[subprocess.Popen[str]]) -> None:
    """Wait for all, of which the first one says beforehand how long the measurement takes."""
    try:
        for rank, worker in enumerate(workers):
            output, _ = worker.communicate(timeout=TIMEOUT_S)
            assert worker.returncode == 0, output
            announced = f"measuring the links between {len(workers)} workers takes about "
            assert (announced in output) == (rank == 0)
    finally:
        for worker in workers:
            worker.kill()


@pytest.mark.parametrize(("hosts", "workers"), [(1, 2), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_links_on_this_machine(
    hosts: int, workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two "hosts" of two workers each give two levels, and `plan solve` takes the file."""
    path = tmp_path / "cluster.json"
    port = _free_port()
    with ExitStack() as stack:
        _finish(
            [
                stack.enter_context(
                    subprocess.Popen(
                        [*(BRIEF if hosts == 1 else COMMAND), str(path)],
                        env=os.environ
                        | _environment(rank, hosts, workers, "127.0.0.1", port, "lo"),
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        text=True,
                    )
                )
                for rank in range(hosts * workers)
            ]
        )
    cluster = load_cluster(path)
    assert cluster.backend == "gloo"
    assert cluster.overlap == cores_to_send(workers)
    assert [level.size for level in cluster.levels] == ([2] if hosts == 1 else [2, 2])
    if hosts > 1:
        inner, outer = cluster.levels
        assert inner.one_ring_bandwidth_bytes_per_s is None
        one_ring = outer.one_ring_bandwidth_bytes_per_s or 0
        assert 1e6 < one_ring <= (outer.all_reduce_bandwidth_bytes_per_s or 0)
    for level in cluster.levels:
        assert 1e7 < level.bandwidth_bytes_per_s < 1e12
        assert 1e6 < (level.all_reduce_bandwidth_bytes_per_s or 0) < 1e12
        assert 0 < level.latency_s < 1
        assert level.latency_s <= (level.sum_latency_s or 0) < 1
        assert 1e6 < (level.sum_bandwidth_bytes_per_s or 0) < 1e12
        assert level.sum_wait_share is not None
        assert 0 <= (level.sum_wait_s or 0) < 1
        assert 0 <= (level.gather_latency_s or 0) < 1
        assert 0 <= (level.scatter_latency_s or 0) < 1
        assert 1e6 < (level.gather_bandwidth_bytes_per_s or 0) < 1e12
        assert 1e6 < (level.scatter_bandwidth_bytes_per_s or 0) < 1e12
    assert [each.codec for each in cluster.codec_times] == ["bfloat16", "int8"]
    assert all(0 < each.s_per_byte < 1e-6 for each in cluster.codec_times)
    profile = str(Path(__file__).parents[3] / "profiles" / "vgg16" / "cpu.json")
    plan = str(tmp_path / "plan.json")
    assert main(["solve", "--profile", profile, "--cluster", str(path), "-o", plan]) == 0
    assert "vgg16" in capsys.readouterr().out


@pytest.mark.slow
def test_links_between_hosts(tmp_path: Path) -> None:
    """Two hosts of two workers on links of 200 Mbit/s: the workers of a host share its link."""
    path = tmp_path / "cluster.json"
    try:
        with network(2, "200mbit") as hosts, ExitStack() as stack:
            _finish(
                [
                    stack.enter_context(
                        hosts[rank // 2].popen(
                            [*COMMAND, str(path)],
                            env=_environment(rank, 2, 2, hosts[0].address, 29511, "eth0"),
                            stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT,
                        )
                    )
                    for rank in range(4)
                ]
            )
    except NetworkUnavailableError as cause:
        pytest.skip(f"no network namespaces here: {cause}")
    inner, outer = load_cluster(path).levels
    assert (inner.size, outer.size) == (2, 2)
    # The shaper counts headers, and passes a burst of 1 MB at full speed.
    assert 0.7 * 25e6 < outer.bandwidth_bytes_per_s < 1.3 * 25e6
    assert 0.6 * 25e6 < (outer.all_reduce_bandwidth_bytes_per_s or 0) < 1.3 * 25e6
    assert inner.bandwidth_bytes_per_s > outer.bandwidth_bytes_per_s
    # one link, which one ring fills as well as two do
    assert 0.5 * 25e6 < (outer.one_ring_bandwidth_bytes_per_s or 0) < 1.3 * 25e6


@pytest.mark.slow
def test_one_ring_uses_one_port_of_a_server_and_several_use_all(tmp_path: Path) -> None:
    """Two "servers" of two workers with a port of 100 Mbit/s each: a ring over all four fills one
    port each way, and two rings at once fill both.
    """
    path = tmp_path / "cluster.json"
    try:
        with network(4, "100mbit") as hosts, ExitStack() as stack:
            _finish(
                [
                    stack.enter_context(
                        hosts[rank].popen(
                            [*COMMAND, str(path)],
                            env=_environment(rank, 2, 2, hosts[0].address, 29513, "eth0"),
                            stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT,
                        )
                    )
                    for rank in range(4)
                ]
            )
    except NetworkUnavailableError as cause:
        pytest.skip(f"no network namespaces here: {cause}")
    cluster = load_cluster(path)
    _, outer = cluster.levels
    together = outer.all_reduce_bandwidth_bytes_per_s or 0
    one_ring = outer.one_ring_bandwidth_bytes_per_s or 0
    assert 0.6 * 25e6 < together < 1.3 * 25e6
    assert 0.6 * 12.5e6 < one_ring < 1.3 * 12.5e6

    # which the solver prices an all-reduce over all at
    assert Topology(cluster).link(1).ring_bytes_per_s == pytest.approx(one_ring, rel=0.3)
    plan = tmp_path / "plan.json"
    profile = str(Path(__file__).parents[3] / "profiles" / "vgg16" / "cpu.json")
    solved = ["solve", "--profile", profile, "--cluster", str(path), "-o", str(plan)]
    assert main(solved) == 0
    assert load_plan(plan).cluster.levels[1] == outer


def test_what_is_measured_at_once() -> None:
    inner, outer = pairs_by_turn(hosts=3, workers=2)
    assert inner == [((0, 1), (2, 3), (4, 5))]
    assert outer == [((0, 2), (1, 3)), ((2, 4), (3, 5))]


def test_outside_torchrun_the_hint_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match="torchrun did not start") as caught:
        measure_cluster()
    assert "torchrun --nnodes 2" in caught.value.hint


def test_links_and_a_model_are_two_things(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "model.py", "--links"]) == 2
    assert "--links measures no model" in capsys.readouterr().err
    assert main(["profile"]) == 2
    assert "no model file" in capsys.readouterr().err
