"""A linear head and its cross entropy over a part of the tokens at a time, so that logits of all
tokens never exist at once.

    hidden states [N, H] -> chunks -> head -> logits [N/c, V] -> cross entropy -> loss of each token

Each chunk keeps its hidden states alone, and computes its logits again in the backward (Chen et al.
2016, arXiv 1604.06174). Liger's kernel (Hsu et al. 2024, section 3.2) makes the gradients in the
forward instead: no product is computed twice there, but each microbatch in flight holds a gradient
of the head's weights.

The loss of a token depends on its own hidden states alone. A mean is the sum over tokens divided by
what PyTorch divides by: the tokens that are not ignored, or the sum of their classes' weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from planner.errors import CaptureError
from planner.model.capture.graph import LayerGraph
from planner.model.capture.regions import regions_of
from planner.model.stage.code import FUNCTIONS
from planner.model.torch_private import OpOverload

_aten = torch.ops.aten
_CROSS_ENTROPY = _aten.cross_entropy_loss.default
_HEADS = (_aten.linear.default, _aten.matmul.default, _aten.mm.default)
# They keep the order of the tokens where they keep the number of classes.
_VIEWS = (
    _aten.view.default,
    _aten.reshape.default,
    _aten.flatten.using_ints,
    _aten._unsafe_view.default,
)
_SAME_VALUES = (_aten.contiguous.default, _aten.clone.default, _aten.alias.default)
_CASTS = (_aten.to.dtype, _aten._to_copy.default)
_SLICE = _aten.slice.Tensor
_HINT = "plan with `stack=eager`, whose loss is computed whole"


class UnchunkedLossError(CaptureError):
    """The model's loss cannot be computed in chunks of tokens."""


@dataclass(frozen=True, eq=False)
class HeadAndLoss:
    """The end of a model whose loss can be computed in chunks.

    Attributes:
        head: the product that makes the logits, of hidden states whose last dimension it sums over.
        between: operations from the head to the cross entropy, each on the result of the one
            before.
        cross_entropy: of the logits, [N, V], and of N labels.
        first_layer, last_layer: positions of the layers of the head and of the cross entropy.
    """

    head: fx.Node
    between: tuple[fx.Node, ...]
    cross_entropy: fx.Node
    first_layer: int
    last_layer: int

    @property
    def replaced(self) -> tuple[fx.Node, ...]:
        """The operations that run in chunks."""
        return (self.head, *self.between, self.cross_entropy)

    @property
    def hidden(self) -> fx.Node:
        """The hidden states that the head takes."""
        return _node(self.head.args[0])

    @property
    def slices(self) -> tuple[fx.Node, ...]:
        """Those of the operations between that leave tokens out."""
        return tuple(node for node in self.between if _leaves_out_tokens(node))

    @property
    def others(self) -> tuple[fx.Node, ...]:
        """Tensors that every chunk reads whole: weights of the head and of the classes."""
        nodes = (*self.head.args[1:], *self.head.kwargs.values(), _argument(self, "weight"))
        return tuple(dict.fromkeys(node for node in nodes if isinstance(node, fx.Node)))

    @property
    def labels(self) -> fx.Node:
        return _node(_argument(self, "target"))


def head_and_loss(graph: LayerGraph) -> HeadAndLoss:
    """Return the operations of a graph that can run in chunks of tokens.

    Raises:
        UnchunkedLossError: when the loss is no cross entropy of a linear head's logits, or what is
            between them, or reads them, needs all of them.
    """
    if graph.blocks is not None:
        raise _refused("blocks() hides its operations")
    losses = [node for node in graph.module.graph.nodes if node.target == _CROSS_ENTROPY]
    if len(losses) != 1 or losses[0] not in graph.loss_path:
        raise _refused(f"the graph has {len(losses)} operations cross_entropy, not one")

    cross_entropy = losses[0]
    logits = _node(cross_entropy.args[0])
    labels = _node(cross_entropy.args[1])
    if _value(logits).dim() != 2 or _value(labels).is_floating_point():
        raise _refused("its cross entropy is not one of rows of logits and a label for each")
    head, between = _to_the_head(logits)
    found = HeadAndLoss(head, between, cross_entropy, graph.owner[head], graph.owner[cross_entropy])
    _check_readers(graph, found)
    return found


