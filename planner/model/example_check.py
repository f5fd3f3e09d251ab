"""Compare example batches of two sizes: what depends on the size must be the first dimension of a tensor.

One batch may not tell: eight samples of eight words look the same either way.
"""

from torch.utils._pytree import tree_flatten

from planner.errors import ModelFileError
from planner.model.batch import Batch
from planner.model.randomness import generators_kept
from planner.model.samples import PAD_THEM, check_first_dimensions, parts_of
from planner.model.spec import TrainingSpec


def check_samples(spec: TrainingSpec, batch: Batch) -> None:
    """Raise ModelFileError where something of an example batch depends on its size in another way than it may.

    The batch must be as long as spec.example_batch() makes it. A function that fails at another size tells nothing.
    """
    size = batch.size
    other_size = 3 if size == 2 else 2
    with generators_kept():
        try:
            other = spec.example_batch(other_size, checked=False)
        except ModelFileError:
            return
    place = spec.place("example_batch")
    check_first_dimensions(other, other_size, place)
    leaves, structure = tree_flatten(parts_of(batch))
    other_leaves, other_structure = tree_flatten(parts_of(other))
    if structure != other_structure:
        raise ModelFileError(
            f"{place} returned another structure for {size} samples than for {other_size}, such as a list with one "
            "element for each sample, which cannot be divided into microbatches",
            hint=PAD_THEM,
        )
    for leaf, other_leaf in zip(leaves, other_leaves, strict=True):
        if isinstance(leaf, int | float | str) and leaf != other_leaf:
            raise ModelFileError(
                f"{place} returned {leaf!r} for {size} samples, and {other_leaf!r} for {other_size}: what is no tensor "
                "becomes part of the captured model, and must be the same for every batch",
                hint="leave it out, or make it a tensor with one element for each sample; the model can read the "
                "number of samples off a tensor's shape",
            )
