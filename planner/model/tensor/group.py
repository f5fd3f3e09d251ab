"""The DTensors of a stage's code: what a group of ranks computes each with its part of the weights.

Values are whole on every rank, as ordinary tensors, up to the first product that the ranks divide,
and behind the one whose results they sum up. Between the two they are DTensors. So all that
surrounds a stage sees ordinary tensors.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from planner.model.tensor.dimensions import Cut
from planner.model.tensor.row_exchange import over_gloo, swap
from planner.model.torch_private import FakeTensor


class Rows(NamedTuple):
    """The rows of a rank's experts, among those of all."""

    offsets: Tensor  # where those of each expert end, from the first one on
    start: int
    length: int
    total: int


class Exchange(NamedTuple):
    """How ranks that have samples of their own exchange rows, so that each has those of its
    experts.
    """

    offsets: Tensor  # where the rows of each of this rank's experts end
    order: Tensor  # of the rows that come, by sender, in which they are by expert
    back: Tensor  # the inverse
    sends: list[int]  # rows to each rank
    takes: list[int]


class TensorGroup:
    """The ranks that divide a worker's stages between them; the code of stages calls its
    methods.
    """

    def __init__(self, degree: int, place: int) -> None:
        self.degree = degree
        self.place = place
        self._mesh: DeviceMesh | None = None

    def connect(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Compute with the other ranks from now on."""
        self._mesh = DeviceMesh.from_group(group, device.type)

    @property
    def mesh(self) -> DeviceMesh:
        """The group as DTensor knows it."""
        assert self._mesh is not None, "the workers have not joined"
        return self._mesh

    def enter(self, value: Tensor) -> Tensor:
        """Return a value that all ranks have whole, for operations on divided ones; their gradients
        are summed up.
        """
        return DTensor.from_local(value, self.mesh, [Replicate()], run_check=False)

    def part(self, value: Tensor, dimension: int) -> Tensor:
        """Return the value of which this rank has a part along `dimension`."""
        return DTensor.from_local(value, self.mesh, [Shard(dimension)], run_check=False)

    def scatter(self, value: Tensor, dimension: int) -> Tensor:
        """Return a value of which each rank keeps its part along `dimension`, where it may be whole
        or a sum so far.
        """
        own = Shard(dimension)
        whole = value
        if not isinstance(value, DTensor):
            whole = self.enter(value)
        assert isinstance(whole, DTensor)
        if whole.placements == (own,):
            return whole
        return whole.redistribute(placements=[own])

    def gather(self, value: Tensor) -> Tensor:
        """Return the whole of a value that ranks divide by tokens, for a product whose weight they
        divide.
        """
        whole: Tensor = _Gathered.apply(value)  # type: ignore[no-untyped-call]
        return whole

    def product(
        self, gathered: DTensor, compute: Callable[..., Tensor], *args: Any, **kwargs: Any
    ) -> Tensor:
        """Compute with what `gather` returned, or a view of it; the backward gathers it again from
        the part.
        """
        node = gathered.grad_fn
        like = (gathered.placements, gathered.numel())

        def kept(saved: Tensor) -> Any:
            is_like = isinstance(saved, DTensor) and (saved.placements, saved.numel()) == like
            return (saved.shape, saved.dtype) if is_like else saved  # autocast has rounded it

        def used(kept: Any) -> Tensor:
            return _again(node).view(kept[0]).to(kept[1]) if isinstance(kept, tuple) else kept

        with saved_tensors_hooks(kept, used) if node is not None else nullcontext():
            return compute(*args, **kwargs)

    def leave(self, value: Tensor, dimension: int = 0, blocks: tuple[int, ...] = ()) -> Tensor:
        """Return a divided value as a tensor that is whole on every rank; `Cut` explains dimension
        and blocks.
        """
        assert isinstance(value, DTensor)
        whole: Tensor = value.redistribute(placements=[Replicate()]).to_local()
        if not blocks:
            return whole
        return Cut(dimension, blocks).whole(whole.chunk(self.degree, dimension))

    def rows(self, offsets: Tensor, whole: Tensor) -> Rows:
        """Return which rows of a value belong to this rank's experts, given where those of each
        expert end.

        Without data, as many as any other rank's. The host waits for the offsets, as sizes depend
        on them.
        """
        each = offsets.shape[0] // self.degree
        total = whole.shape[0]
        if isinstance(offsets, FakeTensor):
            return Rows(
                offsets[:each], self.place * total // self.degree, total // self.degree, total
            )

        first = self.place * each
        ends = [0, *offsets.tolist()]
        start = ends[first]
        return Rows(offsets[first : first + each] - start, start, ends[first + each] - start, total)

    def take(self, value: Tensor, rows: Rows) -> Tensor:
        """Return this rank's rows of a value."""
        return value.narrow(0, rows.start, rows.length)

    def summand(self, value: Tensor, rows: Rows) -> Tensor:
        """Return a value with zeros for the rows of other ranks."""
        after = rows.total - rows.start - rows.length
        return F.pad(value, (*[0, 0] * (value.dim() - 1), rows.start, after))

    def alone(self, value: Tensor) -> Tensor:
        """Return a value that all ranks have whole, for a computation that each does for itself
        with a part.
        """
        if not value.requires_grad:
            return value
        made: Tensor = _Alone.apply(value, self.mesh.get_group())  # type: ignore[no-untyped-call]
        return made

    def exchange(self, offsets: Tensor, whole: Tensor) -> Exchange:
        """Return how the rows of a value of this rank's samples get to the ranks of their experts.

        Without data, and where the others are not there, it gets as many as it gives; see `rows`.
        """
        given = offsets.diff(prepend=offsets.new_zeros(1)).view(self.degree, -1)
        taken = self._moved(given)
        if dist.get_backend(self.mesh.get_group()) == "fake":
            taken = given
        if isinstance(offsets, FakeTensor):
            sends = takes = [whole.shape[0] // self.degree] * self.degree
        else:
            sends, takes = torch.stack([given.sum(1), taken.sum(1)]).tolist()

        # The rows that come, rank by rank, in the order of the experts.
        experts = torch.arange(taken.shape[1], device=offsets.device).repeat(self.degree)
        expert_of = experts.repeat_interleave(taken.flatten(), output_size=sum(takes))
        order = expert_of.argsort(stable=True)
        ends = taken.sum(0).cumsum(0).to(offsets.dtype)
        return Exchange(ends, order, order.argsort(), sends, takes)

    def give(self, value: Tensor, rows: Exchange) -> Tensor:
        """Return the rows of this rank's experts, of the values of all ranks."""
        return self._moved(value, rows.takes, rows.sends)[rows.order]

    def back(self, value: Tensor, rows: Exchange) -> Tensor:
        """Return the rows of this rank's samples, of the values that all ranks made of their
        experts' rows.
        """
        return self._moved(value[rows.back], rows.sends, rows.takes)

    def _moved(
        self, value: Tensor, takes: list[int] | None = None, sends: list[int] | None = None
    ) -> Tensor:
        group = self.mesh.get_group()
        if over_gloo(group) and not isinstance(value, FakeTensor):
            equal = [len(value) // self.degree] * self.degree
            swapped: Tensor = _Swapped.apply(  # type: ignore[no-untyped-call]
                value, takes or equal, sends or equal, group
            )
            return swapped

        moved: Tensor = funcol.all_to_all_single_autograd(value, takes, sends, group)
        return moved

    def matrices(self, weights: Tensor) -> Tensor:
        """Return this rank's experts of weights that are whole, or divided by experts."""
        own: Tensor = self.scatter(weights, 0).to_local()  # type: ignore[attr-defined]
        return own

    def split(self, value: Tensor, sizes: Sequence[int], dimension: int) -> tuple[Tensor, ...]:
        """Return the blocks of a packed value, of these sizes in the whole, each of which the ranks
        divide.
        """
        own = [size // self.degree for size in sizes]
        parts = torch.split(_local(value, Shard(dimension)), own, dimension)
        return tuple(self.part(each, dimension) for each in parts)

    def narrow(self, value: Tensor, start: int, length: int, dimension: int) -> Tensor:
        """Return one block of a packed value, which the ranks divide."""
        own = _local(value, Shard(dimension))
        return self.part(
            own.narrow(dimension, start // self.degree, length // self.degree), dimension
        )

    def stack(self, value: Tensor, blocks: int, dimension: int) -> Tensor:
        """Return a packed value with a dimension of its own for its blocks, before the one that the
        ranks divide.
        """
        own = _local(value, Shard(dimension))
        size = own.shape[dimension] // blocks
        return self.part(
            own.reshape(*own.shape[:dimension], blocks, size, *own.shape[dimension + 1 :]),
            dimension + 1,
        )

    def sum(self, value: Tensor) -> Tensor:
        return DTensor.from_local(value, self.mesh, [Partial()], run_check=False).full_tensor()

    def dropout(self, value: DTensor, p: float, train: bool) -> Tensor:
        """Drop what dropout of the whole value drops: every rank draws all of it, and takes its
        part.
        """
        if not train or p == 0:
            return value
        noise = F.dropout(torch.ones(value.shape, dtype=value.dtype, device=value.device), p)
        dimension = next((each.dim for each in value.placements if isinstance(each, Shard)), None)
        return value * (self.enter(noise) if dimension is None else self.scatter(noise, dimension))

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attend with each rank's heads: `scaled_dot_product_attention`, of which DTensor lacks the
        CPU's kernels.

        Where they do not divide the heads, all compute the whole; key-value heads are copied for
        the query's.
        """
        dimension = query.dim() - 3
        heads = query.shape[dimension]
        if enable_gqa and key.shape[dimension] % self.degree:
            key = expanded(key, heads)
            value = expanded(value, heads)
            enable_gqa = False

        divides = (
            dimension >= 0 and heads % self.degree == 0 and key.shape[dimension] % self.degree == 0
        )
        placement = Shard(dimension) if divides else Replicate()
        q, k, v = (_local(each, placement) for each in (query, key, value))
        mask = None
        if attn_mask is not None:
            mask = self._local_mask(attn_mask, heads, divides=divides)

        if dropout_p == 0:
            made = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return DTensor.from_local(made, self.mesh, [placement], run_check=False)

        # By its formula: the kernels draw the numbers themselves, those of a part others than those
        # of the whole.
        shape = (*query.shape[:-1], key.shape[-2])
        noise = F.dropout(torch.ones(shape, dtype=query.dtype, device=query.device), dropout_p)
        if divides:
            noise = noise.chunk(self.degree, dimension)[self.place]
        made = attention_with_noise(
            q, k, v, mask, noise, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return DTensor.from_local(made, self.mesh, [placement], run_check=False)

    def _local_mask(self, mask: Tensor, heads: int, *, divides: bool) -> Tensor:
        """Return this rank's part of an attention mask.

        Args:
            mask: for all heads alike, or with a dimension of `heads` before the last two.
            divides: whether each rank attends with its own heads, so that the gradient of a mask
                for all heads is the sum of the ranks'.
        """
        assert isinstance(mask, DTensor)
        placement: Placement = Replicate()
        gradient: Placement = Partial() if divides else Replicate()
        if divides and mask.dim() >= 3 and mask.shape[-3] == heads:
            placement = gradient = Shard(mask.dim() - 3)
        return mask.redistribute(placements=[placement]).to_local(grad_placements=[gradient])


def _local(value: Tensor, placement: Placement) -> Tensor:
    """Return this rank's part of a value that is placed so."""
    assert isinstance(value, DTensor)
    part: Tensor = value.redistribute(placements=[placement]).to_local()
    return part


def attention_with_noise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    noise: Tensor,
    *,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Return attention whose weights are multiplied by `noise`, of shape (..., queries, keys), in
    place of dropout.
    """
    if enable_gqa:
        key = expanded(key, query.shape[-3])
        value = expanded(value, query.shape[-3])
    if is_causal:
        square = (query.shape[-2], key.shape[-2])
        mask = torch.ones(square, dtype=torch.bool, device=query.device).tril()
    weights = _attention_weights(query, key, mask, scale)
    return (weights * noise) @ value


def _attention_weights(
    query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Return softmax(query key^T scale + mask), of shape (..., queries, keys).

    Queries that may attend to no key get zeros, as PyTorch's attention gives them.
    """
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    root = math.sqrt(scale)
    scores = (query * root) @ (key.transpose(-2, -1) * root)
    if mask is None:
        return scores.softmax(-1)
    if mask.dtype == torch.bool:
        masked = scores.masked_fill(mask.logical_not(), -math.inf)
    else:
        masked = scores + mask
    weights: Tensor = torch.ops.aten._safe_softmax(masked, -1)
    return weights


class _Alone(torch.autograd.Function):
    """A value as it is, whose gradient is the sum of what the ranks have."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        sum_of_ranks = funcol.all_reduce(gradient, "sum", ctx.group)
        summed: Tensor = funcol.wait_tensor(sum_of_ranks)  # type: ignore[no-untyped-call]
        return summed, None


class _Swapped(torch.autograd.Function):
    """Rows that go to other ranks, over gloo; their gradients come back."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, takes: list[int], sends: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.back = sends, takes, group
        own = dist.get_rank(group)
        whole = value.new_empty((sum(takes), *value.shape[1:]))
        given = torch.split(value.contiguous(), sends)
        taken = torch.split(whole, takes)
        taken[own].copy_(given[own])
        swap(group, given.__getitem__, taken.__getitem__)()
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        moved: Tensor = _Swapped.apply(gradient, *ctx.back)  # type: ignore[no-untyped-call]
        return moved, None, None, None


class _Gathered(torch.autograd.Function):
    """All ranks' parts of a value, which are gathered again for the backward of products
    with it.
    """

    @staticmethod
    def forward(ctx: Any, part: DTensor) -> DTensor:
        ctx.save_for_backward(part)
        ctx.placements = part.placements
        ctx.part = None
        ctx.whole = None
        return part.redistribute(placements=[Replicate()])

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> DTensor:
        ctx.whole = None
        return gradient.redistribute(placements=ctx.placements)


def _again(gathered: Any) -> DTensor:
    """Return the whole value in a backward: gathered once for all products with it."""
    if gathered.part is None:
        (gathered.part,) = gathered.saved_tensors  # which a layer that recomputes makes once
    if gathered.whole is None:
        gathered.whole = gathered.part.redistribute(placements=[Replicate()])
    whole: DTensor = gathered.whole
    return whole


def expanded(value: Tensor, heads: int) -> Tensor:
    times = heads // value.shape[-3]
    return value.unsqueeze(-3).expand(*value.shape[:-2], times, *value.shape[-2:]).flatten(-4, -3)
