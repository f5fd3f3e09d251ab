"""Average gradients over the replicas of a stage, bucket by bucket, while the backward still runs.

Buckets hold the parameters in reverse order, which is roughly the order in which backward computes their gradients.
They are reduced in that order, whichever is full first: an all-reduce carries no header, so replicas match it by its
place in the order of calls. DistributedDataParallel cannot be used here: it expects one forward per backward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.cost.network.link import bucket_bytes


class Bucket(ABC):
    """Consecutive parameters of one dtype, whose gradients are reduced in one flat tensor.

    The tensor is allocated when the last gradient has come, and the averaged gradients are views of it: there is never
    a second copy of all gradients.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.ready: set[int] = set()  # parameters whose gradients are complete, by their index
        self._missing: list[int] = []  # parameters without a gradient here

    @property
    def full(self) -> bool:
        """Whether all gradients are complete."""
        return len(self.ready) == len(self.parameters)

    def post(self, group: dist.ProcessGroup) -> None:
        """Move all gradients from `.grad` into the bucket, and begin to reduce them over `group`.

        All at once: on a GPU that is one kernel for the bucket, and not two for each parameter.
        """
        gradients = {index: each.grad for index, each in enumerate(self.parameters) if each.grad is not None}
        self._missing = [index for index in range(len(self.parameters)) if index not in gradients]
        for parameter in self.parameters:
            parameter.grad = None
        self._reduce(gradients, group)

    def poll(self) -> None:
        """Free what a reduction that has come to its end no longer needs; never waits."""
        return

    def finish(self, divisor: int) -> None:
        """Wait for the sums and set gradients to them, divided by `divisor`.

        Where no replica had a gradient, it stays None: optimizers skip those parameters.
        """
        sums, had = self._sums()
        if divisor > 1:
            sums.div_(divisor)
        # Other replicas may have had one. Only then is it read, because that waits for the sums on a GPU.
        kept = had.tolist() if self._missing else []
        lost = {index for index in self._missing if not kept[index]}
        self._give(sums, [index for index in range(len(self.parameters)) if index not in lost])

    @abstractmethod
    def _reduce(self, gradients: Mapping[int, Tensor], group: dist.ProcessGroup) -> None:
        """Begin to sum up the gradients, by index of their parameters, and how many replicas have each."""

    @abstractmethod
    def _sums(self) -> tuple[Tensor, Tensor]:
        """Wait for the sums; return them, and per parameter the number of replicas that had a gradient."""

    @abstractmethod
    def _give(self, sums: Tensor, indices: Sequence[int]) -> None:
        """Make `sums` the gradients of these parameters."""


class WholeBucket(Bucket):
    """A bucket that is all-reduced: each replica has the averages of all gradients in `.grad`."""

    def _reduce(self, gradients: Mapping[int, Tensor], group: dist.ProcessGroup) -> None:
        first, sizes = self.parameters[0], [parameter.numel() for parameter in self.parameters]
        self._flat = torch.empty(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
        views, present = self._views(self._flat), self._flat[-len(sizes) :]
        copy_all([views[index] for index in gradients], list(gradients.values()))
        present.fill_(1)
        for index in self._missing:
            views[index].zero_()
            present[index] = 0
        self._work = dist.all_reduce(self._flat, group=group, async_op=True)

    def _sums(self) -> tuple[Tensor, Tensor]:
        assert self._work is not None
        self._work.wait()
        count = len(self.parameters)
        sums, had = self._flat[:-count], self._flat[-count:]
        del self._work, self._flat
        return sums, had

    def _give(self, sums: Tensor, indices: Sequence[int]) -> None:
        views = self._views(sums)
        for index in indices:
            self.parameters[index].grad = views[index]

    def _views(self, flat: Tensor) -> list[Tensor]:
        sizes = [parameter.numel() for parameter in self.parameters]
        pieces = torch.split(flat[: sum(sizes)], sizes)
        return [piece.view_as(parameter) for piece, parameter in zip(pieces, self.parameters, strict=True)]


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source to its target, in one kernel on a GPU."""
    if targets:  # PyTorch refuses empty lists
        torch._foreach_copy_(targets, sources)


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