def end_within(graph: LayerGraph, positions: Sequence[int]) -> HeadAndLoss | None:
    """Return what runs in chunks in a part of a graph, the layers at some positions; None where it
    has no loss.

    Raises:
        UnchunkedLossError: when the head is in another part than the loss, and as `head_and_loss`
            does.
    """
    if graph.owner[graph.loss] not in positions:
        return None
    found = head_and_loss(graph)
    if found.first_layer not in positions:
        head = graph.layers[found.first_layer].name
        raise _refused(f"its head, in layer '{head}', is in an earlier stage than the loss")
    return found


def without_chunks(
    graph: LayerGraph, positions: Sequence[int], groups: Sequence[Sequence[str]]
) -> list[Sequence[str]]:
    """Return groups of layers that recompute, without those layers that run in chunks and are not
    all in one group: chunks are recomputed by themselves.
    """
    found = end_within(graph, positions)
    if found is None:
        return list(groups)
    layers = graph.layers[found.first_layer : found.last_layer + 1]
    names = {layer.name for layer in layers}
    kept = [
        group if names.issubset(group) else [name for name in group if name not in names]
        for group in groups
    ]
    return [group for group in kept if group]


def _refused(why: str) -> UnchunkedLossError:
    return UnchunkedLossError(f"the loss cannot be computed in chunks of tokens: {why}", hint=_HINT)


