"""Read batches ahead in a thread of their own, so that training does not wait for slow datasets.

What is trained stays what it is without the thread. A dataset that draws random numbers from a
global generator is read by the training thread, which draws from it as well: see `draws`. So is one
that fails in the thread.

A DataLoader's worker processes draw from generators of their own, and cannot always have a model
file's dataset.
"""

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from statistics import median

import torch

from planner.executor.run.data import BatchSource, ChangedBatches
from planner.executor.run.draws import draws_refused
from planner.model.batch import Batch
from planner.model.generators import state_of_generators
from planner.schedule.instructions import Unit

AHEAD = 2  # batches: one that the next forward takes, and one in the making
TRIALS = 3  # batches that the training thread reads first, to see what the dataset does
WORTH_S = 0.5e-3  # for what is read faster, handing it from thread to thread takes about as long


class ReadAhead(ChangedBatches):
    """Batches of `source` for `device`, which a thread reads ahead within `reading` if each takes
    `worth_s` or more.
    """

    def __init__(
        self, source: BatchSource, device: torch.device | None = None, *, worth_s: float = WORTH_S
    ) -> None:
        super().__init__(source)
        source.device = device or source.device
        self._worth_s = worth_s
        self._upcoming: Iterator[Unit] = iter(())  # none any more, where the thread is of no use
        self._times_s: list[float] = []  # of the trials
        self._thread: threading.Thread | None = None

    @contextmanager
    def reading(self, units: Iterable[Unit]) -> Iterator[None]:
        """See base class."""
        self._upcoming = iter(units)
        self._times_s = []
        try:
            yield
        except BaseException:
            self._end(wait=False)  # the reason of the failure must not wait for a dataset
            raise
        self._end()

    def batch(self, unit: Unit) -> Batch:
        """See base class."""
        if self._thread is not None:
            found = self._ready.get()
            if found is not None and found[0] == unit:
                return found[1]
            self._end()
        elif next(self._upcoming, None) == unit:
            return self._try(unit)

        self._upcoming = iter(())
        return self._source.batch(unit)

    def _try(self, unit: Unit) -> Batch:
        before = state_of_generators()
        start_s = time.perf_counter()
        batch = self._source.batch(unit)
        self._times_s.append(time.perf_counter() - start_s)
        draws = self._source.draws or state_of_generators() != before
        # A default device holds in the thread that set it only.
        alone = not draws and torch.get_default_device().type == "cpu"
        if alone and len(self._times_s) < TRIALS:
            return batch
        units = self._upcoming
        self._upcoming = iter(())
        if alone and median(self._times_s) >= self._worth_s:
            self._stop = threading.Event()
            self._ready = queue.Queue[tuple[Unit, Batch] | None](AHEAD)
            # A daemon: a dataset that hangs must not keep a worker that has failed from ending.
            arguments = units, self._ready, self._stop
            self._thread = threading.Thread(
                target=self._run, args=arguments, name="prefetching", daemon=True
            )
            self._thread.start()

        return batch

    def _run(
        self,
        units: Iterator[Unit],
        ready: queue.Queue[tuple[Unit, Batch] | None],
        stop: threading.Event,
    ) -> None:
        try:
            with draws_refused():
                for unit in units:
                    ready.put((unit, self._source.batch(unit)))
                    if stop.is_set():
                        return
        except BaseException:
            pass

        ready.put(None)

    def _end(self, *, wait: bool = True) -> None:
        if self._thread is None:
            return
        self._stop.set()
        # a thread that waits for room sees only then that it is to stop
        while not self._ready.empty():
            self._ready.get_nowait()
        if wait:
            self._thread.join()
        self._thread = None
