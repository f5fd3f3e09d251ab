"""Average gradients over the replicas of a stage, bucket by bucket, while the backward still runs.

Buckets hold the parameters in reverse order, which is roughly the order in which backward computes their gradients.
They are reduced in that order, whichever is full first: an all-reduce carries no header, so replicas match it by its
place in the order of calls. DistributedDataParallel cannot be used here: it expects one forward per backward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.cost.network.link import bucket_bytes


class _Parts(NamedTuple):
    """One flat tensor with all gradients of a bucket, and per parameter the number of replicas that had a gradient."""

    flat: Tensor
    views: list[Tensor]
    present: Tensor


class Bucket(ABC):
    """Consecutive parameters of one dtype, whose gradients are reduced in one flat tensor.

    The tensor is allocated when the last gradient has come, and the averaged gradients are views of it: there is never
    a second copy of all gradients.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.ready: set[int] = set()  # parameters whose gradients are complete, by their index

    @property
    def full(self) -> bool:
        """Whether all gradients are complete."""
        return len(self.ready) == len(self.parameters)

    @abstractmethod
    def post(self, group: dist.ProcessGroup) -> None:
        """Move all gradients from `.grad` into the bucket, and begin to reduce them over `group`.

        All at once: on a GPU that is one kernel for the bucket, and not two for each parameter.
        """

    def poll(self) -> None:
        """Free what a reduction that has come to its end no longer needs; never waits."""
        return

    @abstractmethod
    def finish(self, divisor: int) -> None:
        """Wait for the sums and set gradients to them, divided by `divisor`.

        Where no replica had a gradient, it becomes None: optimizers skip those parameters.
        """


class WholeBucket(Bucket):
    """A bucket that is all-reduced: each replica has the averages of all gradients in `.grad`."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters)
        self._work: dist.Work | None = None
        self._parts: _Parts | None = None
        self._missing: list[int] = []  # parameters without a gradient here

    @property
    def parts(self) -> _Parts:
        """The flat tensor and its parts, until `finish`."""
        if self._parts is None:
            first, sizes = self.parameters[0], [parameter.numel() for parameter in self.parameters]
            flat = torch.empty(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
            *pieces, present = torch.split(flat, [*sizes, len(sizes)])
            views = [piece.view_as(parameter) for piece, parameter in zip(pieces, self.parameters, strict=True)]
            self._parts = _Parts(flat, views, present)
        return self._parts

    def post(self, group: dist.ProcessGroup) -> None:
        views, present = self.parts.views, self.parts.present
        self._missing = [index for index, parameter in enumerate(self.parameters) if parameter.grad is None]
        filled = [(view, p.grad) for view, p in zip(views, self.parameters, strict=True) if p.grad is not None]
        if filled:
            torch._foreach_copy_([view for view, _ in filled], [gradient for _, gradient in filled])
        present.fill_(1)
        for index in self._missing:
            views[index].zero_()
            present[index] = 0
        for parameter in self.parameters:
            parameter.grad = None
        self._work = dist.all_reduce(self.parts.flat, group=group, async_op=True)

    def finish(self, divisor: int) -> None:
        assert self._work is not None
        self._work.wait()
        if divisor > 1:
            self.parts.flat[: -len(self.parameters)].div_(divisor)
        for parameter, view in zip(self.parameters, self.parts.views, strict=True):
            parameter.grad = view
        if self._missing:
            # Others may have had one. Only then is it read, because that waits for the all-reduce on a GPU.
            had = self.parts.present.tolist()
            for index in self._missing:
                if not had[index]:
                    self.parameters[index].grad = None
        self._work = self._parts = None


class GradientAverager:
    """Reduces the gradients of the parameters in `buckets` over `group`.

    Call `begin()` before the last backward of a round and `finish(divisor)` after it. A replica without a backward in a
    round calls only `finish` and contributes zeros: an all-reduce needs all replicas.
    """

    def __init__(self, buckets: Sequence[Bucket], group: dist.ProcessGroup) -> None:
        self._group = group
        self._buckets = buckets
        self._active = False
        self._next = 0  # first bucket that is not yet under way
        for bucket in self._buckets:
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._hook(bucket, index))  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Reduce each bucket as soon as it is full, because the next backward completes the gradients."""
        self._active = True

    def finish(self, divisor: int) -> None:
        """Wait for the sums, and set the gradients to them divided by `divisor`."""
        self._reduce_until(len(self._buckets))
        for bucket in self._buckets:
            bucket.finish(divisor)
            bucket.ready.clear()
        self._active = False
        self._next = 0

    def _hook(self, bucket: Bucket, index: int) -> object:
        def move(_: Tensor) -> None:
            if self._active:
                bucket.ready.add(index)
                end = self._next
                while end < len(self._buckets) and self._buckets[end].full:
                    end += 1
                self._reduce_until(end)

        return move

    def _reduce_until(self, end: int) -> None:
        # In the order of the buckets, whichever is full first: the other replicas' calls match by their order.
        posted, due = self._buckets[: self._next], self._buckets[self._next : end]
        for bucket in posted if due else ():
            bucket.poll()
        for bucket in due:
            bucket.post(self._group)
        self._next = max(self._next, end)


def whole_buckets(parameters: Sequence[nn.Parameter]) -> list[Bucket]:
    """Return buckets of those of a stage's `parameters` that are trained."""
    return [WholeBucket(chunk) for chunk in chunks(parameters)]


def chunks(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Split a stage's trained parameters, the last one first, into chunks of one dtype each and about equal size."""
    trained = [parameter for parameter in reversed(parameters) if parameter.requires_grad]
    total = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    full_bytes = bucket_bytes(total)
    found: list[list[nn.Parameter]] = []
    size = 0
    for parameter in trained:
        if not found or size >= full_bytes or found[-1][0].dtype != parameter.dtype:
            found.append([])
            size = 0
        found[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return found
