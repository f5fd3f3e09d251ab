"""After the last backward of a round: gradients are clipped, and the optimizer of the user steps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from planner.executor.run.loss_scaler import LossScaler
from planner.model.spec import TrainingSpec


class StageOptimizer:
    """The optimizer of one stage's parameters, with all that belongs to its steps.

    Args:
        parameters: of the stage, those that are trained.
        optimizer: the user's; None where nothing is trained.
        scheduler: of its learning rate.
        learning_rate_factor: by which the rates of both are larger than the user's.
        clip_grad_norm: the largest norm of the gradients.
        scaler: of the loss, for float16.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: Optimizer | None,
        scheduler: LRScheduler | None = None,
        *,
        learning_rate_factor: float = 1.0,
        clip_grad_norm: float | None = None,
        scaler: LossScaler | None = None,
    ) -> None:
        self.learning_rate_factor = learning_rate_factor
        self.parameters = list(parameters)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scaler = scaler
        self.skipped = 0  # updates left out because a gradient was no finite number
        self._clip_grad_norm = clip_grad_norm
        self._overflow = False  # in a gradient that was sent on
        self._unscaled = False

    @property
    def extras(self) -> dict[str, LRScheduler | LossScaler]:
        """What a checkpoint holds beside the optimizer, by name."""
        both = {"scheduler": self.scheduler, "loss scale": self.scaler}
        return {name: each for name, each in both.items() if each is not None}

    def note_sent(self, gradients: Iterable[Tensor]) -> None:
        """A stage without parameters sees an overflow only in what it sends on."""
        if self.scaler is not None and not self.parameters:
            self._overflow |= not all(bool(torch.isfinite(gradient).all()) for gradient in gradients)

    def squared_norm(self, leave_out: Iterable[nn.Parameter] = ()) -> float:
        """The square of the norm of all gradients, their scale taken off; infinite or no number after an overflow."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if self.scaler is not None and not self._unscaled and gradients:
            torch._foreach_mul_(gradients, 1 / self.scaler.scale)
            self._unscaled = True
        if self._overflow:
            return math.inf
        left_out = set(leave_out)
        counted = [parameter for parameter in self.parameters if parameter not in left_out]
        gradients = [parameter.grad for parameter in counted if parameter.grad is not None]
        # The float32 that the norm was is the exact root of this.
        return float(get_total_norm(gradients)) ** 2 if gradients else 0.0

    def step(self, squared_norm: float | None) -> None:
        """Take the scale off the gradients, clip them, and step; or leave the step out where they overflowed.

        Args:
            squared_norm: of the gradients that are clipped together; of this stage's own when None.
        """
        if self.scaler is not None or self._clip_grad_norm is not None:
            own = self.squared_norm()
            square = own if squared_norm is None else squared_norm
            finite = math.isfinite(square)
            self._unscaled = self._overflow = False
            if self.scaler is not None:
                self.scaler.update(finite)
                if not finite:
                    self.skipped += 1
                    return
            if self._clip_grad_norm is not None and self.parameters:
                clip_grads_with_norm_(self.parameters, self._clip_grad_norm, torch.tensor(math.sqrt(square)))
        if self.optimizer is not None:
            self.optimizer.step()

    def advance(self, minibatches: int) -> None:
        """Let the learning rate follow `minibatches` more."""
        if self.scheduler is not None:
            for _ in range(minibatches):
                with warnings.catch_warnings():
                    # Of a first update left out: the schedule follows the data, not the updates.
                    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                    self.scheduler.step()


def make_optimizer(
    spec: TrainingSpec,
    module: nn.Module,
    *,
    learning_rate_factor: float = 1.0,
    clip_grad_norm: float | None = None,
    scale_loss: bool = False,
) -> StageOptimizer:
    """The user's optimizer and scheduler for the parameters of `module` that are trained.

    Args:
        spec: the user's.
        module: a stage.
        learning_rate_factor: on the learning rate of every group, before the scheduler sees it.
        clip_grad_norm: as for `StageOptimizer`.
        scale_loss: for float16.
    """
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    scaler = LossScaler() if scale_loss else None
    if not trained:
        return StageOptimizer([], None, scaler=scaler)
    optimizer = spec.optimizer(trained)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * learning_rate_factor
    return StageOptimizer(
        list(trained.values()),
        optimizer,
        spec.scheduler(optimizer),
        learning_rate_factor=learning_rate_factor,
        clip_grad_norm=clip_grad_norm,
        scaler=scaler,
    )
