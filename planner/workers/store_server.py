"""Open a store that listens on one address: PyTorch's own way to open one listens on all addresses
of the machine.
"""

import socket
from contextlib import suppress
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported by a star import
from torch.torch_version import TorchVersion

# With libuv the store of PyTorch 2.7 takes no socket that listens already; that of 2.13 does.
# Without it a write and a read of a few values take 0.2 s, because each waits for the other side's
# delayed acknowledgement.
_LIBUV_TAKES_SOCKETS = TorchVersion(torch.__version__) >= TorchVersion("2.13")
_TIMEOUT = timedelta(minutes=1)  # for an answer of a store
_WAITING = 4096  # connections that a store has not accepted yet, at most


def open_store(address: str, port: int, timeout: timedelta = _TIMEOUT) -> TCPStore:
    """Return a store that listens on `address` alone, at any free port for 0; raise OSError where
    it cannot.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, port), family=family, backlog=_WAITING)
    # Detached, because the store closes the socket. Multi-tenant: another one at this port in this
    # process is the same.
    return TCPStore(
        address,
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        multi_tenant=True,
        master_listen_fd=listening.detach(),
        use_libuv=_LIBUV_TAKES_SOCKETS,
    )


def is_free(address: str, port: int) -> bool:
    """Return whether this process could listen there."""
    with suppress(OSError):
        socket.create_server((address, port)).close()
        return True
    return False
