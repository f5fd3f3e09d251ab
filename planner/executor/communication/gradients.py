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

    The tensor is allocated when the first gradient comes, and the averaged gradients are views of it: there is never a
    second copy of all gradients.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.ready: set[int] = set()
        self.work: dist.Work | None = None
        self._parts: _Parts | None = None

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
        """Whether all gradients are in the bucket."""
        return len(self.ready) == len(self.parameters)

    def fill(self, index: int) -> None:
        """Move the gradient of parameter `index` from `.grad` into the bucket."""
        parameter = self.parameters[index]
        assert parameter.grad is not None
        self.parts.views[index].copy_(parameter.grad)
        self.parts.present[index] = 1
        parameter.grad = None
        self.ready.add(index)

    def fill_rest(self) -> None:
        """Fill what the last backward has not: with gradients of earlier microbatches, or else with zeros."""
        for index, parameter in enumerate(self.parameters):
            if index in self.ready:
                continue
            if parameter.grad is not None:
                self.fill(index)
            else:
                self.parts.views[index].zero_()
                self.parts.present[index] = 0

    def scatter(self, divisor: int) -> None:
        """Set `.grad` to the averages, or to None where no replica had a gradient: optimizers skip those parameters."""
        if divisor > 1:
            self.parts.flat[: -len(self.parameters)].div_(divisor)
        had = self.parts.present.tolist()
        for parameter, view, count in zip(self.parameters, self.parts.views, had, strict=True):
            parameter.grad = view if count else None
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
        for bucket in self._buckets:
            bucket.fill_rest()
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
                bucket.fill(index)
                end = self._next
                while end < len(self._buckets) and self._buckets[end].full:
                    end += 1
                self._reduce_until(end)

        return move

    def _reduce_until(self, end: int) -> None:
        for bucket in self._buckets[self._next : end]:
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
