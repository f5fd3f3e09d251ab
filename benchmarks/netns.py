"""Emulate hosts on one machine: network namespaces, joined by a switch over links of a chosen rate.

    host 0: eth0 ── port0 ┐
    host 1: eth0 ── port1 ┼── br0 (in its own namespace, so that nothing appears in the machine's
    network) host 2: eth0 ── port2 ┘

With servers, the hosts of each have their own switch, and share its uplink to br0:

    host 0: eth0 ── port0 ┐
    host 1: eth0 ── port1 ┴── server0: up0 ── down0 ── br0

Both ends of every link pass a token bucket, which TCP streams share evenly (`fair_queues`). So each
host sends at most `rate`, and receives at most `rate` at the same time: full duplex, like switched
Ethernet. The bytes are real and pass the kernel's TCP. This needs Linux, iproute2 and the right to
make network namespaces (root).
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.fair_queues import PACKET_BYTES, fair_queues, rate_command
from planner.errors import PlannerError

INTERFACE = "eth0"
_PREFIX = "plan-bench"
_NAME = re.compile(rf"{_PREFIX}-(?P<pid>\d+)-[0-9a-f]+-\w+")
# Fills any queue, so that streams use all of their share of a link. The machine's default may be
# BBR, which paces streams by its estimates, below the link's rate. Any host may use Reno.
_CONGESTION_CONTROL = "reno"
_NAMESPACES = Path("/run/netns")  # where iproute2 stores the names


class NetworkUnavailableError(PlannerError):
    """Network namespaces cannot be made here; the message says why."""


@dataclass(frozen=True)
class Host:
    """One network namespace, with an address that the other hosts reach."""

    name: str
    address: str

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command line that runs `arguments` inside the host."""
        return ["ip", "netns", "exec", self.name, *arguments]

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return this process's environment with the interface that gloo uses."""
        return {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, **(extra or {})}

    def popen(self, arguments: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command inside the host; `options` are those of `subprocess.Popen`, `env` adds to
        our environment.
        """
        environment = self.environment(options.pop("env", None))
        return subprocess.Popen(self.command(arguments), env=environment, text=True, **options)


class Network:
    """Hosts and the switches between them, made by `shaped_network`.

    Attributes:
        hosts: in order of the servers.
    """

    def __init__(self, hosts: tuple[Host, ...], switch: str, burst: str) -> None:
        self.hosts, self._switch, self._burst = hosts, switch, burst
        self._servers = 0  # servers that have a switch
        # namespaces and their devices that have queues for streams
        self._queued = set[tuple[str, str]]()

    def shape(self, rate: str | None, per_server: int = 1, uplink_rate: str | None = None) -> None:
        """Join the hosts, in place of earlier links.

        Args:
            rate: of each host's link, each way, as `tc` writes it; None does not limit it.
            per_server: hosts that share an uplink; 1 for no servers.
            uplink_rate: of a server's link to the others, each way.
        """
        for index, host in enumerate(self.hosts):
            server = index // per_server
            self._join(
                f"port{index}", "br0" if per_server == 1 else self._server(server, uplink_rate)
            )
            self._limit(host.name, INTERFACE, rate)
            self._limit(self._switch, f"port{index}", rate)
        for bridge in ("br0", *(f"server{number}" for number in range(self._servers))):
            _ip("-n", self._switch, "link", "set", bridge, "type", "bridge", "fdb_flush")

    def limit_sockets(self, send_bytes: int, receive_bytes: int) -> None:
        """Limit the buffers of the hosts' sockets, of those that are open to where they
        have grown.
        """
        for host in self.hosts:
            for buffer, most_bytes in (("tcp_wmem", send_bytes), ("tcp_rmem", receive_bytes)):
                sizes = f"4096 {most_bytes} {most_bytes}"  # least, at first, most
                _call(*host.command(["sysctl", "-qw", f"net.ipv4.{buffer}={sizes}"]))

    def add_switch(self, name: str) -> None:
        """Add a switch without ports."""
        _ip("-n", self._switch, "link", "add", name, "type", "bridge", "forward_delay", "0")
        _ip("-n", self._switch, "link", "set", name, "up")

    def _server(self, number: int, uplink_rate: str | None) -> str:
        name, up, down = f"server{number}", f"up{number}", f"down{number}"
        if number == self._servers:
            self._servers += 1
            self.add_switch(name)
            _ip("-n", self._switch, "link", "add", up, "type", "veth", "peer", "name", down)
            self._join(up, name)
            self._join(down, "br0")
        self._limit(self._switch, up, uplink_rate)
        self._limit(self._switch, down, uplink_rate)
        return name

    def _join(self, port: str, bridge: str) -> None:
        _ip("-n", self._switch, "link", "set", port, "master", bridge, "up")

    def _limit(self, namespace: str, device: str, rate: str | None) -> None:
        """Limit the rate of what leaves through `device`."""
        tc, place = ("tc", "-n", namespace), (namespace, device)
        if rate is None:
            self._queued.discard(place)
            _call(*tc, "qdisc", "replace", "dev", device, "root", "pfifo")
            return
        if place not in self._queued:
            _call(*tc, "-batch", "-", lines=fair_queues(device))
            self._queued.add(place)
        _call(*tc, *rate_command(device, rate, self._burst).split())


@contextmanager
def network(hosts: int, rate: str | None = None) -> Iterator[tuple[Host, ...]]:
    """Yield `hosts` hosts on a switch. At the end, everything is removed and what still runs inside
    is killed.

    Args:
        hosts: how many.
        rate: of each host's link, each way, as `tc` writes it ("1gbit"); None does not limit them.

    SIGTERM raises SystemExit in the context. A run that was killed with SIGKILL leaves its
    namespaces, which the next call removes.

    Raises:
        NetworkUnavailableError: when this machine or this user cannot make namespaces.
    """
    with shaped_network(hosts) as net:
        net.shape(rate)
        yield net.hosts


@contextmanager
def shaped_network(hosts: int, burst: str = "1mb") -> Iterator[Network]:
    """Yield a network of hosts whose links can change; call `shape` first.

    Args:
        hosts: how many.
        burst: bytes that pass a link at full speed after a pause.

    Raises:
        NetworkUnavailableError: when this machine or this user cannot make namespaces.
    """
    remove_stale()
    run_name = f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(3)}"
    switch = f"{run_name}-switch"
    made = tuple(
        Host(f"{run_name}-host{k}", f"10.77.{k // 250}.{k % 250 + 1}") for k in range(hosts)
    )
    net = Network(made, switch, burst)
    with _sigterm_as_exit():
        try:
            _ip("netns", "add", switch)
            net.add_switch("br0")
            for index, host in enumerate(made):
                _connect(host, switch, f"port{index}")
            yield net
        finally:
            with _uninterrupted():
                for name in (*(host.name for host in made), switch):
                    _remove(name)


def remove_stale() -> list[str]:
    """Remove the namespaces of runs that were killed before they could, and return their names."""
    stale = []
    for path in _NAMESPACES.glob(f"{_PREFIX}-*") if _NAMESPACES.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match is not None and not _is_alive(int(match["pid"])):
            _remove(path.name)
            stale.append(path.name)
    return stale


def _connect(host: Host, switch: str, port: str) -> None:
    _ip("netns", "add", host.name)
    # Made inside the switch with the peer inside the host, so that the machine's namespace never
    # sees either end.
    _ip(
        "-n",
        switch,
        "link",
        "add",
        port,
        "type",
        "veth",
        "peer",
        "name",
        INTERFACE,
        "netns",
        host.name,
    )
    _ip("-n", host.name, "address", "add", f"{host.address}/16", "dev", INTERFACE)
    _ip("-n", host.name, "link", "set", INTERFACE, "gso_max_size", str(PACKET_BYTES))
    _ip("-n", host.name, "link", "set", "lo", "up")
    _ip("-n", host.name, "link", "set", INTERFACE, "up")
    _call(
        *host.command(["sysctl", "-qw", f"net.ipv4.tcp_congestion_control={_CONGESTION_CONTROL}"])
    )


def _ip(*arguments: str) -> None:
    _call("ip", *arguments)


def _call(*command: str, lines: Iterable[str] = ()) -> None:
    try:
        done = subprocess.run(
            command, input="\n".join(lines), capture_output=True, text=True, timeout=30, check=False
        )
    except FileNotFoundError:
        raise NetworkUnavailableError(
            f"'{command[0]}' is not installed, so no network namespace can be made",
            hint="install iproute2",
        ) from None
    if done.returncode != 0:
        # RTNETLINK says only "No such file" when the shaper's kernel module is missing, so show the
        # refused line. What follows the reason is how to use `tc`.
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
        raise NetworkUnavailableError(
            f"'{' '.join(command)}' failed: {reason}",
            hint="run as root, on a kernel with network namespaces, veth, bridge, the htb shaper "
            "and BPF classifiers"
            if os.geteuid() == 0
            else "network namespaces need root",
        )


def _remove(name: str) -> None:
    """Kill what runs in namespace `name` and remove it, if it still exists."""
    if shutil.which("ip") is None or not (_NAMESPACES / name).exists():
        return
    for _ in range(50):
        listed = subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
        )
        pids = [int(pid) for pid in listed.stdout.split()]
        if not pids:
            break
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Let SIGTERM raise SystemExit(143) within the context, unless the program handles it
    itself.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore further Ctrl-C within the context, so that the cleanup completes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
