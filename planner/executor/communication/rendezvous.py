"""The rendezvous of one host's workers: a store that listens on one address only.

torchrun's own rendezvous listens on all addresses of the host. Its launcher accepts other handlers, though, and torch's
store accepts a socket that is already bound.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported by a star import
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from planner.errors import InputError

BACKEND = "plan-one-host"
LOOPBACK = "lo"
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # by which torch's backends choose an interface
_TIMEOUT = timedelta(minutes=5)
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


class OneHost(RendezvousHandler):
    """Rendezvous of a single launcher, which holds the store that its workers use."""

    def __init__(self, address: str, run_id: str) -> None:
        self._run_id = run_id
        self._address = address
        self._store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store; nobody is waited for, because the caller is the only member."""
        listening = socket.create_server((self._address, 0))
        port = listening.getsockname()[1]
        # Detached, because the store closes the socket.
        descriptor = listening.detach()
        # Without libuv: with it, the store of PyTorch 2.7 takes no socket that listens already.
        self._store = TCPStore(
            self._address, port, is_master=True, timeout=_TIMEOUT, master_listen_fd=descriptor, use_libuv=False
        )
        bootstrap = RendezvousStoreInfo(self._address, port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, bootstrap)

    @property
    def use_agent_store(self) -> bool:
        """Let the workers use the launcher's store instead of opening one."""
        return True

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: nobody else could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        """Close the port."""
        self._store = None
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return OneHost(parameters.endpoint, parameters.run_id)


def register() -> None:
    """Register `BACKEND` with torch's launcher."""
    # Not a lambda: a launcher that restarts its workers registers again, and torch accepts only the same function.
    rendezvous_handler_registry.register(BACKEND, _create)
