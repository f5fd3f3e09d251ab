"""Network interfaces: which one torch's backends listen on.

Without a name gloo listens where the host's own name leads. On Debian and Ubuntu that is 127.0.1.1,
which no other host reaches. So a worker listens on the interface that leads to worker 0's host, and
on that host to another worker.
"""

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

from planner.errors import InputError

LOOPBACK = "lo"
# by which torch's backends choose an interface
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915  # <linux/sockios.h>: get an interface's IPv4 address


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface; raise InputError where there is none."""
    if interface == LOOPBACK:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise InputError(
                f"'{interface}' is no network interface with an IPv4 address here",
                hint=f"interfaces here: {names}",
            ) from None

    return socket.inet_ntoa(answer[20:24])


def address_towards(host: str) -> str | None:
    """Return this host's address on the way to another; None where there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # of a datagram socket: it chooses the route, and sends nothing
            probe.connect((host, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def listening_address(host: str, *, elsewhere: bool) -> str | None:
    """Return the address of this machine to listen on, so that others reach it at `host`.

    None where that is not known: the name is of no address here, as behind a gateway; or it leads
    to loopback here, as on Debian the machine's own name does, and others may be `elsewhere`, on
    other machines.
    """
    try:
        answers = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return None

    is_loopback_name = host in ("localhost", "::1") or host.startswith("127.")
    for family, *_, place in sorted(answers, key=lambda answer: answer[0] != socket.AF_INET):
        address = str(place[0])
        if elsewhere and not is_loopback_name and (address == "::1" or address.startswith("127.")):
            continue
        with suppress(OSError):
            socket.create_server((address, 0), family=family).close()
            return address

    return None


def choose_interface(addresses: Sequence[str | None], rank: int) -> None:
    """Let gloo listen where others reach this worker, by all their addresses, unless the user has
    chosen.
    """
    own = addresses[rank]
    if os.environ.get(VARIABLES[0]) or own is None:
        return
    elsewhere = next(
        (address for address in addresses if address and not address.startswith("127.")), None
    )
    # worker 0's host, under a name that leads to itself
    if own.startswith("127.") and elsewhere is not None:
        own = address_towards(elsewhere) or own
    for _, name in socket.if_nameindex():
        with suppress(InputError):  # it has no address
            if own.startswith("127.") if name == LOOPBACK else address_of(name) == own:
                os.environ[VARIABLES[0]] = name
