"""What the code of stages calls where ranks divide sequences: exchanges of tokens, and what needs
them.

Attention has an all-to-all before it, after which each rank has whole sequences for its part of the
heads, and one behind it, after which it has its tokens for all heads (Jacobs et al., "DeepSpeed
Ulysses", 2023, arXiv 2309.14509, section 3.1).

    queries, keys, values    (samples, heads, tokens/c, features)
    all-to-all               (samples, heads/c, tokens, features)
    attention                the same
    all-to-all               (samples, heads, tokens/c, features)

Gradients. What is differentiated is the sum over the ranks of each one's share of the loss. So the
gradient that a rank has of a value or a weight counts what this rank computes, and the sum over the
ranks is the gradient of one process. The transpose of each exchange follows: a gather's is a sum of
which each rank keeps its part; an all-to-all's is the all-to-all back. Weights are summed once per
update, as those of replicas are.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from planner.model.context.tokens import MEAN
from planner.model.tensor.group import TensorGroup, attention_with_noise, expanded
from planner.model.tensor.row_exchange import exchange_over, over_gloo, swap


class SequenceGroup(TensorGroup):
    """The ranks that divide the sequences of a replica; each has consecutive tokens.

    A dimension of `tokens` may hold several sequences one after the other: `tokens` is the number
    of those of one, on all ranks.
    """

    def own_tokens(self, value: Tensor, dimension: int, tokens: int) -> Tensor:
        """Return this rank's part of a value that is whole on every rank."""
        by_sequence = torch.unflatten(value, dimension, (-1, tokens))
        part = by_sequence.chunk(self.degree, dimension + 1)[self.place]
        return part.flatten(dimension, dimension + 1).contiguous()

    def all_tokens(self, value: Tensor, dimension: int, tokens: int) -> Tensor:
        """Return the whole of a value of which each rank has a part."""
        by_sequence = torch.unflatten(value, dimension, (-1, tokens // self.degree))
        whole: Tensor = _Gathered.apply(  # type: ignore[no-untyped-call]
            by_sequence, dimension + 1, self.mesh.get_group()
        )
        return whole.flatten(dimension, dimension + 1)

    def counted_once(self, loss: Tensor) -> Tensor:
        """Return a loss that every rank has whole, as the sum of the ranks' shares: the first one's
        is all of it.
        """
        if not loss.requires_grad:
            return loss
        share: Tensor = _Share.apply(loss, self.place == 0)  # type: ignore[no-untyped-call]
        return share

    def sequence_dropout(
        self, value: Tensor, p: float, train: bool, *, dimension: int, tokens: int
    ) -> Tensor:
        """Drop what dropout of the whole value drops: every rank draws all of it, and takes its
        part.
        """
        if not train or p == 0:
            return value
        sizes = list(value.shape)
        sizes[dimension] *= self.degree
        noise = F.dropout(torch.ones(sizes, dtype=value.dtype, device=value.device), p)
        return value * self.own_tokens(noise, dimension, tokens)

    def sequence_attention(
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
        """Return scaled_dot_product_attention for this rank's tokens, of which these are parts.

        Args:
            query: of shape (..., heads, tokens of this rank, features).
            key: the same, with as many heads or, with `enable_gqa`, fewer.
            value: as `key`.
            attn_mask: for all tokens, of one head or of all.
            dropout_p: probability with which an attention weight is dropped.
            is_causal: whether a token attends to those before it alone.
            scale: of the products.
            enable_gqa: whether several queries' heads share one of the keys'.
        """
        heads = query.shape[-3]
        if enable_gqa and key.shape[-3] % self.degree:
            key = expanded(key, heads)
            value = expanded(value, heads)
            enable_gqa = False

        mask = attn_mask
        if mask is not None and mask.dim() >= 3 and mask.shape[-3] == heads:
            mask = mask.chunk(self.degree, -3)[self.place]

        q, k, v = (self._by_heads(each) for each in (query, key, value))
        if dropout_p == 0:
            made = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )
        else:
            # The kernels draw the numbers themselves, those of a part others than those of the
            # whole.
            shape = (*query.shape[:-2], q.shape[-2], k.shape[-2])
            noise = F.dropout(torch.ones(shape, dtype=q.dtype, device=q.device), dropout_p)
            made = attention_with_noise(
                q,
                k,
                v,
                mask,
                noise.chunk(self.degree, -3)[self.place],
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )

        dimensions = made.dim()
        return self._exchanged(made, given=dimensions - 2, taken=dimensions - 3)

    def sequence_cross_entropy(
        self,
        logits: Tensor,
        labels: Tensor,
        weight: Tensor | None = None,
        reduction: int = MEAN,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        *,
        dimension: int,
        tokens: int,
    ) -> Tensor:
        """Return the cross entropy of all tokens, whole on every rank: a mean or a sum.

        Args:
            logits: of this rank's tokens, which are along `dimension`.
            labels: of all tokens, so that each rank knows how many count in the mean.
            weight: None.
            reduction: PyTorch's number of a mean or a sum.
            ignore_index: the label of tokens that do not count.
            label_smoothing: 0.
            dimension: of the logits' tokens; the second one is that of the classes.
            tokens: of a sequence.
        """
        assert weight is None
        assert label_smoothing == 0
        own = self.own_tokens(labels, max(0, dimension - 1), tokens)
        loss = F.cross_entropy(logits, own, ignore_index=ignore_index, reduction="sum")
        if reduction == MEAN:
            loss = loss / (labels != ignore_index).sum()
        total: Tensor = _Summed.apply(loss, self.mesh.get_group())  # type: ignore[no-untyped-call]
        return total

    def _by_heads(self, value: Tensor) -> Tensor:
        """Return all tokens of this rank's heads, for its tokens of all heads."""
        dimensions = value.dim()
        return self._exchanged(value, given=dimensions - 3, taken=dimensions - 2)

    def _exchanged(self, value: Tensor, *, given: int, taken: int) -> Tensor:
        made: Tensor = _AllToAll.apply(  # type: ignore[no-untyped-call]
            value, given, taken, self.mesh.get_group()
        )
        return made


class _AllToAll(torch.autograd.Function):
    """A value whose parts along one dimension go to the other ranks, whose parts come along
    another.
    """

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, given: int, taken: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.back = taken, given, group
        degree = dist.get_world_size(group)
        sent = torch.stack([part.contiguous() for part in value.chunk(degree, given)])
        received = torch.empty_like(sent)
        if over_gloo(group):
            own = dist.get_rank(group)
            received[own] = sent[own]
            swap(group, sent.__getitem__, received.__getitem__)()
        else:
            dist.all_to_all_single(received, sent, group=group)

        return torch.cat(list(received), taken)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        moved: Tensor = _AllToAll.apply(gradient, *ctx.back)  # type: ignore[no-untyped-call]
        return moved, None, None, None


class _Gathered(torch.autograd.Function):
    """All ranks' parts of a value along a dimension; of the gradients' sum each keeps its part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dimension: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dimension = dimension
        ctx.group = group
        rows = part.new_empty((dist.get_world_size(group), *part.shape))
        exchange = exchange_over(group)
        rows[exchange.own] = part
        exchange.all_gather(rows)()
        return torch.cat(list(rows), dimension)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        degree = dist.get_world_size(ctx.group)
        rows = torch.stack([part.contiguous() for part in gradient.chunk(degree, ctx.dimension)])
        exchange = exchange_over(ctx.group)
        exchange.reduce_scatter(rows)()
        return rows[exchange.own], None, None


class _Summed(torch.autograd.Function):
    """The sum of the ranks' values, on every rank; so is the gradient of each."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Share(torch.autograd.Function):
    """A value as it is, whose gradient counts on one rank alone."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, counts: bool) -> Tensor:
        ctx.counts = counts
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.counts:
            return gradient, None
        return torch.zeros_like(gradient), None
