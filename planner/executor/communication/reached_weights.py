"""Which weights the backwards of a round have reached, where replicas divide the weights of blocks
that run as they are.

Code that is not captured may leave weights out that other replicas use: an expert without rows has
no gradient. `fully_shard` exchanges gradients of all weights then, zeros among them, and what no
replica has reached must have none in the end, as in one process: an optimizer leaves it alone.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.model.stage.units import Unit
from planner.model.tensor.division import is_divided


class ReachedWeights:
    """Notes which weights of `units` have gradients; made before `fully_shard` divides the
    units.
    """

    def __init__(self, units: Iterable[Unit]) -> None:
        self._units = list(units)
        self._watched = set[nn.Parameter]()  # whole weights
        self._reached = set[tuple[Unit, str]]()
        for unit in self._units:
            # before those of fully_shard, which part with the weights
            unit.register_forward_hook(self._watch)

    def take(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> set[nn.Parameter]:
        """Return the divided weights that some replica of the `groups` has reached since the last
        call; all replicas call it.
        """
        names = {
            (unit, name): weight
            for unit in self._units
            for name, weight in unit.named_parameters()
            if weight.requires_grad
        }
        own = {names[each] for each in self._reached}
        self._reached.clear()

        weights = list(dict.fromkeys(names.values()))
        counts = torch.tensor([weight in own for weight in weights], dtype=torch.int32)
        counts = counts.to(device)
        for group in groups:
            dist.all_reduce(counts, group=group)
        found = counts.tolist()
        return {weight for weight, count in zip(weights, found, strict=True) if count}

    def _watch(self, unit: nn.Module, _: Any, made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert isinstance(unit, Unit)
        trained = {
            name: weight
            for name, weight in unit.named_parameters()
            if weight.requires_grad and not is_divided(weight)
        }
        for name, weight in trained.items():
            if weight not in self._watched:
                self._watched.add(weight)
                note = partial(self._note, (unit, name))
                weight.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

        # Replicas gather and sum in one order if backward comes through all units on each of them.
        if not trained or any(value.requires_grad for value in made):
            return made
        return tuple(
            value.detach().requires_grad_().clone() if value.is_floating_point() else value
            for value in made
        )

    def _note(self, place: tuple[Unit, str], _: Tensor) -> None:
        self._reached.add(place)
