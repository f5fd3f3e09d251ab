"""Stages that stay on their workers while a run changes its plan: no file has their tensors.

A stage stays where both plans give the same layers to the same replicas, in the same order. Where
replicas divide its optimizer or its weights, or a half-precision weight has a master, its state
goes the way of all others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planner.executor.checkpoint.optimizer_state import (
    OptimizerState,
    give_state,
    rescale_rates,
    take_state,
)
from planner.executor.checkpoint.stage_parts import Restorable
from planner.formats.plan import Plan
from planner.model.tensor.division import divided_weights, own_memory


@dataclass(frozen=True)
class StayingStage:
    """The state of a stage replica, in the tensors that it was trained in."""

    weights: Mapping[str, Tensor]  # and buffers
    optimizer: OptimizerState | None
    optimizer_tensors: Mapping[str, Tensor]
    extras: Mapping[str, dict[str, Any]]
    learning_rate_factor: float

    @classmethod
    def of(cls, own: Restorable) -> "StayingStage":
        """Take the state of a stage replica; nothing is copied."""
        optimizer = None
        tensors: Mapping[str, Tensor] = {}
        if own.optimizer is not None:
            optimizer, tensors = take_state(own.optimizer, own.module, own.learning_rate_factor)
        return cls(
            weights=own.module.state_dict(),
            optimizer=optimizer,
            optimizer_tensors=tensors,
            extras={name: each.state_dict() for name, each in own.extras.items()},
            learning_rate_factor=own.learning_rate_factor,
        )

    def restore(self, own: Restorable) -> None:
        """Fill the same stage replica, built anew: weights are copied, and the optimizer takes the
        tensors of the old one over.
        """
        with torch.no_grad():
            for name, tensor in own.module.state_dict(keep_vars=True).items():
                own_memory(tensor).copy_(self.weights[name])

        if own.optimizer is not None:
            assert self.optimizer is not None
            give_state(
                own.optimizer,
                own.module,
                [self.optimizer],
                self.optimizer_tensors.__getitem__,
                own.learning_rate_factor,
            )

        # A stage without trained weights has a loss scale, too.
        ratio = own.learning_rate_factor / self.learning_rate_factor
        for name, stateful in own.extras.items():
            stateful.load_state_dict(rescale_rates(self.extras[name], ratio))


def staying_stages(before: Plan, after: Plan) -> dict[int, int]:
    """Return the stages of a plan that stay under the next one, with their numbers there."""
    if before.ranks_per_replica > 1 or after.ranks_per_replica > 1:
        return {}
    later = {(stage.layers, stage.ranks): number for number, stage in enumerate(after.stages)}
    found = {}
    for number, stage in enumerate(before.stages):
        new = later.get((stage.layers, stage.ranks))
        if new is None or _shards(before, number) or _shards(after, new):
            continue
        found[number] = new

    return found


def take_staying(
    before: Plan, after: Plan, stages: Sequence[Restorable]
) -> tuple[dict[int, StayingStage], list[Restorable]]:
    """Take the state of those of a worker's stages that stay, by their new numbers; return the
    other stages, too.
    """
    staying = {}
    others = []
    new = staying_stages(before, after)
    for own in stages:
        if own.stage not in new or not _is_whole(own):
            others.append(own)
            continue
        staying[new[own.stage]] = StayingStage.of(own)

    return staying, others


def _shards(plan: Plan, number: int) -> bool:
    stage = plan.stages[number]
    return stage.shards_optimizer or stage.shards_gradients


def _is_whole(own: Restorable) -> bool:
    return own.sharding is None and divided_weights(own.module).group is None
