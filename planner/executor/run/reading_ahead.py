"""Read batches ahead in a thread of their own, so that training does not wait for slow datasets.

What is trained stays what it is without the thread. The order is that of the worker's instructions. A dataset that
draws random numbers from a global generator is read by the training thread, which draws from it as well. So is one that
fails in the thread: the training thread meets the error where it always did, or goes on without the thread.

A DataLoader's worker processes cannot promise that. They draw from generators of their own, so that the data would
depend on their number and change after a restart; an error of the dataset arrives as text without its frames; and a
model file's dataset can be neither forked beside the threads of gloo and NCCL nor always be pickled.
"""

from __future__ import annotations

import queue
import random
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from planner.executor.run.data import BatchSource, ChangedBatches
from planner.model.batch import Batch
from planner.schedule.instructions import Unit

AHEAD = 2  # batches: one that the next forward takes, and one in the making
TRIALS = 3  # batches that the training thread reads first, to see what the dataset does
WORTH_S = 0.5e-3  # for what is read faster, handing it from thread to thread takes about as long


class ReadAhead(ChangedBatches):
    """Batches of `source`, which a thread reads ahead between `begin` and `end` if that helps and changes nothing.

    Args:
        device: that the batches go to.
        worth_s: seconds per batch from which on the thread is worth it.
    """

    def __init__(self, source: BatchSource, device: torch.device | None = None, *, worth_s: float = WORTH_S) -> None:
        super().__init__(source)
        source.device = device or source.device
        self._worth_s = worth_s
        self._upcoming: Iterator[Unit] = iter(())  # none any more, where the thread is of no use
        self._times_s: list[float] = []  # of the trials
        self._thread: threading.Thread | None = None
        self._ready: queue.Queue[tuple[Unit, Batch] | None] = queue.Queue(AHEAD)
        self._stop = threading.Event()

    def begin(self, units: Iterable[Unit]) -> None:
        """Expect `units` to be asked for, in this order."""
        self._upcoming, self._times_s = iter(units), []

    def end(self, *, wait: bool = True) -> None:
        """Read nothing ahead from now on; `wait` until the thread has ended."""
        self._upcoming = iter(())
        if self._thread is None:
            return
        self._stop.set()
        while not self._ready.empty():  # a thread that waits for room sees only then that it is to stop
            self._ready.get_nowait()
        if wait:
            self._thread.join()
        self._thread = None

    def batch(self, unit: Unit) -> Batch:
        if self._thread is not None:
            found = self._ready.get()
            if found is not None and found[0] == unit:
                return found[1]
            self.end()
        elif next(self._upcoming, None) == unit:
            return self._try(unit)
        else:
            self._upcoming = iter(())
        return self._source.batch(unit)

    @property
    def reading(self) -> bool:
        """Whether a thread reads ahead."""
        return self._thread is not None

    def _try(self, unit: Unit) -> Batch:
        """Read a batch, and start the thread for those after it when enough have shown that it is worth it."""
        before, start_s = _global_generators(), time.perf_counter()
        batch = self._source.batch(unit)
        self._times_s.append(time.perf_counter() - start_s)
        # A default device holds in the thread that set it only.
        alone = _global_generators() == before and torch.get_default_device().type == "cpu"
        if alone and len(self._times_s) < TRIALS:
            return batch
        units, self._upcoming = self._upcoming, iter(())
        if alone and median(self._times_s) >= self._worth_s:
            self._stop, self._ready = threading.Event(), queue.Queue(AHEAD)
            # A daemon: a dataset that hangs must not keep a worker that has failed from ending.
            self._thread = threading.Thread(
                target=self._run, args=(units, self._ready, self._stop), name="reading ahead", daemon=True
            )
            self._thread.start()
        return batch

    def _run(self, units: Iterator[Unit], ready: queue.Queue[tuple[Unit, Batch] | None], stop: threading.Event) -> None:
        try:
            with _RefusesDraws():  # type: ignore[no-untyped-call]
                for unit in units:
                    ready.put((unit, self._source.batch(unit)))
                    if stop.is_set():
                        return
        except BaseException:
            pass
        ready.put(None)


@contextmanager
def reading_ahead(data: BatchSource, units: Iterable[Unit]) -> Iterator[None]:
    """Let `data` read `units` ahead within, if it can."""
    if not isinstance(data, ReadAhead):
        yield
        return
    data.begin(units)
    try:
        yield
    except BaseException:
        data.end(wait=False)  # the reason of the failure must not wait for a dataset
        raise
    data.end()


class _DrawError(BaseException):
    """Raised where a dataset draws in the thread; no `except Exception` of a user holds it up."""


class _RefusesDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode, of one thread, that refuses to draw from PyTorch's global generator, before anything is drawn."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        globally = kwargs.get("generator") in (None, torch.default_generator)
        if globally and torch.Tag.nondeterministic_seeded in func.tags:
            raise _DrawError
        return func(*args, **kwargs)


def _global_generators() -> tuple[object, ...]:
    """Return the states of the generators that all threads share: PyTorch's, Python's, and NumPy's where it is used."""
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), state and (state[1].tolist(), state[2])
