"""Notice at once that a worker's process is gone: each worker waits for a word of the next one, which never comes.

A broken connection ends the wait. Heartbeats would tell only after a time-out, and so would NCCL, whose kernels wait on
the device for a peer that was killed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from planner.executor.health.ending import ABORT_S, within

_FOR_EVER = timedelta(days=365)


class NextWorker:
    """Watches the process of the next worker, the first one's for the last, until that worker says goodbye.

    All workers make one, at the same time and after they have joined.

    Args:
        on_gone: is told the rank of the next worker when its process is gone, in a thread.
    """

    def __init__(self, on_gone: Callable[[int], None]) -> None:
        rank, self._workers = dist.get_rank(), dist.get_world_size()
        self._next, self._previous = (rank + 1) % self._workers, (rank - 1) % self._workers
        self._on_gone = on_gone
        self._left = False
        # gloo, whose connections break with the process, and of its own: when an operation on a group runs out of
        # time, gloo closes all the group's connections.
        self._group = dist.new_group(backend="gloo", timeout=_FOR_EVER)
        self._thread = threading.Thread(target=self._wait, name="next worker", daemon=True)
        if self._workers > 1:
            self._thread.start()

    def say_goodbye(self) -> None:
        """Tell the previous worker that this one ends as it should, and watch no longer."""
        self._left = True
        if self._workers > 1:
            within(ABORT_S, lambda: dist.send(torch.zeros(1), self._previous, self._group))
            # Until the next one has said goodbye, too: an interpreter that ends while a thread is in a library's call
            # aborts the process.
            self._thread.join(ABORT_S)

    def leave(self) -> None:
        """Watch no longer, because this worker ends with an error that the others learn otherwise."""
        self._left = True

    def _wait(self) -> None:
        goodbye = False
        with suppress(RuntimeError):
            dist.recv(torch.zeros(1), self._next, self._group)
            goodbye = True
        if not goodbye and not self._left:
            self._on_gone(self._next)
