"""Split a backward in two parts: first the gradients that earlier stages wait for, later those of
the weights.

Source: Qi, Wan, Huang and Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2. The first
    part notes the
gradients that reach each operation where a weight joins the path from the stage's outputs back to
what it received, and the second part starts from there:

    received <- ... <- operation <- operation <- ... <- output        first part, along this path
                          |              |
                        weight         weight                         second part, from each
                                                                      operation to its weights

PyTorch's operations compute only the input gradients that are asked for, so nothing is computed
twice, except in a user's `torch.autograd.Function`. The gradient of a weight that joins the path at
several operations, or not on the path at all, is computed in the first part: started at one
operation, autograd would also reach it through the others.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node


@dataclass
class WeightGradients:
    """The second part of a unit's backward: operations where weights join, with the gradients that
    reached them.
    """

    _pending: "list[_Joint]" = field(default_factory=list)

    def run(self) -> None:
        """Accumulate the gradients of the weights in `.grad`, and free the graph."""
        for joint in self._pending:
            edges = [
                GradientEdge(joint.node, index)
                for index, g in enumerate(joint.gradients)
                if g is not None
            ]
            if not edges:
                continue  # no gradient reached this operation
            arrived = [gradient for gradient in joint.gradients if gradient is not None]
            # As any backward it accumulates, and calls the hooks of the weights;
            # `torch.autograd.grad` would, too, and what it returns would pass them once more on its
            # way to `.grad`.
            torch.autograd.backward(edges, arrived, inputs=joint.weights)

        self._pending.clear()


@dataclass
class _Joint:
    """An operation on the path, with the weights that join there."""

    node: Node
    weights: list[Tensor]
    gradients: tuple[Tensor | None, ...] = ()

    def note(self, gradients: tuple[Tensor | None, ...]) -> None:
        self.gradients = gradients


def input_gradients(
    roots: Sequence[GradientEdge],
    gradients: Sequence[Tensor | None],
    received: Sequence[Tensor],
    weights: Iterable[Tensor],
) -> WeightGradients:
    """Accumulate the gradients of `received`, leaves of the graph of `roots`, in `.grad`; return
    the second part.
    """
    joints, others = _joints([root.node for root in roots], received, weights)
    handles = [joint.node.register_prehook(joint.note) for joint in joints]
    try:
        torch.autograd.backward(roots, gradients, inputs=[*received, *others], retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    return WeightGradients(joints)


def _joints(
    roots: Sequence[Node], received: Sequence[Tensor], weights: Iterable[Tensor]
) -> tuple[list[_Joint], list[Tensor]]:
    """Return the operations to continue from, each with weights that join there only, and all other
    weights.
    """
    order = _topological(roots)
    wanted = [weight for weight in weights if weight.requires_grad]
    on_path, joined = _path(order, received, wanted)
    at = [node for node in order if node in on_path and node in joined]

    # How often a weight joins the path. Nothing on the path stands for a root beside it: a weight
    # behind such a root counts as one that joins twice.
    uses = Counter[int]()
    for node in at:
        uses.update(joined[node].keys())
    for root in dict.fromkeys(roots):
        if root not in on_path and root in joined:
            uses.update(dict.fromkeys(joined[root], 2))

    joints = []
    for node in at:
        alone = [weight for key, weight in joined[node].items() if uses[key] == 1]
        if alone:
            joints.append(_Joint(node, alone))

    every = {key: weight for behind in joined.values() for key, weight in behind.items()}
    return joints, [weight for key, weight in every.items() if uses[key] != 1]


def _path(
    order: Sequence[Node], received: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[set[Node], dict[Node, dict[int, Tensor]]]:
    """Return the operations through which gradients flow to `received`, and the weights, by their
    ids, behind each operation but through these.
    """
    wanted = {id(weight) for weight in weights}
    ends = {id(tensor) for tensor in received}
    on_path: set[Node] = set()
    joined: dict[Node, dict[int, Tensor]] = {}

    for node in reversed(order):  # children first
        if node.name() == "torch::autograd::AccumulateGrad":
            leaf: Tensor = node.variable  # type: ignore[attr-defined]
            if id(leaf) in ends:
                on_path.add(node)
            elif id(leaf) in wanted:
                joined[node] = {id(leaf): leaf}
            continue

        children = [child for child, _ in node.next_functions if child is not None]
        if any(child in on_path for child in children):
            on_path.add(node)
        for child in children:
            if child not in on_path and child in joined:
                joined.setdefault(node, {}).update(joined[child])

    return on_path, joined


def _topological(roots: Sequence[Node]) -> list[Node]:
    # Each node before those that its gradients flow to.
    done: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, left = stack.pop()
        if left:
            done.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend(
                (child, False)
                for child, _ in node.next_functions
                if child is not None and child not in seen
            )

    return done[::-1]