def _to_the_head(logits: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """Return the head, and the operations from it to the logits that the cross entropy takes."""
    between: list[fx.Node] = []
    node = logits
    while not _is_head(node):
        if not _keeps_rows(node):
            raise _refused(f"between the head and it is {node.target}, which may need all logits")
        between.insert(0, node)
        node = _node(node.args[0])

    views = [place for place, each in enumerate(between) if each.target in _VIEWS]
    slices = [place for place, each in enumerate(between) if _leaves_out_tokens(each)]
    if views and slices and min(views) < max(slices):
        raise _refused("tokens are left out after the logits got another shape")
    if any(regions_of(each) for each in (node, *between)):
        raise _refused("its logits are made under an autocast or a no_grad of the model's own")
    return node, tuple(between)


def _is_head(node: fx.Node) -> bool:
    """Return whether a node multiplies rows by a matrix that is the same for all of them."""
    if node.target not in _HEADS:
        return False
    return _value(_node(node.args[1])).dim() == 2


def _keeps_rows(node: fx.Node) -> bool:
    """Return whether an operation computes the logits of a token from those of that token."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.target in _VIEWS:
        before = _value(node.args[0]).shape[-1]
        return bool(isinstance(before, int) and _value(node).shape[-1] == before)
    if node.target == _SLICE:
        return _leaves_out_tokens(node) or _value(node).shape == _value(node.args[0]).shape
    return node.target in _SAME_VALUES or _is_by_element(node)


def _is_by_element(node: fx.Node) -> bool:
    """Return whether an operation casts, or computes each logit from itself and numbers."""
    if len(node.all_input_nodes) != 1 or node.args.count(node.args[0]) != 1:
        return False
    if node.target in _CASTS:
        return node.kwargs.get("device") is None
    target = node.target
    if not isinstance(target, OpOverload) or target._schema.is_mutable:
        return False
    draws = torch.Tag.nondeterministic_seeded in target.tags
    return torch.Tag.pointwise in target.tags and not draws


def _leaves_out_tokens(node: fx.Node) -> bool:
    """Return whether a node is a slice along another dimension than that of the classes."""
    if node.target != _SLICE:
        return False
    dimensions = _value(node).dim()
    dimension = node.args[1] if len(node.args) > 1 else 0
    if not all(isinstance(each, int) or each is None for each in node.args[1:]):
        return False
    assert isinstance(dimension, int)
    return dimension % dimensions != dimensions - 1


def _check_readers(graph: LayerGraph, found: HeadAndLoss) -> None:
    """Raise UnchunkedLossError where another operation reads the logits."""
    replaced = set(found.replaced)
    for node in found.replaced[:-1]:
        for user in node.users:
            if user in graph.owner and user not in replaced:
                raise _refused(f"{user.target} reads the logits, too")


def _argument(found: HeadAndLoss, name: str) -> Any:
    """Return an argument of the cross entropy."""
    return _arguments(found.cross_entropy)[name]


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an operation by name, with its defaults."""
    assert isinstance(node.target, OpOverload)
    values = {}
    for place, argument in enumerate(node.target._schema.arguments):
        default = argument.default_value
        values[argument.name] = node.kwargs.get(argument.name, default)
        if place < len(node.args):
            values[argument.name] = node.args[place]
    return values


def _node(value: Any) -> fx.Node:
    if not isinstance(value, fx.Node):
        raise _refused("it takes what is no tensor")
    return value


def _value(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def chunked_code(found: HeadAndLoss, chunks: int) -> Callable[..., Tensor]:
    """Return what computes the loss in so many chunks: (hidden states, labels, *others) -> loss.

    It has no node: these lead to the whole model's weights.
    """
    places = {node: place for place, node in enumerate(found.others)}
    head = _Call.of(found.head, places)
    between = [
        _Call.of(node, places)
        for node in found.between
        if node.target not in _VIEWS and node.target != _SLICE
    ]
    slices = [_Call.of(node, places) for node in found.slices]
    options = _arguments(found.cross_entropy)
    weight = _Place.of(options["weight"], places)
    ignored = options["ignore_index"]
    smoothing = options["label_smoothing"]
    reduction = options["reduction"]

    def of_rows(rows: Tensor, labels: Tensor, *others: Tensor) -> Tensor:
        """Return the loss of each token of a chunk, [N/c]."""
        value = head(rows, others)
        for call in between:
            value = call(value, others)
        return F.cross_entropy(
            value,
            labels,
            weight=weight.read(others),
            ignore_index=ignored,
            reduction="none",
            label_smoothing=smoothing,
        )

    def loss_in_chunks(hidden: Tensor, labels: Tensor, *others: Tensor) -> Tensor:
        for call in slices:
            hidden = call(hidden, others)
        rows = hidden.reshape(-1, hidden.shape[-1])

        losses = [
            _run_again(of_rows, part, its_labels, *others)
            for part, its_labels in zip(rows.chunk(chunks), labels.chunk(chunks), strict=True)
        ]
        return _reduced(torch.cat(losses), labels, ignored, weight.read(others), reduction)

    return loss_in_chunks


def _run_again(code: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """Return what `code` computes; it keeps its arguments, and runs again in the backward."""
    if not torch.is_grad_enabled():
        return code(*values)
    made: Tensor = checkpoint(code, *values, use_reentrant=False, preserve_rng_state=False)
    return made


_NONE, _MEAN = 0, 1  # PyTorch's numbers of reductions


def _reduced(
    losses: Tensor, labels: Tensor, ignored: int, weight: Tensor | None, reduction: int
) -> Tensor:
    """Return the losses of tokens as the cross entropy of all of them returns them."""
    if reduction == _NONE:
        return losses
    if reduction != _MEAN:
        return losses.sum()

    counted = labels != ignored
    if weight is None:
        return losses.sum() / counted.sum()
    weights = weight[torch.where(counted, labels, 0)]
    return losses.sum() / (weights * counted).sum()


@dataclass(frozen=True)
class _Place:
    """Where an argument is: among the tensors that each chunk reads whole, or here."""

    number: int | None
    value: Any = None

    @classmethod
    def of(cls, argument: Any, places: dict[fx.Node, int]) -> "_Place":
        if isinstance(argument, fx.Node):
            return cls(places[argument])
        return cls(None, argument)

    def read(self, others: Sequence[Tensor]) -> Any:
        if self.number is None:
            return self.value
        return others[self.number]


@dataclass(frozen=True)
class _Call:
    """An operation on the tensor that it takes first."""

    function: Callable[..., Tensor]
    args: tuple[_Place, ...]
    kwargs: dict[str, _Place]

    @classmethod
    def of(cls, node: fx.Node, places: dict[fx.Node, int]) -> "_Call":
        args = tuple(_Place.of(each, places) for each in node.args[1:])
        kwargs = {name: _Place.of(each, places) for name, each in node.kwargs.items()}
        assert callable(node.target)
        return cls(FUNCTIONS.get(node.target, node.target), args, kwargs)

    def __call__(self, value: Tensor, others: Sequence[Tensor]) -> Tensor:
        args = [each.read(others) for each in self.args]
        kwargs = {name: each.read(others) for name, each in self.kwargs.items()}
        return self.function(value, *args, **kwargs)
