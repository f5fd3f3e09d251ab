"""Average gradients over the replicas of a stage, bucket by bucket, while the backward still runs.

Buckets hold the parameters in reverse order, which is roughly the order in which backward computes their gradients.
They are reduced in that order, whichever is full first: an all-reduce carries no header, so replicas match it by its
place in the order of calls. DistributedDataParallel cannot be used here: it expects one forward per backward.

An `Exchange` is what `sharding` needs beside the all-reduce: its halves, a reduce-scatter and an all-gather.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.cost.network.link import bucket_bytes
from planner.errors import PlanError
from planner.workers.groups import GLOO


class Exchange:
    """Exchanges a tensor of equal rows, one for each member of `group`, with NCCL's own operations, in place.

    All members call the same methods in the same order: what travels carries no header. Both halves of a ring
    all-reduce move (r-1)/r of the bytes (Patarasuk & Yuan 2009, section 3), and so do these.

    Attributes:
        own: this member's number.
        places: by member, where its row lies in the tensor.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.own, self._members = dist.get_rank(group), dist.get_world_size(group)
        self.places: Sequence[int] = range(self._members)

    def reduce_scatter(self, rows: Tensor) -> RowSum:
        """Begin to add up all members' rows, each at its owner, which has the sum in place of its own row."""
        post = _named("reduce_scatter_single", "reduce_scatter_tensor")
        return RowSum(post(rows[self.own], rows.view(-1), group=self._group, async_op=True))

    def all_gather(self, rows: Tensor) -> Callable[[], object]:
        """Begin to give every member all owners' rows, and return what waits for it."""
        post = _named("all_gather_single", "all_gather_into_tensor")
        work = post(rows.view(-1), rows[self.own], group=self._group, async_op=True)
        return lambda: work.wait()


class _Direct(Exchange):
    """Sends every row straight to its owner, over gloo.

    gloo's reduce_scatter is an all-reduce that is thrown away in part: 28 ms for 16 MB where an all-reduce takes 21,
    and this 8. The own row is the last one: the others then lie together, in the order of the members, as all_to_all
    takes them. A message of its own for each row would do, but gloo does not say whether messages have arrived.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        last = self._members - 1
        self.places = [last if owner == self.own else owner - (owner > self.own) for owner in range(self._members)]

    def reduce_scatter(self, rows: Tensor) -> RowSum:
        sizes = [0 if member == self.own else rows.shape[1] for member in range(self._members)]
        received = torch.empty_like(rows[:-1])
        work = dist.all_to_all_single(received.view(-1), rows[:-1].view(-1), sizes, sizes, self._group, async_op=True)
        assert work is not None
        own, terms = rows[-1], list(received)
        terms.insert(self.own, own)
        return RowSum(work, terms, own)

    def all_gather(self, rows: Tensor) -> Callable[[], object]:
        works: list[dist.Work | None] = []  # PyTorch's annotations do not know that these are never None
        for owner, place in enumerate(self.places):
            if owner != self.own:
                peer = dist.get_global_rank(self._group, owner)
                works.append(dist.isend(rows[-1], peer, self._group))
                works.append(dist.irecv(rows[place], peer, self._group))
        return lambda: [work.wait() for work in works if work is not None]


class RowSum:
    """A sum of rows under way.

    Args:
        terms: to be added up here, when all have come, in the order of the members: so a sum does not depend on which
            of them has it. None where NCCL sums in place.
        own: where their sum goes.
    """

    def __init__(self, work: dist.Work, terms: Sequence[Tensor] = (), own: Tensor | None = None) -> None:
        self._work: dist.Work | None = work
        self._terms, self._own = terms, own

    def poll(self) -> None:
        """Add up if all terms have come: they take as much memory as all gradients of the bucket."""
        if self._terms and self._work is not None and self._work.is_completed():
            self.wait()

    def wait(self) -> None:
        """Wait for the sum; on a GPU the stream waits, and the host does not."""
        if self._work is None:
            return
        self._work.wait()
        if self._own is not None:
            total, *others = self._terms
            for other in others:
                total += other
            if total is not self._own:
                self._own.copy_(total)
        self._work, self._terms = None, ()


def exchange_over(group: dist.ProcessGroup) -> Exchange:
    """Return the exchange that suits the group's backend."""
    return (_Direct if dist.get_backend(group) == GLOO else Exchange)(group)


def _named(new: str, old: str) -> Callable[..., Any]:
    # PyTorch 2.13 renamed some functions of torch.distributed.
    function: Callable[..., Any] = getattr(dist, new, None) or getattr(dist, old)
    return function


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
        try:
            self._reduce(gradients, group)
        except RuntimeError:
            for gradient in gradients.values():
                check_dense(gradient)
            raise

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


def check_dense(gradient: Tensor) -> None:
    """Check a gradient that is to be added to those of other workers; raise PlanError for a sparse one."""
    if gradient.is_sparse:
        raise PlanError(
            f"the gradient of a weight of shape {tuple(gradient.shape)} is sparse, and the replicas of a stage, or "
            "stages that share a weight, add up dense ones",
            hint="build the embedding with sparse=False, or price a plan with one replica of its stage: `replicas=1,2`",
        )


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
