"""Lengths that vary from batch to batch: which dimensions of a batch have them, and between
what.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from planner.errors import ModelFileError

if TYPE_CHECKING:
    from planner.model.batch import Batch
    from planner.model.spec import TrainingSpec

Place = tuple[int, int]  # a leaf of a batch, in the order of `Batch.flatten`, and a dimension of it


@dataclass(frozen=True)
class Length:
    """A length that varies, where a batch has it, and between what it is."""

    leaf: int
    dimension: int
    least: int
    most: int


def lengths_of(batch: "Batch", lengths: Sequence[Length], what: str) -> tuple[int, ...]:
    """Return the lengths of a batch; raise ModelFileError, about `what`, for one beyond what
    lengths() says.
    """
    leaves, _ = batch.flatten() if lengths else ([], None)
    found = []
    for each in lengths:
        tensor = None
        if each.leaf < len(leaves):
            tensor = leaves[each.leaf]
        if not isinstance(tensor, Tensor) or tensor.dim() <= each.dimension:
            raise ModelFileError(
                f"{what} has no dimension {each.dimension} in tensor {each.leaf}, whose length "
                f"lengths() lets vary",
                hint="dataset() and example_batch() must give the model the same arguments",
            )
        length = tensor.shape[each.dimension]
        if not each.least <= length <= each.most:
            raise ModelFileError(
                f"{what} has a length of {length} in dimension {each.dimension} of its tensor "
                f"{each.leaf}, of shape "
                f"{tuple(tensor.shape)}, which lengths() says is {each.least} to {each.most}",
                hint="cut the sample, leave it out, or let lengths() say more and profile and "
                "solve again",
            )
        found.append(length)

    return tuple(found)


def extent_of(batch: "Batch", lengths: Sequence[Length]) -> "int | tuple[int, ...]":
    """Return the extent of a batch; raise ModelFileError for a length that is beyond what lengths()
    says.
    """
    if not lengths:
        return batch.size
    return (batch.size, *lengths_of(batch, lengths, "the batch"))


@dataclass(frozen=True)
class Varying:
    """The dimensions that vary in the example batches of a model file."""

    places: tuple[Place, ...]
    # lengths by name, and the sizes in their batch
    examples: tuple[tuple[Mapping[str, int], Mapping[Place, int]], ...]
    slopes: Mapping[str, Sequence[float]]  # how much longer each place is for a length of one more

    def length(self, place: Place) -> Length:
        """Return the length that a batch has in some place."""
        sizes = [found[place] for _, found in self.examples]
        return Length(*place, min(sizes), max(sizes))

    def named(self, batch: "Batch", what: str) -> tuple[int, ...]:
        """Return the lengths by name at which example_batch() is as long as a batch; errors as of
        `lengths_of`.
        """
        sizes = lengths_of(batch, [self.length(place) for place in self.places], what)
        return self.by_name(dict(zip(self.places, sizes, strict=True)))

    def by_name(self, sizes: Mapping[Place, int]) -> tuple[int, ...]:
        """Return the lengths by name at which example_batch() has these sizes, of some of the
        places.
        """
        least, before = self.examples[0]
        known = [number for number, place in enumerate(self.places) if place in sizes]
        longer = [sizes[self.places[number]] - before[self.places[number]] for number in known]

        slopes = np.array(list(self.slopes.values()))[:, known]
        more = np.linalg.lstsq(slopes.T, longer, rcond=None)[0].tolist()
        return tuple(
            least[name] + round(each) for name, each in zip(self.slopes, more, strict=True)
        )


def varying(spec: "TrainingSpec", samples: int) -> Varying | None:
    """Find the dimensions that vary, by example batches of the least, the greatest and two lengths
    between.

    None where the model file has no lengths(). Raise ModelFileError where a length changes nothing.
    """
    between = spec.lengths()
    if not between:
        return None
    corners = [dict(zip(between, chosen, strict=True)) for chosen in product(*between.values())]
    corners += [
        {name: low + round(part * (most - low) / 3) for name, (low, most) in between.items()}
        for part in (1, 2)
    ]
    examples = [(corner, _sizes(spec.example_batch(samples, corner))) for corner in corners]
    least, first = examples[0]
    for corner, sizes in examples:
        if sizes.keys() != first.keys():
            raise ModelFileError(
                f"example_batch() of '{spec.origin}' returns other tensors for the lengths "
                f"{corner} than for {least}",
                hint="the number of tensors and of their dimensions must be the same for all "
                "lengths",
            )

    places = tuple(place for place in first if len({sizes[place] for _, sizes in examples}) > 1)
    slopes = {}
    for name, (low, most) in between.items():
        alone = next(sizes for corner, sizes in examples if corner == {**least, name: most})
        if alone == first:
            raise ModelFileError(
                f"example_batch() of '{spec.origin}' returns the same shapes for every length "
                f"'{name}'",
                hint=f"make its tensors as long as the argument `{name}` says",
            )
        slopes[name] = [(alone[place] - first[place]) / (most - low) for place in places]

    return Varying(places, tuple(examples), slopes)


def _sizes(batch: "Batch") -> dict[Place, int]:
    tensors = [
        (number, leaf) for number, leaf in enumerate(batch.flatten()[0]) if isinstance(leaf, Tensor)
    ]
    return {
        (number, place): size
        for number, leaf in tensors
        for place, size in enumerate(leaf.shape)
        if place
    }
