"""What travels from block to block, and the layers made of blocks."""

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
_TENSOR = object()  # a leaf that travels


@dataclass(frozen=True, eq=False)
class Structure:
    """What a block returns: tensors within lists, tuples and dicts, beside numbers and strings, which are constant."""

    spec: TreeSpec
    leaves: tuple[Any, ...]

    def tensors(self, value: Any, block: str) -> list[Tensor]:
        """Those in `value`.

        Raises:
            CaptureError: when it has another structure than this one.
        """
        found = structure_of(value)
        if found is None or found.spec != self.spec or found.leaves != self.leaves:
            raise CaptureError(
                f"block '{block}' returns another structure than on the example batch",
                hint="the number of tensors, and everything beside them, must be the same for every batch",
            )
        return tensors_of(value)

    def value(self, tensors: Sequence[Tensor]) -> Any:
        """What the next block takes."""
        rest = iter(tensors)
        return self.spec.unflatten([next(rest) if leaf is _TENSOR else leaf for leaf in self.leaves])


def structure_of(value: Any) -> Structure | None:
    """The structure of what a block returned; None where something in it cannot travel."""
    leaves, spec = tree_flatten(value)
    if not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
        return None
    return Structure(spec, tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves))


@dataclass(frozen=True, eq=False)
class BlockLayer:
    """Blocks that share a layer, the loss perhaps behind them.

    Attributes:
        blocks: with their names.
        takes: what the layer before returns; None for the first one, which takes the batch.
        gives: what the layer after takes; None for the last one.
        values: names of the tensors in `gives`.
        has_loss: whether it computes the loss.
    """

    blocks: tuple[tuple[str, nn.Module], ...]
    takes: Structure | None
    gives: Structure | None
    values: tuple[str, ...]
    has_loss: bool


@dataclass(frozen=True)
class BlockChain:
    """What the layers of a graph of blocks run; `training` is the mode that they are put into."""

    layers: tuple[BlockLayer, ...]
    loss: LossFunction | None
    training: bool


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in what a block returned."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
