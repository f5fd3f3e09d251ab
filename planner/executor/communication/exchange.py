"""Exchange a tensor of equal rows, one for each member of a group: sum every row at its owner, or hand every row on.

Both halves of a ring all-reduce move (r-1)/r of the bytes (Patarasuk & Yuan 2009, section 3), and so do these.
NCCL has both. gloo's reduce_scatter is an all-reduce that is thrown away in part: 28 ms for 16 MB where an all-reduce
takes 21. So over gloo each member sends every row to its owner, or its own row to every other member: 8 ms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planner.workers.groups import GLOO


class Exchange(ABC):
    """Exchanges rows among the members of `group`.

    All members call the same methods in the same order: what travels carries no header.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.own = dist.get_rank(group)  # this member's row
        self.members = dist.get_world_size(group)

    @abstractmethod
    def places(self) -> Sequence[int]:
        """Return, by owner, where its row lies in a tensor of `members` rows."""

    @abstractmethod
    def reduce_scatter(self, rows: Tensor) -> ReduceScatter:
        """Begin to add up all members' rows, each at its owner, which has the sum in place of its own row.

        Args:
            rows: of shape (members, elements), in the order of `places`. It may be read and written until the end.
        """

    @abstractmethod
    def all_gather(self, rows: Tensor) -> Callable[[], object]:
        """Begin to give every member all owners' rows, and return what waits for it.

        Args:
            rows: of shape (members, elements), in the order of `places`; only this member's own row has content.
        """


def exchange_over(group: dist.ProcessGroup) -> Exchange:
    """Return the exchange that suits the group's backend."""
    return (_Direct if dist.get_backend(group) == GLOO else _Collective)(group)


class ReduceScatter:
    """A sum of rows under way."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def done(self) -> bool:
        """Return whether `wait` would return at once and free memory."""
        return False  # NCCL sums in place: nothing is freed by asking

    def wait(self) -> None:
        """Wait for the sum; on a GPU the stream waits, and the host does not."""
        self._work.wait()


class _Collective(Exchange):
    """NCCL's own operations, in place."""

    def places(self) -> Sequence[int]:
        return range(self.members)

    def reduce_scatter(self, rows: Tensor) -> ReduceScatter:
        post = _named("reduce_scatter_single", "reduce_scatter_tensor")
        return ReduceScatter(post(rows[self.own], rows.view(-1), group=self.group, async_op=True))

    def all_gather(self, rows: Tensor) -> Callable[[], object]:
        post = _named("all_gather_single", "all_gather_into_tensor")
        work = post(rows.view(-1), rows[self.own], group=self.group, async_op=True)
        return lambda: work.wait()


class _Direct(Exchange):
    """Every row goes straight to its owner, over gloo.

    The own row is the last one: the others then lie together, in the order of the members, as all_to_all takes them.
    A message of its own for each row would do, but gloo does not say whether messages have arrived.
    """

    def places(self) -> Sequence[int]:
        last = self.members - 1
        return [last if owner == self.own else owner - (owner > self.own) for owner in range(self.members)]

    def reduce_scatter(self, rows: Tensor) -> ReduceScatter:
        elements = rows.shape[1]
        sizes = [0 if member == self.own else elements for member in range(self.members)]
        received = torch.empty_like(rows[:-1])
        work = dist.all_to_all_single(received.view(-1), rows[:-1].view(-1), sizes, sizes, self.group, async_op=True)
        assert work is not None
        return _DirectSum(work, received, rows[-1], self.own)

    def all_gather(self, rows: Tensor) -> Callable[[], object]:
        works: list[dist.Work | None] = []  # PyTorch's annotations do not know that these are never None
        for owner, place in enumerate(self.places()):
            if owner != self.own:
                peer = dist.get_global_rank(self.group, owner)
                works.append(dist.isend(rows[-1], peer, self.group))
                works.append(dist.irecv(rows[place], peer, self.group))
        return lambda: [work.wait() for work in works if work is not None]


class _DirectSum(ReduceScatter):
    """Adds up in the order of the members, so that a sum does not depend on which of them has it."""

    def __init__(self, work: dist.Work, received: Tensor, own: Tensor, index: int) -> None:
        super().__init__(work)
        self._received: Tensor | None = received
        self._own = own
        self._index = index

    def done(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        if self._received is None:
            return
        self._work.wait()
        terms = list(self._received)
        terms.insert(self._index, self._own)
        total, *others = terms
        for other in others:
            total += other
        if total is not self._own:
            self._own.copy_(total)
        self._received = None  # as large as all gradients of the bucket, but for the own ones


def _named(new: str, old: str) -> Callable[..., Any]:
    # PyTorch 2.13 renamed some functions of torch.distributed.
    function: Callable[..., Any] = getattr(dist, new, None) or getattr(dist, old)
    return function
