"""Average gradients over the replicas of a stage, bucket by bucket, while the backward still runs.

Buckets hold the parameters in reverse order, which is roughly the order in which backward computes their gradients.
They are all-reduced in that order, whichever is full first: an all-reduce carries no header, so replicas match it by
its place in the order of calls. DistributedDataParallel cannot be used here: it expects one forward per backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.cost.buckets import bucket_bytes


class _Parts(NamedTuple):
    """One flat tensor with all gradients of a bucket, and per parameter the number of replicas that had a gradient."""

    flat: Tensor
    views: list[Tensor]
    present: Tensor


class _Bucket:
    """Consecutive parameters of one dtype, whose gradients are all-reduced in one flat tensor.

    The tensor is allocated when the last gradient has come, and the averaged gradients are views of it: there is never
    a second copy of all gradients.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.ready: set[int] = set()
        self.work: dist.Work | None = None
        self._parts: _Parts | None = None
        self._missing: list[int] = []  # parameters without a gradient here

    @property
    def parts(self) -> _Parts:
        """The flat tensor and its parts, until `scatter`."""
        if self._parts is None:
            first, sizes = self.parameters[0], [parameter.numel() for parameter in self.parameters]
            flat = torch.empty(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
            *pieces, present = torch.split(flat, [*sizes, len(sizes)])
            views = [piece.view_as(parameter) for piece, parameter in zip(pieces, self.parameters, strict=True)]
            self._parts = _Parts(flat, views, present)
        return self._parts

    @property
    def full(self) -> bool:
        """Whether all gradients are complete."""
        return len(self.ready) == len(self.parameters)

    def fill(self) -> None:
        """Move all gradients from `.grad` into the bucket; where there is none, zeros.

        All at once: on a GPU that is one kernel for the bucket, and not two for each parameter.
        """
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

    def scatter(self, divisor: int) -> None:
        """Set `.grad` to the averages, or to None where no replica had a gradient: optimizers skip those parameters."""
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
        self.ready.clear()
        self.work = self._parts = None


class GradientAverager:
    """All-reduces the gradients of `parameters` over `group`.

    Call `begin()` before the last backward of a round and `finish(divisor)` after it. A replica without a backward in a
    round calls only `finish` and contributes zeros: an all-reduce needs all replicas.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._group = group
        self._buckets = [_Bucket(chunk) for chunk in _chunks([p for p in reversed(parameters) if p.requires_grad])]
        self._active = False
        self._next = 0  # first bucket that is not yet all-reduced
        for bucket in self._buckets:
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._hook(bucket, index))  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """All-reduce each bucket as soon as it is full, because the next backward completes the gradients."""
        self._active = True

    def finish(self, divisor: int) -> None:
        """Wait for the all-reduces, and set each `.grad` to the sum divided by `divisor`."""
        self._reduce_until(len(self._buckets))
        for bucket in self._buckets:
            assert bucket.work is not None
            bucket.work.wait()
            bucket.scatter(divisor)
        self._active = False
        self._next = 0

    def _hook(self, bucket: _Bucket, index: int) -> object:
        def move(_: Tensor) -> None:
            if self._active:
                bucket.ready.add(index)
                end = self._next
                while end < len(self._buckets) and self._buckets[end].full:
                    end += 1
                self._reduce_until(end)

        return move

    def _reduce_until(self, end: int) -> None:
        for bucket in self._buckets[self._next : end]:
            bucket.fill()
            bucket.work = dist.all_reduce(bucket.parts.flat, group=self._group, async_op=True)
        self._next = max(self._next, end)


def _chunks(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Split parameters into buckets of one dtype each and of about the same size."""
    total = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    full_bytes = bucket_bytes(total)
    chunks: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        if not chunks or size >= full_bytes or chunks[-1][0].dtype != parameter.dtype:
            chunks.append([])
            size = 0
        chunks[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return chunks
