"""Which values of a captured graph the ranks of a group divide by tokens.

Each rank has consecutive tokens of every sequence. The walk begins at embeddings and products, and
goes on through operations that work on each token alone, and through attention, whose heads the
ranks divide meanwhile. What else looks at several tokens gets the whole value on every rank.

So the walk decides what is divided, and no result depends on it: positions, masks and labels are
whole on every rank, and operations on a part of the tokens take their part of them.

A dimension of the tokens may hold those of several sequences one after the other, as in a view of
shape (samples x tokens, features). A rank then has its part of each sequence.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from planner.errors import PlanError
from planner.model.capture.graph import LayerGraph
from planner.model.capture.operations import is_random
from planner.model.tensor.dimensions import (
    PRODUCTS,
    RESHAPES,
    dimension_of,
    packet_of,
    shape_of,
)
from planner.model.torch_private import HigherOrderOperator, OpOverload

_aten = torch.ops.aten
ATTENTION = _aten.scaled_dot_product_attention.default
CROSS_ENTROPY = _aten.cross_entropy_loss.default

WHOLE_SEQUENCES = "solve for whole sequences: leave out `context`"
# reductions of a loss, as PyTorch numbers them
MEAN = 1
SUM = 2


@dataclass(frozen=True)
class Step:
    """How ranks compute an operation with parts of the tokens.

    Attributes:
        parts: the values of which it reads a rank's part, with the dimension of the tokens.
        dimension: of the tokens in the result; None where the result is whole on every rank.
    """

    parts: Mapping[fx.Node, int]
    dimension: int | None


def tokens_of(graph: LayerGraph, degree: int) -> int:
    """Return the tokens of a sequence, which so many ranks divide.

    Raises:
        PlanError: for a model without attention, for sequences of several lengths, and for tokens
            that the ranks cannot divide evenly.
    """
    lengths = {shape_of(_argument(node, 0))[-2] for node in _attentions(graph)}
    if not lengths:
        raise PlanError(
            "no operation of the model is scaled_dot_product_attention, so how tokens depend on "
            "each other is not known, and ranks cannot shard sequences",
            hint="let the model use torch.nn.functional.scaled_dot_product_attention, or "
            + WHOLE_SEQUENCES,
        )

    if len(lengths) > 1 or not all(isinstance(length, int) for length in lengths):
        raise PlanError(
            f"ranks shard sequences of one length, and attention of the model has queries of "
            f"{', '.join(sorted(map(str, lengths)))} tokens",
            hint=WHOLE_SEQUENCES,
        )

    tokens = int(lengths.pop())
    if tokens % degree:
        raise PlanError(
            f"{degree} ranks cannot shard the {tokens} tokens of a sequence evenly",
            hint=f"take sequences of a multiple of {degree} tokens, or {WHOLE_SEQUENCES}",
        )

    return tokens


def token_steps(graph: LayerGraph, degree: int) -> dict[fx.Node, Step]:
    """Return the operations of a graph that so many ranks compute with parts of the tokens.

    Raises:
        PlanError: where the ranks cannot divide an attention, and for operations whose gradients
            may not be sums of those of parts.
    """
    return _Walk(graph, degree).run()


def _attentions(graph: LayerGraph) -> Iterator[fx.Node]:
    return (node for node in graph.module.graph.nodes if node.target is ATTENTION)


class _Walk:
    """Goes through a graph in its order, and notes what is divided."""

    def __init__(self, graph: LayerGraph, degree: int) -> None:
        self._graph = graph
        self._degree = degree
        self._tokens = tokens_of(graph, degree)
        self._steps: dict[fx.Node, Step] = {}
        # of the values that are divided, the dimension of their tokens
        self._dimensions: dict[fx.Node, int] = {}

    def run(self) -> dict[fx.Node, Step]:
        for node in self._graph.module.graph.nodes:
            if node.op != "call_function" or node in self._graph.fixed:
                continue
            self._check(node)
            step = self._step(node)
            if step is None:
                continue
            self._steps[node] = step
            if step.dimension is not None:
                self._dimensions[node] = step.dimension

        return self._steps

    def _check(self, node: fx.Node) -> None:
        """Raise PlanError for an operation that writes what it reads of the divided values, or
        whose gradient may not be linear in that of its result.
        """
        if isinstance(node.target, HigherOrderOperator):
            raise _not_captured(str(node.target))
        if not isinstance(node.target, OpOverload):
            return  # of Python's numbers, or an element of a tuple
        if node.target.namespace != "aten":
            raise _not_captured(str(node.target))
        if node.target._schema.is_mutable and not self._divided(node).keys().isdisjoint(
            node.all_input_nodes
        ):
            raise PlanError(
                f"ranks shard sequences, and the model changes one of the sharded values in "
                f"place ({node.target})",
                hint=f"let the model make a new value, or {WHOLE_SEQUENCES}",
            )

    def _divided(self, node: fx.Node) -> dict[fx.Node, int]:
        return {
            source: self._dimensions[source]
            for source in node.all_input_nodes
            if source in self._dimensions
        }

    def _step(self, node: fx.Node) -> Step | None:
        """Return how ranks compute an operation; None where each computes all of it."""
        if node.target is ATTENTION:
            return self._attention(node)
        if node.target is CROSS_ENTROPY:
            return self._cross_entropy(node)
        if node.target is _aten.embedding.default:
            return self._embedding(node)
        if node.target in PRODUCTS:
            return self._product(node)

        divided = self._divided(node)
        if not divided:
            return None
        is_dropout = node.target is _aten.dropout.default
        if is_random(node, self._graph.module) and not is_dropout:
            return None
        if packet_of(node) in RESHAPES:
            dimension = self._reshaped(node)
        elif self._takes_all_tokens(node):
            dimension = self._dimensions[node.all_input_nodes[0]]
        else:
            dimension = dimension_of(node, divided, parts=True)

        if dimension is None or not self._holds_tokens(node, dimension):
            return None
        return Step(self._with_parts(node, divided, dimension), dimension)

    def _with_parts(
        self, node: fx.Node, divided: Mapping[fx.Node, int], dimension: int
    ) -> dict[fx.Node, int]:
        """Return the divided values that an operation reads, with the whole ones of which each
        token needs its own element.
        """
        parts = dict(divided)
        if not isinstance(node.target, OpOverload) or torch.Tag.pointwise not in node.target.tags:
            return parts
        from_the_end = dimension - len(shape_of(node))
        for source in node.all_input_nodes:
            shape = shape_of(source)
            if source not in parts and len(shape) >= -from_the_end and shape[from_the_end] != 1:
                parts[source] = from_the_end + len(shape)

        return parts

    def _attention(self, node: fx.Node) -> Step:
        """Return the step of an attention: of queries, keys and values each rank has some tokens,
        and so it has of the result.
        """
        heads = shape_of(_argument(node, 0))[-3:-2]
        many = [size for size in heads if isinstance(size, int) and size % self._degree == 0]
        if len(shape_of(_argument(node, 0))) < 4 or not many:
            raise PlanError(
                f"{self._degree} ranks cannot shard the {' '.join(map(str, heads))} heads of "
                f"attention '{node.name}' evenly",
                hint=f"let the model have a multiple of {self._degree} heads, or {WHOLE_SEQUENCES}",
            )

        parts = {}
        for place in range(3):
            value = _argument(node, place)
            dimension = len(shape_of(value)) - 2
            own = self._dimensions.get(value, dimension)
            if own != dimension or shape_of(value)[dimension] != self._tokens:
                raise PlanError(
                    f"ranks shard sequences of {self._tokens} tokens, and attention "
                    f"'{node.name}' looks at {shape_of(value)[dimension]} others",
                    hint=WHOLE_SEQUENCES,
                )
            parts[value] = dimension

        return Step(parts, len(shape_of(node)) - 2)

    def _cross_entropy(self, node: fx.Node) -> Step | None:
        """Return the step of a loss that is a mean or a sum over all tokens' labels."""
        logits = _argument(node, 0)
        dimension = self._dimensions.get(logits)
        labels = _argument(node, 1)
        plain = _named(node, "weight") is None and not _named(node, "label_smoothing")
        indices = len(shape_of(labels)) == len(shape_of(logits)) - 1
        summed = _named(node, "reduction") in (MEAN, SUM)
        # the second dimension is that of the classes
        if dimension in (None, 1) or not (plain and indices and summed):
            return None
        if labels in self._dimensions:
            return None
        assert dimension is not None
        return Step({logits: dimension}, None)

    def _embedding(self, node: fx.Node) -> Step | None:
        weight = _argument(node, 0)
        indices = _argument(node, 1)
        # a gradient that is divided by how often all tokens have an index
        if weight in self._dimensions or _named(node, "scale_grad_by_freq"):
            return None
        dimension = self._dimensions.get(indices)
        if dimension is None:
            dimension = self._only_tokens(self._sizes(indices))
        if dimension is None:
            return None
        return Step({indices: dimension}, dimension)

    def _product(self, node: fx.Node) -> Step | None:
        """Return the step of a product with a matrix that every token meets."""
        place = PRODUCTS[node.target].weight
        value = _argument(node, place - 1)
        matrix = _argument(node, place)
        others = [source for source in node.all_input_nodes if source is not value]
        vectors = [source for source in others if source is not matrix]
        if (
            value is matrix
            or len(self._sizes(matrix)) != 2
            or any(source in self._dimensions for source in others)
            or any(len(self._sizes(source)) > 1 for source in vectors)
        ):
            return None

        dimension = self._dimensions.get(value)
        if dimension is None:
            dimension = self._only_tokens(self._sizes(value)[:-1])
        if dimension is None or dimension == len(self._sizes(value)) - 1:
            return None
        return Step({value: dimension}, dimension)

    def _only_tokens(self, sizes: Sequence[Any]) -> int | None:
        """Return the only one of some dimensions that is as long as a sequence."""
        found = [place for place, size in enumerate(sizes) if size == self._tokens]
        if len(found) != 1:
            return None
        return found[0]

    def _reshaped(self, node: fx.Node) -> int | None:
        """Return where the dimension of the tokens is in another view: as many elements follow it
        as before, and it still holds whole sequences.
        """
        source = node.all_input_nodes[0]
        before = self._sizes(source)
        after = self._sizes(node)
        dimension = self._dimensions.get(source)
        if dimension is None:
            return None
        inner = math.prod(map(sympy.sympify, before[dimension + 1 :]))
        for place, size in enumerate(after):
            same = math.prod(map(sympy.sympify, after[place + 1 :])) == inner
            if same and self._holds_sequences(size):
                return place

        return None

    def _takes_all_tokens(self, node: fx.Node) -> bool:
        """Return whether an operation is a slice of the tokens that leaves none out."""
        if node.target is not _aten.slice.Tensor or node.all_input_nodes[1:]:
            return False
        source = node.all_input_nodes[0]
        dimension = _named(node, "dim") % len(shape_of(source))
        return (
            dimension == self._dimensions.get(source)
            and _named(node, "step") == 1
            and self._sizes(source) == self._sizes(node)
        )

    def _holds_tokens(self, node: fx.Node, dimension: int) -> bool:
        """Return whether a dimension of a result holds whole sequences of tokens."""
        value = node.meta["val"]
        values = value if isinstance(value, (tuple, list)) else [value]
        if not all(isinstance(each, torch.Tensor) for each in values):
            return False
        sizes = [self._graph.reader.sizes(each) for each in values]
        return all(each is not None and self._holds_sequences(each[dimension]) for each in sizes)

    def _holds_sequences(self, size: Any) -> bool:
        quotient = sympy.sympify(size) / self._tokens
        coefficient, _ = quotient.as_coeff_Mul()
        return bool(coefficient.is_Integer) and quotient != 0

    def _sizes(self, node: fx.Node) -> Sequence[Any]:
        """Return the shape of a tensor; empty where it depends on data."""
        value = node.meta.get("val")
        if value is None and node.op == "get_attr":
            return tuple(getattr(self._graph.module, str(node.target), torch.empty(())).shape)
        if not isinstance(value, torch.Tensor):
            return ()
        return self._graph.reader.sizes(value) or ()


def _argument(node: fx.Node, place: int) -> fx.Node:
    found = node.args[place]
    assert isinstance(found, fx.Node)
    return found


def _named(node: fx.Node, name: str) -> Any:
    """Return what an operation gets for a parameter, by its name in the operation's schema."""
    parameters = node.target._schema.arguments  # type: ignore[union-attr]
    for place, parameter in enumerate(parameters):
        if parameter.name != name:
            continue
        if place < len(node.args):
            return node.args[place]
        return node.kwargs.get(name, parameter.default_value)
    raise AssertionError(f"{node.target} has no {name}")


def _not_captured(what: str) -> PlanError:
    return PlanError(
        f"ranks shard sequences and add up gradients of parts, and the model calls {what}, of "
        f"which PyTorch does not say that its gradients can be added up",
        hint=f"let the model use PyTorch's own operations, or {WHOLE_SEQUENCES}",
    )
