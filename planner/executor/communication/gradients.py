"""Average gradients over the replicas of a stage, bucket by bucket, while the backward still runs.

Buckets hold the parameters in reverse order, which is roughly the order in which backward computes
their gradients. They are reduced in that order, whichever is full first: an all-reduce carries no
header, so replicas match it by its place in the order of calls. DistributedDataParallel cannot be
used here: it expects one forward per backward.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.cost.network.link import bucket_bytes
from planner.errors import PlanError
from planner.model.options import gradient_dtype
from planner.model.torch_private import copy_all


class Bucket(ABC):
    """Consecutive parameters of one dtype, whose gradients are reduced in one flat tensor, and
    become views of it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.ready: set[int] = set()  # parameters whose gradients are complete, by their index
        self._missing: list[int] = []  # parameters without a gradient here

    def post(self, group: dist.ProcessGroup) -> None:
        """Move all gradients from `.grad` into the bucket at once, and begin to reduce them over
        `group`.
        """
        gradients = {
            index: each.grad for index, each in enumerate(self.parameters) if each.grad is not None
        }
        self._missing = [index for index in range(len(self.parameters)) if index not in gradients]
        for parameter in self.parameters:
            parameter.grad = None
        try:
            self._reduce(gradients, group)
        except RuntimeError:
            for gradient in gradients.values():
                check_dense(gradient)
            raise

    def finish(self, divisor: int) -> None:
        """Wait for the sums and set gradients to them, divided by `divisor`; None where no replica
        had a gradient.
        """
        sums, had = self._sums()
        if divisor > 1:
            sums.div_(divisor)
        # Other replicas may have had one. Only then is it read, because that waits for the sums on
        # a GPU.
        kept = had.tolist() if self._missing else []
        lost = {index for index in self._missing if not kept[index]}
        self._give(sums, [index for index in range(len(self.parameters)) if index not in lost])

    @abstractmethod
    def _reduce(self, gradients: Mapping[int, Tensor], group: dist.ProcessGroup) -> None:
        """Begin to sum up the gradients, by index of their parameters, and how many replicas have
        each.
        """

    @abstractmethod
    def _sums(self) -> tuple[Tensor, Tensor]:
        """Wait for the sums; return them, and per parameter the number of replicas that had a
        gradient.
        """

    @abstractmethod
    def _give(self, sums: Tensor, indices: Sequence[int]) -> None: ...


class WholeBucket(Bucket):
    """A bucket that is all-reduced: each replica has the averages of all gradients in `.grad`."""

    def _reduce(self, gradients: Mapping[int, Tensor], group: dist.ProcessGroup) -> None:
        first = self.parameters[0]
        sizes = [parameter.numel() for parameter in self.parameters]
        self._flat = torch.empty(
            sum(sizes) + len(sizes), dtype=gradient_dtype(first), device=first.device
        )
        views = self._views(self._flat)
        present = self._flat[-len(sizes) :]
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
        sums = self._flat[:-count]
        had = self._flat[-count:]
        del self._work, self._flat
        return sums, had

    def _give(self, sums: Tensor, indices: Sequence[int]) -> None:
        views = self._views(sums)
        for index in indices:
            self.parameters[index].grad = views[index]

    def _views(self, flat: Tensor) -> list[Tensor]:
        sizes = [parameter.numel() for parameter in self.parameters]
        pieces = torch.split(flat[: sum(sizes)], sizes)
        return [
            piece.view_as(parameter)
            for piece, parameter in zip(pieces, self.parameters, strict=True)
        ]


def check_dense(gradient: Tensor) -> None:
    """Check a gradient that is to be added to those of other workers; raise PlanError for a sparse
    one.
    """
    if gradient.is_sparse:
        raise PlanError(
            f"the gradient of a weight of shape {tuple(gradient.shape)} is sparse, and the "
            f"replicas of a stage, or "
            "stages that share a weight, add up dense ones",
            hint="build the embedding with sparse=False, or price a plan with one replica of its "
            "stage: `replicas=1,2`",
        )


class GradientAverager:
    """Reduces the gradients of the parameters in `buckets` over `group`; zeros where a round has no
    backward.
    """

    def __init__(self, buckets: Sequence[Bucket], group: dist.ProcessGroup) -> None:
        self._group = group
        self._buckets = buckets
        self._active = False
        self._next = 0  # first bucket that is not yet under way
        for bucket in self._buckets:
            for index, parameter in enumerate(bucket.parameters):
                hook = partial(self._complete, bucket, index)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Reduce each bucket as soon as it is full: the next backward completes the gradients."""
        self._active = True

    def finish(self, divisor: int) -> None:
        """Wait for the sums, and set the gradients to them divided by `divisor`."""
        self._reduce_until(len(self._buckets))
        for bucket in self._buckets:
            bucket.finish(divisor)
            bucket.ready.clear()
        self._active = False
        self._next = 0

    def _complete(self, bucket: Bucket, index: int, _: Tensor) -> None:
        if self._active:
            bucket.ready.add(index)
            end = self._next
            while end < len(self._buckets) and len(self._buckets[end].ready) == len(
                self._buckets[end].parameters
            ):
                end += 1
            self._reduce_until(end)

    def _reduce_until(self, end: int) -> None:
        for bucket in self._buckets[self._next : end]:
            bucket.post(self._group)
        self._next = max(self._next, end)


def chunks(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Split a stage's trained parameters, the last one first, into chunks of one dtype each and
    about equal size.
    """
    trained = [parameter for parameter in reversed(parameters) if parameter.requires_grad]
    full_bytes = bucket_bytes(sum(parameter.nbytes for parameter in trained))
    found: list[list[nn.Parameter]] = []
    size = 0
    for parameter in trained:
        if not found or size >= full_bytes or found[-1][0].dtype != parameter.dtype:
            found.append([])
            size = 0
        found[-1].append(parameter)
        size += parameter.nbytes

    return found
