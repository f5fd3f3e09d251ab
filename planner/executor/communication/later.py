"""Values that a device computes and the host looks at later: losses, headers of messages, flags.

Reading a tensor of a GPU on the host waits until the GPU has come that far, while nothing new is
launched. Here the value is copied to pinned memory behind the work that makes it, and an event
tells when the copy has ended. On a CPU a value is there at once, and so is its reader's turn.
"""

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from planner.runtime import Runtime, runtime_of

# values that are on their way at once; more would tell of a wrong message or a NaN too late
MOST = 64
_SLOT_BYTES = 64

Reader = Callable[[Tensor], None]


class _Slot:
    def __init__(self, runtime: Runtime) -> None:
        self._memory = runtime.pinned(_SLOT_BYTES)
        self._places: dict[tuple[torch.dtype, torch.Size], Tensor] = {}
        self.done = runtime.event()

    def place(self, like: Tensor) -> Tensor:
        key = like.dtype, like.shape
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = (
                self._memory[: like.nbytes].view(like.dtype).view(like.shape)
            )
        return place


Reading: TypeAlias = tuple[Tensor, Reader]  # numbers, and who compares them on the host


class Later:
    """Hands values to their readers on the host, in order; at most `most` are on their way
    at once.
    """

    def __init__(self, device: torch.device, most: int = MOST) -> None:
        runtime = runtime_of(device)
        self._asynchronous = runtime.asynchronous
        self._most = most
        self._coming: deque[tuple[_Slot, Tensor, Reader]] = deque()
        # Pinned memory is taken before there are messages: to allocate it may wait for the whole
        # device.
        self._free = []
        if runtime.asynchronous:
            self._free = [_Slot(runtime) for _ in range(most + 1)]

    def read(self, value: Tensor, reader: Reader) -> None:
        """Give `reader` a value of at most 64 bytes: on a CPU now, on a GPU in a later call of any
        of these methods.
        """
        if not self._asynchronous:
            reader(value)
            return

        slot = self._free.pop()
        place = slot.place(value)
        place.copy_(value, non_blocking=True)
        slot.done.record()
        self._coming.append((slot, place, reader))
        self.poll()
        if len(self._coming) > self._most:
            self._hand_over()

    def poll(self) -> None:
        """Hand over the values that have arrived; never waits."""
        while self._coming and self._coming[0][0].done.query():
            self._hand_over()

    def flush(self, keep: int = 0) -> None:
        """Wait for all values but the newest `keep`, and hand them over."""
        self.poll()
        while len(self._coming) > keep:
            self._hand_over()

    def _hand_over(self) -> None:
        slot, value, reader = self._coming.popleft()
        slot.done.synchronize()
        reader(value)
        self._free.append(slot)
