"""Real bytes between real network namespaces: shaped, removed on every way out, and found again
after a kill.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.netns import Host, NetworkUnavailableError, network, remove_stale

ROOT = Path(__file__).resolve().parents[2]
NAMESPACES = Path("/run/netns")

RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 29555)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    begin = time.perf_counter()
    count = 0
    while block := connection.recv(1 << 16):
        count += len(block)
    print(count, time.perf_counter() - begin)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 29555), timeout=20) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""
HOLD = """
import sys, time
from benchmarks.netns import network
with network(2) as hosts:
    print(hosts[0].name, flush=True)
    time.sleep(60)
"""


pytestmark = pytest.mark.usefixtures("namespaces")


def transfer_s(source: Host, target: Host, count: int) -> float:
    """Seconds in which `count` bytes from `source` arrive at `target` over TCP."""
    receiver = target.popen([sys.executable, "-c", RECEIVE, target.address], stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "ready\n"
    sender = source.popen([sys.executable, "-c", SEND, target.address, str(count)])
    output, _ = receiver.communicate(timeout=60)
    assert sender.wait(timeout=60) == 0
    received, seconds = output.split()
    assert int(received) == count
    return float(seconds)


def names(pid: int | str = "*") -> set[str]:
    """Return the names of all namespaces of testbeds, or of those that one process made."""
    return (
        {path.name for path in NAMESPACES.glob(f"plan-bench-{pid}-*")}
        if NAMESPACES.is_dir()
        else set()
    )


@contextmanager
def holder() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that keeps a network open, and the run part of its namespaces' names."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        assert name in names()
        yield process, name.removesuffix("-host0")


def test_shaper_limits_what_arrives() -> None:
    count = 10_000_000
    with network(2) as (first, second):
        transfer_s(first, second, count)
        assert not queues(first)
    with network(2, "100mbit") as (first, second):
        shaped_s = transfer_s(first, second, count)
        # A loaded machine can only make it slower; 1 MB may pass at once at each of the two
        # shapers.
        assert (count - 2_000_000) * 8 / shaped_s < 100e6
        assert queues(first)


def test_the_way_back_is_shaped_too() -> None:
    with network(2, "100mbit") as (first, second):
        assert (10_000_000 - 2_000_000) * 8 / transfer_s(second, first, 10_000_000) < 100e6


def queues(host: Host) -> dict[str, int]:
    """Bytes that left the host by each queue of its shaper."""
    command = ["tc", "-s", "class", "show", "dev", "eth0"]
    shown = subprocess.run(host.command(command), capture_output=True, text=True, check=True).stdout
    found = re.findall(r"class htb (\S+) parent .*\n Sent (\d+) bytes", shown)
    return {name: int(count) for name, count in found}


def carried(host: Host) -> dict[str, int]:
    """Those of the queues that carried more than what devices say when they come up."""
    return {name: count for name, count in queues(host).items() if count > 5000}


def test_each_stream_has_a_queue_and_acknowledgements_go_before_them() -> None:
    count = 1_000_000
    with network(2, "100mbit") as (first, second):
        transfer_s(first, second, count)
        once = carried(first)
        transfer_s(first, second, count)
        twice, back = carried(first), carried(second)
    (stream,) = once.keys() - {"1:2"}
    (other,) = twice.keys() - once.keys()
    assert stream != other
    assert min(once[stream], twice[other]) >= count
    assert twice[stream] == once[stream]
    assert back.keys() == {"1:2"}  # it sent acknowledgements alone


def test_hosts_share_links_by_loss_whatever_the_machine_does() -> None:
    with network(1) as (host,):
        read = host.popen(
            ["cat", "/proc/sys/net/ipv4/tcp_congestion_control"], stdout=subprocess.PIPE
        )
        assert read.communicate(timeout=10)[0] == "reno\n"


def test_hosts_are_apart_from_the_machine_and_its_network_stays_clean() -> None:
    def links(prefix: list[str]) -> set[str]:
        shown = subprocess.run(
            [*prefix, "ip", "-o", "link"], capture_output=True, text=True, check=True
        )
        return {line.split(": ")[1].split("@")[0] for line in shown.stdout.splitlines()}

    before = links([])
    with network(3) as hosts:
        assert links([]) == before
        assert {"lo", "eth0"} <= links(hosts[2].command([]))
        assert hosts[0].environment()["GLOO_SOCKET_IFNAME"] == "eth0"


def test_an_exception_removes_everything_with_what_runs_inside() -> None:
    before = names(os.getpid())  # testbeds of other processes come and go meanwhile
    sleepers = []

    def fail_inside() -> None:
        with network(2) as hosts:
            sleepers.append(hosts[1].popen(["sleep", "60"]))
            assert names(os.getpid()) > before
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail_inside()
    assert sleepers[0].wait(timeout=10) == -signal.SIGKILL
    assert names(os.getpid()) == before


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)]
)
def test_signals_remove_everything(number: signal.Signals, code: int) -> None:
    with holder() as (process, run):
        process.send_signal(number)
        assert process.wait(timeout=20) == code
    assert not [name for name in names() if name.startswith(run)]


def test_what_a_killed_run_left_is_found_and_removed() -> None:
    with holder() as (process, run):
        process.kill()
        process.wait(timeout=20)
    left = {name for name in names() if name.startswith(run)}
    assert len(left) == 3
    remove_stale()
    assert not left & names()


def test_a_refused_shaper_says_what_was_refused_and_leaves_nothing() -> None:
    before = names(os.getpid())  # testbeds of other processes come and go meanwhile
    with pytest.raises(NetworkUnavailableError, match="rate 1furlong"), network(1, "1furlong"):
        pass
    assert names(os.getpid()) == before


def test_without_the_tools_the_error_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NetworkUnavailableError, match="'ip' is not installed"), network(1):
        pass
