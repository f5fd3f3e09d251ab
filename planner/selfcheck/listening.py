"""What listens for connections while a run trains on this host, and whether a stranger's word
counts there.

The sockets are those that the system lists (proc(5), "/proc/net/tcp") for this process and the
workers that it starts. A stranger, who does not know the secret of the run, reports a failure in
its store: the run must go on.
"""

import ipaddress
import os
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported by a star import

from planner.schedule.one_stage import FLUSH
from planner.selfcheck.lab import Case, Lab, Outcome, even_plan, judged, location
from planner.workers.job import Failure
from planner.workers.watch import CAUSE, failure_key

STEPS = 60
_LOOK_EVERY_S = 0.05
_ANSWERS_WITHIN = timedelta(seconds=10)
_LISTENING = "0A"  # <linux/tcp_states.h>: TCP_LISTEN
_PROC = Path("/proc")


class Socket(NamedTuple):
    """Where a process listens."""

    process: int
    address: str
    port: int


def cases(lab: Lab) -> Iterator[Case]:
    """Yield the case of a run on this host."""
    yield "one host", partial(_one_host, lab)


def _one_host(lab: Lab) -> Outcome:
    if not (_PROC / "net" / "tcp").exists():
        return Outcome("skipped", "this system does not list sockets in /proc/net/tcp")
    model = location("build_convolutional")
    plan = even_plan(lab.profile(model), FLUSH, (1,) * lab.workers)
    watch = _Watch()
    try:
        result = lab.train(model, plan, STEPS)
    finally:
        watch.stop()

    return _judged(watch, result.minibatches)


def _judged(watch: "_Watch", minibatches: int) -> Outcome:
    launcher = sorted({each.address for each in watch.sockets if each.process == os.getpid()})
    workers = sorted({each.address for each in watch.sockets if each.process != os.getpid()})
    store = f"{' and '.join(launcher) or 'no address'}, which asks for the secret of the run"
    links = f"{' and '.join(workers) or 'no address'}, without authentication"
    found = (
        f"listening while a run trains, at free ports: the store of the run at {store}; "
        f"workers for each other at {links}"
    )

    outside = [each for each in (*launcher, *workers) if not ipaddress.ip_address(each).is_loopback]
    if outside:
        return judged(False, f"{found}; {outside[0]} can be reached from other machines")
    if not watch.was_told or minibatches != STEPS:
        return judged(False, f"{found}; the store was not seen, or the run ended early")
    return judged(True, f"{found}; a stranger's word did not count")


class _Watch:
    """Lists the sockets of this process and its workers, again and again, and is a stranger to
    their store.
    """

    def __init__(self) -> None:
        self.sockets = set[Socket]()
        self.was_told = False  # whether a stranger has reported a failure in the store
        self._before = set(listening_sockets())
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="sockets", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop looking, and wait until the thread has ended."""
        self._stopped.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stopped.wait(_LOOK_EVERY_S):
            sockets = set(listening_sockets()) - self._before
            stores = [each for each in sockets if each.process == os.getpid()]
            if stores and not self.was_told:
                self._lie(stores[0])
            self.sockets |= sockets

    def _lie(self, place: Socket) -> None:
        with suppress(RuntimeError):  # it is gone, or not there yet
            store = TCPStore(place.address, place.port, is_master=False, timeout=_ANSWERS_WITHIN)
            failure = Failure(
                rank=0, stage=0, message="a lie", hint="", exit_code=1, consequence=False
            )
            store.set(f"plan/0/{failure_key(0)}", failure.model_dump_json())
            store.set(f"plan/0/{CAUSE}", "0")
            self.was_told = True


def listening_sockets() -> Iterator[Socket]:
    """Yield where this process and those that it has started listen, by TCP."""
    places = dict(_places())
    for process in _family(os.getpid()):
        with suppress(OSError):  # it has ended
            for link in (_PROC / str(process) / "fd").iterdir():
                with suppress(OSError):
                    inode = re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink()))
                    if inode is not None and inode[1] in places:
                        yield Socket(process, *places[inode[1]])


def _family(process: int) -> Iterator[int]:
    yield process
    with suppress(OSError):
        for task in (_PROC / str(process) / "task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _family(int(child))


def _places() -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield the inode, address and port of each socket that listens."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING:
                    address, port = fields[1].split(":")
                    yield fields[9], (_readable(address), int(port, 16))


def _readable(address: str) -> str:
    """Return an address of the table, whose words of four bytes are little-endian, as people write
    it.
    """
    words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
    found = ipaddress.ip_address(b"".join(words))
    mapped = None
    if isinstance(found, ipaddress.IPv6Address):
        mapped = found.ipv4_mapped
    return str(mapped or found)
