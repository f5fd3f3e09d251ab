"""Values that a device computes and the host looks at later: losses, headers of messages, flags.

Reading a tensor of a GPU on the host (`.item()`, `float`, `bool`) waits until the GPU has come that far. Meanwhile
nothing new is launched, so the GPU rests as soon as it has caught up. Here the value is copied to pinned memory
behind the work that makes it, and an event tells when the copy has ended; the host asks the event, and does not wait.
On a CPU a value is there at once, and so is its reader's turn.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from planner.runtime import Event, runtime_of

MOST = 64  # values that are on their way at once; more would tell of a wrong message or a NaN too late

Reader = Callable[[Tensor], None]


class _Copy(NamedTuple):
    value: Tensor  # in pinned memory
    done: Event


class Later:
    """Hands values to their readers on the host, in the order in which they were given.

    Args:
        most: values that may be on their way at once; for the next one the host waits for the oldest.
    """

    def __init__(self, device: torch.device, most: int = MOST) -> None:
        self._runtime, self._most = runtime_of(device), most
        self._coming: deque[tuple[_Copy, Reader]] = deque()
        # Pinned memory is made once and used again: to allocate it may wait for the whole device.
        self._free: defaultdict[tuple[torch.dtype, torch.Size], list[_Copy]] = defaultdict(list)

    def read(self, value: Tensor, reader: Reader) -> None:
        """Give `reader` the value when it is known: on a CPU now, on a GPU in a later call of any of these methods.

        Args:
            value: a small tensor; it may be overwritten by work that is launched afterwards.
            reader: gets it on the CPU, and may not keep it.
        """
        if not self._runtime.asynchronous:
            reader(value)
            return
        kept = self._free[value.dtype, value.shape]
        copy = kept.pop() if kept else _Copy(self._runtime.pinned(value), self._runtime.event())
        copy.value.copy_(value, non_blocking=True)
        copy.done.record()
        self._coming.append((copy, reader))
        self.poll()
        if len(self._coming) > self._most:
            self._hand_over()

    def poll(self) -> None:
        """Hand over the values that have arrived; never waits."""
        while self._coming and self._coming[0][0].done.query():
            self._hand_over()

    def flush(self) -> None:
        """Wait for all values, and hand them over."""
        while self._coming:
            self._hand_over()

    def _hand_over(self) -> None:
        copy, reader = self._coming.popleft()
        copy.done.synchronize()
        reader(copy.value)
        self._free[copy.value.dtype, copy.value.shape].append(copy)
