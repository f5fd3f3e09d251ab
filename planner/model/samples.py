"""Check that samples are the first dimension of every tensor of a batch."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from planner.errors import ModelFileError
from planner.model.batch import Batch

PAD_THEM = (
    "pad the samples to one shape, stack them into tensors whose first dimension is the samples, and let loss() or the "
    "model mask the padding; define collate(samples) to do the same with the items of dataset()"
)
_TRANSPOSED = (
    "return the samples first, and transpose in the model, as x.transpose(0, 1) at the start of forward does, or make "
    "its layers with batch_first=True"
)


def check_first_dimensions(batch: Batch, size: int, place: str) -> None:
    """Raise ModelFileError unless all tensors of a batch of `size` samples have them as the first dimension."""
    for leaf in tree_leaves(parts_of(batch)):
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] == size:
            continue
        if any(_lists_of(size, part) for part in parts_of(batch)):
            raise ModelFileError(
                f"{place} returned for batch_size={size} a list with one element for each sample, which cannot be "
                "divided into microbatches",
                hint=PAD_THEM,
            )
        elsewhere = size > 1 and size in leaf.shape
        raise ModelFileError(
            f"{place} returned for batch_size={size} a tensor of shape {tuple(leaf.shape)}, whose first dimension is "
            f"not {size}",
            hint=_TRANSPOSED
            if elsewhere
            else "the batch is the first dimension of every tensor; masks and the like belong in the model",
        )


def parts_of(batch: Batch) -> tuple[Any, ...]:
    return *batch.args, *batch.kwargs.values(), batch.target


def _lists_of(size: int, tree: Any) -> bool:
    """Return whether a tree has a list or tuple of so many elements."""
    return any(isinstance(node, list | tuple) and len(node) == size for node in _nodes(tree))


def _nodes(tree: Any) -> Iterator[Any]:
    yield tree
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    for child in children:
        yield from _nodes(child)
