"""Read batches ahead in a thread of their own, so that training does not wait for slow datasets.

What is trained stays what it is without the thread. A dataset that draws random numbers from a global generator is read
by the training thread, which draws from it as well. So is one that fails in the thread.

A DataLoader's worker processes draw from generators of their own, and cannot always have a model file's dataset.
"""

import queue
import random
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from planner.executor.run.data import BatchSource, ChangedBatches
from planner.model.batch import Batch
from planner.schedule.instructions import Unit

AHEAD = 2  # batches: one that the next forward takes, and one in the making
TRIALS = 3  # batches that the training thread reads first, to see what the dataset does
WORTH_S = 0.5e-3  # for what is read faster, handing it from thread to thread takes about as long


class ReadAhead(ChangedBatches):
    """Batches of `source` for `device`, which a thread reads ahead within `reading` if each takes `worth_s` or more."""

    def __init__(self, source: BatchSource, device: torch.device | None = None, *, worth_s: float = WORTH_S) -> None:
        super().__init__(source)
        source.device = device or source.device
        self._worth_s = worth_s
        self._upcoming: Iterator[Unit] = iter(())  # none any more, where the thread is of no use
        self._times_s: list[float] = []  # of the trials
        self._thread: threading.Thread | None = None

    @contextmanager
    def reading(self, units: Iterable[Unit]) -> Iterator[None]:
        self._upcoming, self._times_s = iter(units), []
        try:
            yield
        except BaseException:
            self._end(wait=False)  # the reason of the failure must not wait for a dataset
            raise
        self._end()

    def batch(self, unit: Unit) -> Batch:
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
        before, start_s = _global_generators(), time.perf_counter()
        batch = self._source.batch(unit)
        self._times_s.append(time.perf_counter() - start_s)
        # A default device holds in the thread that set it only.
        alone = _global_generators() == before and torch.get_default_device().type == "cpu"
        if alone and len(self._times_s) < TRIALS:
            return batch
        units, self._upcoming = self._upcoming, iter(())
        if alone and median(self._times_s) >= self._worth_s:
            self._stop, self._ready = threading.Event(), queue.Queue[tuple[Unit, Batch] | None](AHEAD)
            # A daemon: a dataset that hangs must not keep a worker that has failed from ending.
            arguments = units, self._ready, self._stop
            self._thread = threading.Thread(target=self._run, args=arguments, name="reading ahead", daemon=True)
            self._thread.start()
        return batch

    def _run(self, units: Iterator[Unit], ready: queue.Queue[tuple[Unit, Batch] | None], stop: threading.Event) -> None:
        try:
            with _RefusesDraws():
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
        while not self._ready.empty():  # a thread that waits for room sees only then that it is to stop
            self._ready.get_nowait()
        if wait:
            self._thread.join()
        self._thread = None


class _DrawError(BaseException):
    """Raised where a dataset draws in the thread; no `except Exception` of a user holds it up."""


class _RefusesDraws(TorchFunctionMode):
    """Mode, of one thread, that refuses to draw from PyTorch's global generator, before anything is drawn.

    It looks at calls from Python alone. A mode for all operations would multiply the time of small datasets by five,
    most of which a host that launches a GPU's kernels would wait for, because threads of Python take turns.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        globally = kwargs.get("generator") in (None, torch.default_generator)
        if globally and getattr(func, "__name__", None) in _drawing():
            raise _DrawError
        return func(*args, **kwargs)


@cache
def _drawing() -> frozenset[str]:
    """Return the names of functions that draw: PyTorch's operations that say so, and what Python makes of these."""
    packets = {name: getattr(torch.ops.aten, name) for name in dir(torch.ops.aten)}
    found = {
        name
        for name, packet in packets.items()
        if isinstance(packet, torch._ops.OpOverloadPacket)
        and any(torch.Tag.nondeterministic_seeded in getattr(packet, each).tags for each in packet.overloads())  # type: ignore[no-untyped-call]
    }
    composed = {name for name in dir(F) if "dropout" in name or name in ("gumbel_softmax", "rrelu")}
    return frozenset(found | composed | {"random_", "scaled_dot_product_attention"})


def _global_generators() -> tuple[object, ...]:
    """Return the states of the generators that all threads share: PyTorch's, Python's, and NumPy's where it is used."""
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), state and (state[1].tolist(), state[2])
