"""Exchange a tensor's rows, one for each member of a group: sums go to their owners, or all get
what owners have.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """Exchanges a tensor of equal rows, one for each member of `group`, with NCCL's own operations,
    in place.

    Each method moves (r-1)/r of the bytes, as half a ring all-reduce. It begins at once, and
    returns what waits: on a GPU the stream, and not the host. All members call the same methods in
    the same order.

    Attributes:
        own: this member's number.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.own = dist.get_rank(group)

    def reduce_scatter(self, rows: Tensor) -> Callable[[], object]:
        """Add up all members' rows, each at its owner, which has the sum in place of its
        own row.
        """
        # PyTorch 2.13 renamed both operations.
        post: Callable[..., Any] = (
            getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        )
        work = post(rows[self.own], rows.view(-1), group=self._group, async_op=True)
        return lambda: work.wait()

    def all_gather(self, rows: Tensor) -> Callable[[], object]:
        """Give every member all owners' rows."""
        post: Callable[..., Any] = (
            getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        )
        work = post(rows.view(-1), rows[self.own], group=self._group, async_op=True)
        return lambda: work.wait()


class _Direct(Exchange):
    """Sends every row straight to its owner, over gloo, whose reduce_scatter is slower than its
    all-reduce.
    """

    def reduce_scatter(self, rows: Tensor) -> Callable[[], object]:
        """Start to send each row to its owner, whose own row becomes the sum when the result is
        called.
        """
        received = torch.empty_like(rows[1:])
        wait = swap(
            self._group, lambda peer: rows[peer], lambda peer: received[peer - (peer > self.own)]
        )

        def add_up() -> None:
            wait()
            # In the order of the members, so that a sum does not depend on which of them has it.
            rows[self.own] = reduce(
                torch.add, (*received[: self.own], rows[self.own], *received[self.own :])
            )

        return add_up

    def all_gather(self, rows: Tensor) -> Callable[[], object]:
        return swap(self._group, lambda peer: rows[self.own], lambda peer: rows[peer])


def exchange_over(group: dist.ProcessGroup) -> Exchange:
    """Return what exchanges rows over `group` fastest."""
    return (_Direct if over_gloo(group) else Exchange)(group)


def over_gloo(group: dist.ProcessGroup) -> bool:
    return dist.get_backend(group) == dist.Backend.GLOO


def swap(
    group: dist.ProcessGroup, given: Callable[[int], Tensor], taken: Callable[[int], Tensor]
) -> Callable[[], object]:
    """Send each other member what is `given` to it, and receive what is `taken` from it; return
    what waits for all.

    Receives come first: gloo's peer sends when it knows of one, and what tells it waits behind what
    was sent before. So its own all-to-all, which sends first, moves data one way after the other
    where a member is late.
    """
    # PyTorch's annotations do not know that none is None
    own = dist.get_rank(group)
    works = list[dist.Work | None]()
    others = [
        (peer, dist.get_global_rank(group, peer))
        for peer in range(dist.get_world_size(group))
        if peer != own
    ]
    works += [
        dist.irecv(value, rank, group) for peer, rank in others if (value := taken(peer)).numel()
    ]
    works += [
        dist.isend(value, rank, group) for peer, rank in others if (value := given(peer)).numel()
    ]
    return lambda: [work.wait() for work in works if work is not None]
