"""A batch of training data: the model's arguments and the target that its output is
compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from planner.errors import ModelFileError, first_line
from planner.model.options import ModuleOptions
from planner.model.torch_private import PyTree, TreeSpec, tree_flatten, tree_leaves, tree_map_only
from planner.runtime import runtime_of

_TOKENS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Batch:
    """A batch; the loss compares the output of `model(*args, **kwargs)` with `target`.

    Tensors may be nested in lists, tuples and dicts. The samples are the first dimension of every
    tensor; tensors without dimensions and other objects belong to the whole batch.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: Any = None

    @property
    def size(self) -> int:
        """Number of samples; an error where no tensor has a first dimension."""
        for leaf in tree_leaves(self._tree()):
            if isinstance(leaf, Tensor) and leaf.dim():
                return leaf.shape[0]
        raise ModelFileError(
            "the batch holds no tensor with a batch dimension",
            hint="return tensors whose first dimension is the batch",
        )

    @property
    def tokens_per_sample(self) -> int | None:
        """The length of the longest sequence of token ids; None where the model takes others, such
        as images.
        """
        inputs = [
            leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)
        ]
        if any(tensor.is_floating_point() and tensor.dim() > 2 for tensor in inputs):
            return None
        lengths = [
            tensor.shape[1] for tensor in inputs if tensor.dim() == 2 and tensor.dtype in _TOKENS
        ]
        return max(lengths, default=None)

    @property
    def device_type(self) -> str:
        """The kind of device that holds the batch, as PyTorch calls it."""
        tensors = [leaf for leaf in tree_leaves(self._tree()) if isinstance(leaf, Tensor)]
        if not tensors:
            return "cpu"
        return tensors[0].device.type

    def flatten(self) -> tuple[list[Any], TreeSpec]:
        """Return the leaves (arguments, keyword arguments by name, target) and the structure around
        them.
        """
        leaves, spec = self._flat
        return list(leaves), spec

    def split(self, parts: int) -> list[Batch]:
        """Return `parts` batches of consecutive samples, whose sizes differ by one at most; larger
        ones first.
        """
        if not 1 <= parts <= self.size:
            raise ModelFileError(
                f"a batch of {self.size} samples cannot be split into {parts} parts",
                hint="use a larger batch or fewer microbatches",
            )

        leaves, spec = self.flatten()
        pieces = [
            torch.tensor_split(leaf, parts)
            if isinstance(leaf, Tensor) and leaf.dim()
            else [leaf] * parts
            for leaf in leaves
        ]
        return [Batch(*spec.unflatten(list(part))) for part in zip(*pieces, strict=True)]

    def to(self, device: torch.device | str) -> Batch:
        """Return this batch with its tensors on `device`, copied from pinned memory; the host does
        not wait.
        """
        device = torch.device(device)
        return self.pinned(device)._with(lambda leaf: runtime_of(device).copied(leaf, device))

    def pinned(self, device: torch.device) -> Batch:
        """Return this batch with the CPU's tensors where `device` can copy them from without the
        host.
        """
        runtime = runtime_of(device)

        def pinned(tensor: Tensor) -> Tensor:
            """Return a tensor in pinned memory; itself where that cannot be."""
            # An expanded tensor has one element for many, and would be written more than once.
            if tensor.device.type != "cpu" or tensor.layout != torch.strided:
                return tensor
            has_own = all(
                stride or size < 2
                for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            if not has_own:
                return tensor
            return runtime.pin(tensor)

        if not runtime.asynchronous:
            return self
        return self._with(pinned)

    def _with(self, change: Callable[[Tensor], Tensor]) -> Batch:
        leaves, spec = self._flat
        changed = [change(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if all(new is old for new, old in zip(changed, leaves, strict=True)):
            return self
        return Batch(*spec.unflatten(changed))

    def prepared(self, options: ModuleOptions) -> Batch:
        """Return this batch with the model's inputs as modules with `options` take them; the target
        stays as it is.
        """
        args, kwargs = tree_map_only(Tensor, options.input, (self.args, self.kwargs))
        return Batch(args, kwargs, self.target)

    def doubled(self) -> Batch:
        """Return a batch with every sample twice."""
        return self.repeated(2 * self.size)

    def repeated(self, size: int) -> Batch:
        """Return a batch of `size` samples, those of this one in turn."""
        copies = -(-size // self.size)

        def repeat(tensor: Tensor) -> Tensor:
            if not tensor.dim():
                return tensor
            return torch.cat([tensor] * copies)[:size]

        return Batch(*tree_map_only(Tensor, repeat, self._tree()))

    def copied(self) -> Batch:
        """Return a batch with tensors of its own, for a model that changes its inputs in place."""
        return self._with(Tensor.clone)

    def distinct(self) -> Batch:
        """Return this batch with copies of tensors that occur twice, as inputs and labels of
        language models may.
        """
        seen: set[int] = set()

        def distinct(tensor: Tensor) -> Tensor:
            """Return a copy of a tensor that was there before."""
            if id(tensor) in seen:
                return tensor.clone()
            seen.add(id(tensor))
            return tensor

        return Batch(*tree_map_only(Tensor, distinct, self._tree()))

    @cached_property
    def _flat(self) -> tuple[list[Any], TreeSpec]:
        """The leaves and their structure, cached because flattening takes longer than to send a
        message.
        """
        return tree_flatten(self._tree())

    def _tree(self) -> PyTree:
        # Sorted, so that the order in which a user writes keyword arguments changes no graph's
        # hash.
        return self.args, {name: self.kwargs[name] for name in sorted(self.kwargs)}, self.target


def part_of(batch: Batch, samples: range) -> Batch:
    """Return consecutive samples of a batch."""
    leaves, structure = batch.flatten()
    rows = slice(samples.start, samples.stop)
    chosen = [leaf[rows] if isinstance(leaf, Tensor) and leaf.dim() else leaf for leaf in leaves]
    return Batch(*structure.unflatten(chosen))


def make_batch(returned: Any, place: str) -> Batch:
    """Return the batch that a user's function returned: (args, target), (args, kwargs, target) or a
    Batch.

    A dict in place of args has arguments by name. A dict alone has no target, as in datasets of
    transformers.
    """
    args: Any = ()
    kwargs: Any = {}
    target: Any = None
    match returned:
        case Batch():
            return returned
        case Mapping():
            kwargs = returned
        case (Mapping() as kwargs, target):
            pass
        case (args, target):
            pass
        case (args, kwargs, target):
            pass
        case _:
            args = None

    if isinstance(args, Tensor):
        args = (args,)
    is_named = isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)
    if not isinstance(args, (tuple, list)) or not is_named:
        size = ""
        if isinstance(returned, (tuple, list)):
            size = f" of {len(returned)}"
        raise ModelFileError(
            f"{place} returned a {type(returned).__name__}{size}, not (args, target)",
            hint="return (args, target) or (args, kwargs, target), args being a tuple or a dict "
            "of the model's "
            "arguments, kwargs a dict",
        )

    return Batch(tuple(args), dict(kwargs), target)


def collate(items: Sequence[Any]) -> Batch:
    """Return the batch of a dataset's `items`, each (args, target) or (args, kwargs, target) of one
    sample.
    """
    samples = [make_batch(item, "an item of dataset()") for item in items]
    try:
        args, kwargs = default_collate([(sample.args, sample.kwargs) for sample in samples])
        # A model that makes its own loss may have no target, and default_collate refuses None.
        targets = [sample.target for sample in samples]
        if all(target is None for target in targets):
            target = None
        else:
            target = default_collate(targets)
    except (TypeError, RuntimeError, KeyError) as cause:
        raise ModelFileError(
            f"items of dataset() cannot be stacked into a batch: {first_line(cause)}",
            hint="give all items the same structure of tensors, numbers, tuples and dicts, and "
            "the same shapes; or "
            "define collate(samples), which pads what differs in length",
        ) from cause

    return Batch(tuple(args), kwargs, target)
