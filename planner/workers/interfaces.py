"""Network interfaces: which one torch's backends listen on, by its name, its address, or who can be reached through it.

Without a name gloo listens where the host's own name leads. On Debian and Ubuntu that is 127.0.1.1, which no other host
reaches. So a worker listens on the interface that leads to worker 0's host, and on that host to another worker.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence

from planner.errors import InputError

LOOPBACK = "lo"
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # by which torch's backends choose an interface
_SIOCGIFADDR = 0x8915  # <linux/sockios.h>: get an interface's IPv4 address


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface.

    Raises:
        InputError: when there is no such interface, or it has no IPv4 address.
    """
    if interface == LOOPBACK:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise InputError(
                f"'{interface}' is no network interface with an IPv4 address here", hint=f"interfaces here: {names}"
            ) from None
    return socket.inet_ntoa(answer[20:24])


def address_towards(host: str) -> str | None:
    """Return the IPv4 address that this host sends from to `host`; None where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # of a datagram socket: it chooses the route, and sends nothing
        except OSError:
            return None
        address: str = probe.getsockname()[0]
        return address


def choose_interface(addresses: Sequence[str | None], rank: int) -> None:
    """Let gloo listen where other hosts reach this worker, unless the user has named an interface.

    Args:
        addresses: `address_towards` worker 0's host of each worker, by rank.
    """
    own = addresses[rank]
    if os.environ.get(VARIABLES[0]) or own is None:
        return
    elsewhere = next((address for address in addresses if address and not _is_loopback(address)), None)
    if _is_loopback(own) and elsewhere is not None:  # worker 0's host, under a name that leads to itself
        own = address_towards(elsewhere)
    for _, name in socket.if_nameindex():
        if _has(name, own):
            os.environ[VARIABLES[0]] = name


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")


def _has(interface: str, address: str | None) -> bool:
    if interface == LOOPBACK:
        return address is not None and _is_loopback(address)
    try:
        return address_of(interface) == address
    except InputError:  # it has no address
        return False
