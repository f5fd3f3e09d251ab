"""What a stage keeps from forward to backward where groups of its layers recompute, and the peak while it runs.

A group keeps the values that enter it, for every microbatch in flight. Before its own backward it runs its forward
again, and what its layers save exists then, for the one microbatch (Chen et al., "Training Deep Nets with Sublinear
Memory Cost", 2016, section 4, where every layer is in a group). A value that enters several groups is kept once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.cost.work import Floats, Integers, working_bytes

NO_GROUP = -1


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of a stage's layers, in their order.

    `gradient_bytes` and `workspace_bytes` are None where the profile does not know them, or not the order.
    """

    saved_bytes: Floats
    gradient_bytes: Floats | None = None
    workspace_bytes: Floats | None = None


@dataclass(frozen=True)
class Kept:
    """Three of the fields of a `Footprint`, for one stage."""

    saved_bytes: float
    working_bytes: float = 0.0
    accumulating_bytes: float = 0.0


def kept_activations(layers: LayerBytes, group_of: Integers, entering_bytes: Floats) -> Kept:
    """Compute what is kept, and the peak.

    While layer k of a group is at work, the stage holds what all layers before the group keep, what enters the group,
    what the group's layers have saved up to k, and for k what `working_bytes` says of any layer. Where that is not
    known, all that the largest group saves is added to all that is kept.

    Args:
        layers: of the stage.
        group_of: the number of each layer's group; `NO_GROUP` for layers that keep what they save.
        entering_bytes: of each layer that is the first of a group: the values that enter it, and no group before it.
    """
    saved, apart = layers.saved_bytes, group_of == NO_GROUP
    kept = np.where(apart, saved, entering_bytes)
    again = [np.flatnonzero(group_of == group) for group in np.unique(group_of[~apart])]
    if layers.gradient_bytes is None or layers.workspace_bytes is None:
        most = max((float(saved[group].sum()) for group in again), default=0.0)
        return Kept(float(kept.sum()), most, most)
    temporary = layers.workspace_bytes.copy()
    for group in again:
        temporary[group] += np.cumsum(saved[group])
    working, accumulating = working_bytes(kept, layers.gradient_bytes, temporary)
    return Kept(float(kept.sum()), float(working[-1]), float(accumulating[-1]))
