"""Labels and masks that a batch may have and the example batch may not: what to change in it, to
see what counts.

A cross entropy, and what compares labels with a number, say which number: the captured graph leads
from them back to the tensor of the batch. Other numbers are guesses, which people pad labels with.
A guess that is no label of the model raises an error, and tells nothing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from planner.model.batch import Batch
from planner.model.capture.graph import LayerGraph
from planner.model.torch_private import TorchDispatchMode, tree_map_only

_aten = torch.ops.aten
# What cross entropies are or end in, by the position of the label that they ignore.
_LIKELIHOODS: Mapping[Any, int] = {
    _aten.cross_entropy_loss: 4,
    _aten.nll_loss_nd: 4,
    _aten.nll_loss: 4,
    _aten.nll_loss2d: 4,
    _aten.nll_loss_forward: 4,
    _aten.nll_loss2d_forward: 4,
}
_DEFAULT = -100  # that a graph leaves out
# Comparisons with a number, by what is to be added to it for a label on the other side of the
# border.
_COMPARISONS: Mapping[Any, int] = {
    _aten.eq: 0,
    _aten.ne: 0,
    _aten.gt: 0,
    _aten.le: 1,
    _aten.ge: -1,
    _aten.lt: 0,
}
_UNCHECKED_INDICES = ("ctc_loss", "_ctc_loss")  # whose kernels trust their integers
_GUESSES = (-100, -1, 0, 255)
_LEAST_ROW = 3  # labels of a sample, of which the first and the last stay


@dataclass(frozen=True)
class Variation:
    """A number to put into one half of a tensor of the batch."""

    leaf: int  # number of the tensor among the batch's leaves
    value: int
    known: bool  # whether the model is seen to look for it


def variations(graph: LayerGraph, batch: Batch, noted: set[int]) -> list[Variation]:
    """Return what to change, the most telling first.

    Args:
        noted: what cross entropies ignored while the model ran, and what labels were compared with.
    """
    known = list(dict.fromkeys(_known(graph)))
    found = [Variation(leaf, value, known=True) for leaf, value in known]
    leaves = dict(_tensors(batch))
    found += [
        Variation(leaf, value, known=True)
        for leaf in leaves
        if is_mask(leaves[leaf])
        for value in (0, 1)
    ]

    # A GPU's kernels end the process at an index out of range.
    guesses = (
        () if batch.device_type != "cpu" or _trusts_indices(graph) else (*sorted(noted), *_GUESSES)
    )
    for leaf, tensor in leaves.items():
        if (
            not tensor.is_floating_point()
            and not tensor.is_complex()
            and tensor.dtype != torch.bool
        ):
            found += [Variation(leaf, value, known=False) for value in dict.fromkeys(guesses)]

    distinct = {(each.leaf, each.value): each for each in reversed(found)}
    return [
        each for each in found if distinct[each.leaf, each.value] is each and each.leaf in leaves
    ]


def is_mask(tensor: Tensor) -> bool:
    """Return whether a tensor has zeros and ones alone."""
    return tensor.dtype == torch.bool or bool(((tensor == 0) | (tensor == 1)).all())


def varied(batch: Batch, variation: Variation, samples: int) -> Batch | None:
    """Return the batch with the value in some places of its first `samples`; None where it is there
    already.

    Of some samples only the first and the last label stay, so that it matters whether the first one
    counts. Of one label per sample the last one stays.
    """
    leaves, spec = batch.flatten()
    before: Tensor = leaves[variation.leaf]
    if not _fits(variation.value, before.dtype):
        return None

    changed = before.clone()
    if before.dim() > 1 and before.shape[1] >= _LEAST_ROW:
        changed[:samples, 1:-1] = variation.value
    elif before.dim() > 1 and before.shape[1] > 1:
        changed[:samples, 1:] = variation.value
    else:
        changed[: max(1, samples - 1)] = variation.value

    if torch.equal(changed, before):
        return None
    leaves[variation.leaf] = changed
    return Batch(*spec.unflatten(leaves))


def spread(batch: Batch) -> Batch:
    """Return a batch whose samples differ: with noise in the model's numbers, and rows of integers
    moved along.
    """
    generator = torch.Generator().manual_seed(0)

    def changed(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and (
            not is_mask(tensor) or bool((tensor == tensor.flatten()[0]).all())
        ):
            noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            return tensor + noise.to(tensor.device)
        if tensor.dim() > 1 and not tensor.is_complex():
            return torch.stack([row.roll(number, dims=0) for number, row in enumerate(tensor)])
        return tensor

    args, kwargs = tree_map_only(Tensor, changed, (batch.args, batch.kwargs))
    return Batch(args, kwargs, batch.target)


def _fits(value: int, dtype: torch.dtype) -> bool:
    if dtype.is_floating_point or dtype == torch.bool:
        return True
    return torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max


def _tensors(batch: Batch) -> Iterator[tuple[int, Tensor]]:
    """Yield the tensors that may be labels or masks, by their numbers."""
    for number, leaf in enumerate(batch.flatten()[0]):
        if not isinstance(leaf, Tensor) or leaf.is_complex() or not leaf.dim() or not leaf.numel():
            continue
        if not leaf.is_floating_point() or is_mask(leaf):
            yield number, leaf


def _known(graph: LayerGraph) -> Iterator[tuple[int, int]]:
    """Yield tensors of the batch, by number, with a number that a loss ignores in them or compares
    them with.
    """
    for node in graph.module.graph.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        if packet in _LIKELIHOODS:
            target = node.args[1]
            position = _LIKELIHOODS[packet]
            if len(node.args) > position:
                ignored = node.args[position]
            else:
                ignored = node.kwargs.get("ignore_index", _DEFAULT)
        elif packet in _COMPARISONS and len(node.args) > 1 and isinstance(node.args[1], int):
            target = node.args[0]
            ignored = int(node.args[1]) + _COMPARISONS[packet]
        else:
            continue

        for leaf in _leaves_behind(graph, target):
            if isinstance(ignored, int):
                yield leaf, ignored


def _leaves_behind(graph: LayerGraph, node: Any) -> list[int]:
    """Return the tensors of the batch that an operation's value is made of without any weight, by
    number.
    """
    if not isinstance(node, fx.Node):
        return []
    numbers = {leaf: number for number, leaf in enumerate(graph.inputs)}
    seen: dict[fx.Node, None] = {node: None}
    waiting = [node]
    while waiting:
        new = [source for source in waiting.pop().all_input_nodes if source not in seen]
        seen |= dict.fromkeys(new)
        waiting += new

    if any(graph.names.parameter(each) for each in seen if each.op == "get_attr"):
        return []
    return sorted(numbers[each] for each in seen if each in numbers)


def _trusts_indices(graph: LayerGraph) -> bool:
    packets = (getattr(node.target, "overloadpacket", None) for node in graph.module.graph.nodes)
    return any(getattr(packet, "__name__", "") in _UNCHECKED_INDICES for packet in packets)


class NotedNumbers(TorchDispatchMode):
    """Mode that notes what losses within ignore, and what integers are compared with: a graph of
    blocks hides them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        packet = func.overloadpacket
        if packet in _LIKELIHOODS and len(args) > _LIKELIHOODS[packet]:
            self.numbers.add(args[_LIKELIHOODS[packet]])
        elif (
            packet in _COMPARISONS and isinstance(args[1], int) and not args[0].is_floating_point()
        ):
            self.numbers.add(int(args[1]) + _COMPARISONS[packet])
        return func(*args, **(kwargs or {}))
