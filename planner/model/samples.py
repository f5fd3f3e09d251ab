"""Check that samples are the first dimension of every tensor of an example batch, and that nothing
else is theirs.

One batch may not tell: eight samples of eight words look the same either way. So batches of two
sizes are compared.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from planner.errors import ModelFileError
from planner.model.batch import Batch
from planner.model.randomness import generators_kept
from planner.model.torch_private import tree_flatten, tree_leaves

_PADDED = (
    "pad the samples to one shape, stack them into tensors whose first dimension is the samples, "
    "and let loss() or the "
    "model mask the padding; define collate(samples) to do the same with the items of dataset()"
)
_TRANSPOSED = (
    "return the samples first, and transpose in the model, as x.transpose(0, 1) at the start of "
    "forward does, or make "
    "its layers with batch_first=True"
)


def check_first_dimensions(batch: Batch, size: int, place: str) -> None:
    """Raise ModelFileError unless all tensors of a batch of `size` samples have them as the first
    dimension.
    """
    for leaf in tree_leaves(_parts(batch)):
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] == size:
            continue
        if any(_lists_of(size, part) for part in _parts(batch)):
            raise ModelFileError(
                f"{place} returned for batch_size={size} a list with one element for each sample, "
                f"which cannot be "
                "split into microbatches",
                hint=_PADDED,
            )
        elsewhere = size > 1 and size in leaf.shape
        raise ModelFileError(
            f"{place} returned for batch_size={size} a tensor of shape {tuple(leaf.shape)}, whose "
            f"first dimension is "
            f"not {size}",
            hint=_TRANSPOSED
            if elsewhere
            else "the batch is the first dimension of every tensor; masks and the like belong in "
            "the model",
        )


def check_samples(batch: Batch, make: Callable[[int], Batch], place: str) -> None:
    """Raise ModelFileError where something of an example batch depends on its size in another way
    than it may.

    `make` makes batches of other sizes, otherwise alike. Where it fails, another size tells
    nothing.
    """
    size = batch.size
    other_size = 3 if size == 2 else 2
    with generators_kept():
        try:
            other = make(other_size)
        except ModelFileError:
            return

    check_first_dimensions(other, other_size, place)
    leaves, structure = tree_flatten(_parts(batch))
    other_leaves, other_structure = tree_flatten(_parts(other))
    if structure != other_structure:
        raise ModelFileError(
            f"{place} returned another structure for {size} samples than for {other_size}, such "
            f"as a list with one "
            "element for each sample, which cannot be split into microbatches",
            hint=_PADDED,
        )

    for leaf, other_leaf in zip(leaves, other_leaves, strict=True):
        if isinstance(leaf, int | float | str) and leaf != other_leaf:
            raise ModelFileError(
                f"{place} returned {leaf!r} for {size} samples, and {other_leaf!r} for "
                f"{other_size}: what is no tensor "
                "becomes part of the captured model, and must be the same for every batch",
                hint="leave it out, or make it a tensor with one element for each sample; the "
                "model can read the "
                "number of samples off a tensor's shape",
            )


def _parts(batch: Batch) -> tuple[Any, ...]:
    return *batch.args, *batch.kwargs.values(), batch.target


def _lists_of(size: int, tree: Any) -> bool:
    """Return whether a tree has a list or tuple of so many elements."""
    return any(isinstance(node, list | tuple) and len(node) == size for node in _nodes(tree))


def _nodes(tree: Any) -> Iterator[Any]:
    yield tree
    children = (
        tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    )
    for child in children:
        yield from _nodes(child)
