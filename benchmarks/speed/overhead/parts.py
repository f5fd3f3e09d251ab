"""Time the parts of a worker: each function's own time, without that of the timed functions that it
calls.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch

from benchmarks.speed.overhead.stand_in import Neighbours
from planner.executor.communication.links import Links
from planner.executor.run.replica import StageReplica
from planner.executor.run.worker import PipelineWorker
from planner.executor.stage.versions import WeightVersions
from planner.model.randomness import RandomKey
from planner.model.stage.stage import StageModule
from planner.workers.heartbeat import Heartbeat

_CALLS = 1000  # to find out what the watch itself takes
OPERATIONS, NETWORK = "the stage's operations", "the network"  # are no overhead
Place = tuple[Any, str]

PARTS: dict[str, Sequence[Place]] = {
    "messages": [(Links, "receive"), (Links, "send")],
    "records of units": [
        (StageReplica, name)
        for name in (
            "accept_activation",
            "activation",
            "accept_gradient",
            "gradient",
            "forward",
            "backward",
            "update",
        )
    ],
    "versions": [(WeightVersions, name) for name in ("stash", "stashed", "restored", "update")],
    "random keys": [(StageModule, "set_random_key"), (RandomKey, "seed_of")],
    "checks of values": [(StageModule, "forward")],
    "losses": [(PipelineWorker, "_log_loss")],
    "heartbeat": [(Heartbeat, "begin")],
    "dispatch": [(PipelineWorker, "_execute")],
    NETWORK: [(Neighbours, "hand_over")],
    OPERATIONS: [(torch.autograd, "backward"), (torch.optim.SGD, "step")],
}


class Stopwatch:
    """Adds up the own time of each part, without the time that the watch itself takes.

    Args:
        call_s: what a call of a timed function that does nothing adds to its part, and to its
            caller's; None to measure it.
    """

    def __init__(self, call_s: tuple[float, float] | None = None) -> None:
        self._call_s = call_s
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._calls: Counter[str] = Counter()
        self._calls_within: Counter[str] = Counter()
        # part of each open call, and the time of calls within
        self._open: list[tuple[str, float]] = [("", 0.0)]

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` with its own time added to `part`; of a context manager, that of entering
        and leaving.
        """

        @wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._open.append((part, 0.0))
            began = time.thread_time()
            try:
                result = call(*args, **kwargs)
            finally:
                self._leave(part, time.thread_time() - began)
            return self._context(part, result) if hasattr(result, "__exit__") else result

        return wrapped

    def items(self, part: str, items: Iterable[Any]) -> Iterator[Any]:
        """Yield `items`, with the time of making them added to `part`."""
        make = self.timed(part, partial(next, iter(items), None))
        return iter(make, None)

    def microseconds(self, units: int) -> dict[str, float]:
        """Return each part's own time per unit."""
        inside, around = self._call_s or _measure_call_s()
        return {
            part: (seconds - self._calls[part] * inside - self._calls_within[part] * around)
            / units
            * 1e6
            for part, seconds in self.seconds.items()
        }

    @contextmanager
    def _context(self, part: str, manager: Any) -> Iterator[Any]:
        value = self.timed(part, manager.__enter__)()
        try:
            yield value
        finally:
            self.timed(part, manager.__exit__)(None, None, None)

    def _leave(self, part: str, elapsed: float) -> None:
        _, within = self._open.pop()
        self.seconds[part] += elapsed - within
        self._calls[part] += 1
        caller, others = self._open[-1]
        self._open[-1] = caller, others + elapsed
        self._calls_within[caller] += 1


def _measure_call_s() -> tuple[float, float]:
    """Return what a call of a timed function that does nothing adds to its part, and to its
    caller's.
    """
    watch = Stopwatch()
    inner = watch.timed("inner", int)
    outer = watch.timed("outer", lambda: [inner() for _ in range(_CALLS)])
    outer()
    return watch.seconds["inner"] / _CALLS, watch.seconds["outer"] / _CALLS


@contextmanager
def parts_timed(stage: StageModule) -> Iterator[Stopwatch]:
    """Time every part of the workers inside, one of which has `stage`."""
    watch = Stopwatch()
    code, run = stage._code, stage._code.run
    object.__setattr__(code, "run", watch.timed(OPERATIONS, run))
    before = [
        (owner, name, getattr(owner, name)) for places in PARTS.values() for owner, name in places
    ]
    for part, places in PARTS.items():
        for owner, name in places:
            setattr(owner, name, watch.timed(part, getattr(owner, name)))
    try:
        yield watch
    finally:
        object.__setattr__(code, "run", run)
        for owner, name, call in before:
            setattr(owner, name, call)
