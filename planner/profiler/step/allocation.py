"""Count the bytes that a training step saves for its backward and allocates at its peak, layer by
layer.
"""

import math
import os
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.profiler import profile, record_function

from planner.model.batch import Batch
from planner.model.stage.parts import LayerObserver
from planner.model.torch_private import tree_leaves
from planner.profiler.step.timing import Forward, LayerMarks
from planner.profiler.this_machine import large_blocks_apart
from planner.runtime import address_of as address_of
from planner.runtime import runtime_of

_MARK = "planner: between layers"
_MEMORY = "[memory]"


def saved_bytes(
    modules: Sequence[nn.Module],
    forward: Callable[[LayerObserver], object],
    pieces: int | None = None,
    known: set[int] | None = None,
    most_bytes: float = math.inf,
) -> list[int]:
    """Return the bytes of the distinct storages that autograd saves, by the piece of the forward
    that saves them first.

    Weights and buffers do not count, because they exist anyway. Tensors of the batch that are saved
    do. Storages at `known` addresses do not count, and those that are saved are added to them.

    Args:
        forward: runs the modules, tells an observer where each piece ends, and returns all that
            holds saved tensors.
        pieces: how many; None for one per module.

    Raises:
        torch.OutOfMemoryError: for more than `most_bytes`.
    """
    weights = {
        address_of(tensor)
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
    }
    seen = set[int]() if known is None else known
    storages = _SavedStorages(len(modules) if pieces is None else pieces, weights, seen, most_bytes)
    with saved_tensors_hooks(storages.pack, lambda tensor: tensor):
        results = forward(storages)
    # Until here the graph held every storage, so that no two had the same address.
    del results
    return storages.bytes


class _SavedStorages:
    def __init__(self, pieces: int, weights: set[int], seen: set[int], most_bytes: float) -> None:
        self.bytes = [0] * pieces
        self._piece = 0
        self._weights = weights
        self._seen = seen
        self._most_bytes = most_bytes

    def after_layer(self, index: int, value: Tensor | None) -> None:
        self._piece = index + 1

    def pack(self, tensor: Tensor) -> Tensor:
        own: Tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor, this rank's part
        address = address_of(own)
        if address not in self._seen and address not in self._weights:
            self._seen.add(address)
            self.bytes[self._piece] += own.untyped_storage().nbytes()
            if sum(self.bytes) > self._most_bytes:
                # The system does not refuse memory, it ends the process that uses it.
                raise torch.OutOfMemoryError(
                    "a step saves more for its backward than the machine has memory free"
                )

        # Detached, because an output saved by its own operation would be a cycle that is never
        # freed.
        return tensor.detach()


def tensors_of_batch(batch: Batch) -> list[Tensor]:
    """Return all tensors of a batch, targets included."""
    return [
        leaf
        for leaf in tree_leaves((batch.args, batch.kwargs, batch.target))
        if isinstance(leaf, Tensor)
    ]


def workspace_bytes(
    forward: Forward,
    device: torch.device,
    saved: Sequence[int],
    gradients: Sequence[int],
    before: tuple[int, int] = (0, 0),
) -> list[int]:
    """Return by layer what its forward or backward allocates at its peak beyond what the step holds
    anyway.

    The step holds what this layer and earlier ones have saved, the gradients of the weights of this
    layer and of later ones, and all weights. It runs once, so warm up before: what libraries
    allocate once and keep would count.

    Args:
        saved: bytes by layer, as `saved_bytes` counts them.
        gradients: bytes of the weights', by layer; there must be none yet.
        before: bytes that a training step would allocate in its forward and in its backward, but
            were there before.
    """
    meter = meter_for(device)
    with meter:
        marks = LayerMarks(meter.mark, len(saved))
        marks.run(forward)
    return beyond_held(marks, meter.peaks(), saved, gradients, before)


