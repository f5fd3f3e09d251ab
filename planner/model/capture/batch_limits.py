"""The fewest samples that layers can be trained on."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import fx

from planner.model.capture.graph import GraphLayer

_TRAINING = 5  # position of this argument of aten.batch_norm


def least_batch_size(layers: Iterable[GraphLayer]) -> int:
    """Return 2 where a BatchNorm has one value per channel and sample, of which there is no variance; else 1."""
    return 2 if any(_needs_two(node) for layer in layers for node in layer.nodes) else 1


def _needs_two(node: fx.Node) -> bool:
    if node.target is not torch.ops.aten.batch_norm.default or not node.args[_TRAINING]:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    positions = source.meta["val"].shape[2:]
    return all(isinstance(size, int) for size in positions) and math.prod(positions) == 1
