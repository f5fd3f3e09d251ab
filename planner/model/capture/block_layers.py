"""Layers made of the blocks that a user names, and the structure of what they exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from planner.errors import CaptureError
from planner.model.loss import LossFunction

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
_TENSOR = object()  # stands for a tensor among the leaves


@dataclass(frozen=True, eq=False)
class Structure:
    """The structure of what a block returns.

    Tensors stand within lists, tuples and dicts, beside numbers and strings, which must be the same for every batch.
    """

    spec: TreeSpec
    leaves: tuple[Any, ...]

    def tensors(self, value: Any, block: str) -> list[Tensor]:
        """Return the tensors in `value`; raise CaptureError when it has another structure than this one."""
        found = structure_of(value)
        if found is None or found.spec != self.spec or found.leaves != self.leaves:
            raise CaptureError(
                f"block '{block}' returns another structure than on the example batch",
                hint="the number of tensors, and everything beside them, must be the same for every batch",
            )
        return tensors_of(value)

    def value(self, tensors: Sequence[Tensor]) -> Any:
        """Return what the next block takes, given the tensors in it."""
        rest = iter(tensors)
        return self.spec.unflatten([next(rest) if leaf is _TENSOR else leaf for leaf in self.leaves])


def structure_of(value: Any) -> Structure | None:
    """Return the structure of what a block returned; None where something in it cannot be sent."""
    leaves, spec = tree_flatten(value)
    if not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
        return None
    return Structure(spec, tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves))


@dataclass(frozen=True, eq=False)
class BlockLayer:
    """Blocks that share a layer; the last layer computes the loss, perhaps without any block.

    Attributes:
        blocks: modules with their names.
        takes: structure of what the layer before returns; None for the first layer, which takes the batch.
        gives: structure of what the layer after takes; None for the last layer.
        values: names of the tensors in `gives`.
    """

    blocks: tuple[tuple[str, nn.Module], ...]
    takes: Structure | None
    gives: Structure | None
    values: tuple[str, ...]

    @property
    def has_loss(self) -> bool:
        """Whether it is the last layer, which computes the loss."""
        return self.gives is None


@dataclass(frozen=True)
class BlockChain:
    """The modules that a graph of blocks runs; `training` is the mode that they are put into."""

    layers: tuple[BlockLayer, ...]
    loss: LossFunction | None
    training: bool


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in what a block returned."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
