"""After the last backward of a round: gradients are clipped, and the optimizer of the user steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from planner.model.file import ModelFile


class StageOptimizer:
    """The optimizer of one stage's parameters, with all that belongs to its steps.

    Args:
        parameters: of the stage, those that are trained.
        optimizer: the user's; None where nothing is trained.
        scheduler: of its learning rate.
        learning_rate_factor: by which the rates of both are larger than the user's.
        clip_grad_norm: the largest norm of the gradients.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: Optimizer | None,
        scheduler: LRScheduler | None = None,
        *,
        learning_rate_factor: float = 1.0,
        clip_grad_norm: float | None = None,
    ) -> None:
        self.learning_rate_factor = learning_rate_factor
        self.parameters = list(parameters)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self._clip_grad_norm = clip_grad_norm

    @property
    def extras(self) -> dict[str, LRScheduler]:
        """What a checkpoint holds beside the optimizer, by name."""
        return {} if self.scheduler is None else {"scheduler": self.scheduler}

    def squared_norm(self, leave_out: Iterable[nn.Parameter] = ()) -> float:
        """The square of the norm of all gradients; it has the exact root in float32 that the norm was."""
        left_out = set(leave_out)
        counted = [parameter for parameter in self.parameters if parameter not in left_out]
        gradients = [parameter.grad for parameter in counted if parameter.grad is not None]
        return float(get_total_norm(gradients)) ** 2 if gradients else 0.0

    def step(self, squared_norm: float | None) -> None:
        """Clip and step.

        Args:
            squared_norm: of the gradients that are clipped together; of this stage's own when None.
        """
        if self.optimizer is None:
            return
        if self._clip_grad_norm is not None:
            square = self.squared_norm() if squared_norm is None else squared_norm
            clip_grads_with_norm_(self.parameters, self._clip_grad_norm, torch.tensor(math.sqrt(square)))
        self.optimizer.step()

    def advance(self, minibatches: int) -> None:
        """Let the learning rate follow `minibatches` more."""
        if self.scheduler is not None:
            for _ in range(minibatches):
                self.scheduler.step()


def make_optimizer(
    model_file: ModelFile, module: nn.Module, *, learning_rate_factor: float = 1.0, clip_grad_norm: float | None = None
) -> StageOptimizer:
    """The user's optimizer and scheduler for the parameters of `module` that are trained.

    Args:
        model_file: the user's.
        module: a stage.
        learning_rate_factor: on the learning rate of every group, before the scheduler sees it.
        clip_grad_norm: as for `StageOptimizer`.
    """
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not trained:
        return StageOptimizer([], None)
    optimizer = model_file.optimizer(trained)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * learning_rate_factor
    return StageOptimizer(
        list(trained.values()),
        optimizer,
        model_file.scheduler(optimizer),
        learning_rate_factor=learning_rate_factor,
        clip_grad_norm=clip_grad_norm,
    )