def beyond_held(
    marks: LayerMarks[int],
    peaks: Sequence[int],
    saved: Sequence[int],
    gradients: Sequence[int],
    before: tuple[int, int],
) -> list[int]:
    """Return the workspaces, given the most bytes in each span; marks are the numbers of the spans
    that they end.
    """
    saved = list(accumulate(saved))
    made = list(accumulate(reversed(gradients)))[::-1]
    most = [0] * len(saved)
    for layer, backward, start, end in marks.spans():
        beyond = max(peaks[start + 1 : end + 1]) + before[backward]
        most[layer] = max(most[layer], beyond - saved[layer] - (made[layer] if backward else 0))
    return most


def meter_for(device: torch.device) -> "_AllocatorMeter | _CpuMeter":
    """Return a meter of the bytes that are allocated on `device` within its context.

    Its `mark` ends a span and returns the span's number; span 0 begins with the context. Its
    `peaks` are the most bytes in each span, relative to the beginning of the context.
    """
    if runtime_of(device).counts_memory:
        return _AllocatorMeter(device)
    return _CpuMeter()


class _AllocatorMeter:
    """Reads the caching allocator's peak, which counts requests of the host, so it need not wait
    for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime = runtime_of(device)
        self._peaks: list[int] = []
        self._before_bytes = 0

    def __enter__(self) -> None:
        self._runtime.reset_peak(self._device)
        self._before_bytes = self._runtime.allocated_bytes(self._device)

    def __exit__(self, *_: object) -> None:
        return

    def mark(self) -> int:
        """End a span, and return its number."""
        self._peaks.append(self._runtime.peak_bytes(self._device) - self._before_bytes)
        self._runtime.reset_peak(self._device)
        return len(self._peaks) - 1

    def peaks(self) -> list[int]:
        return self._peaks


class _CpuMeter:
    """Reads PyTorch's profiler, because the CPU's allocator has no statistics; oneDNN's memory
    counts, too.
    """

    def __init__(self) -> None:
        # Otherwise the library announces on stderr that it starts and stops. It reads this when it
        # is first used.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profile = profile(use_kineto=False, profile_memory=True)
        self._marks = 0
        self._apart = large_blocks_apart()

    def __enter__(self) -> None:
        self._apart.__enter__()
        self._profile.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)  # type: ignore[no-untyped-call]
        self._apart.__exit__(*error)

    def mark(self) -> int:
        """End a span, and return its number."""
        with record_function(_MARK):
            self._marks += 1
        return self._marks - 1

    def peaks(self) -> list[int]:
        """Return the most bytes that were allocated in each span."""
        assert self._profile.kineto_results is not None
        everything: list[Any] = self._profile.kineto_results.events()
        events = [each for each in everything if each.name() in (_MARK, _MEMORY)]
        peaks = []
        now = 0
        most = 0
        for event in sorted(events, key=lambda each: each.start_ns()):
            if event.name() == _MARK:
                peaks.append(most)
                most = now
            else:
                now += event.nbytes()
                most = max(most, now)

        return peaks


class Allocations:
    """Meters the storages that operations make, on tensors with data or without: those that were
    there count nothing.

    `mark` ends a span, and `peaks` are the most bytes in each.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._now = self._most = 0
        self.peaks: list[int] = []

    def note(self, arguments: Any, results: Any) -> None:
        """Count the new storages among the tensors that an operation returned; what it was given is
        none.
        """
        given = {address_of(leaf) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)}
        for tensor in tree_leaves(results):
            if (
                not isinstance(tensor, Tensor)
                or (address := address_of(tensor)) in given
                or address in self._sizes
            ):
                continue
            storage = tensor.untyped_storage()
            self._sizes[address] = storage.nbytes()
            self._now += self._sizes[address]
            self._most = max(self._most, self._now)
            # PyTorch keeps the Python object of a storage as long as the storage itself.
            weakref.finalize(storage, self._free, address).atexit = False

    def _free(self, address: int) -> None:
        self._now -= self._sizes.pop(address)

    def mark(self) -> int:
        """End a span, and return its number."""
        self.peaks.append(self._most)
        self._most = self._now
        return len(self.peaks) - 1
