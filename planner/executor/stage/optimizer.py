"""Update the parameters of a stage: unscale and clip the gradients of a round, and step the user's optimizer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.lr_scheduler import LRScheduler

from planner.executor.stage.loss_scaler import LossScaler
from planner.model.spec import TrainingSpec


class StageOptimizer:
    """The user's optimizer for one stage's trained parameters, with its scheduler, loss scaler and clipping.

    Args:
        spec: makes the optimizer and the scheduler.
        module: a stage, or the whole model.
        learning_rate_factor: multiplies the learning rate of every group, before the scheduler sees it.
        clip_grad_norm: the largest norm of the gradients.
        scale_loss: whether the loss is scaled, for float16.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        module: nn.Module,
        *,
        learning_rate_factor: float = 1.0,
        clip_grad_norm: float | None = None,
        scale_loss: bool = False,
    ) -> None:
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.parameters = list(trained.values())
        self.learning_rate_factor = learning_rate_factor if trained else 1.0
        self.optimizer = spec.optimizer(trained) if trained else None  # user code, which may not expect an empty list
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            group["lr"] = group["lr"] * learning_rate_factor
        self.scheduler = None if self.optimizer is None else spec.scheduler(self.optimizer)
        self.scaler = LossScaler() if scale_loss else None
        self.skipped = 0  # updates, because a gradient was not finite
        self._clip_grad_norm = clip_grad_norm
        self._overflow: Tensor | None = None  # on the device: whether there was one in a gradient that was sent on
        self._unscaled = False

    @property
    def extras(self) -> dict[str, LRScheduler | LossScaler]:
        """What a checkpoint holds beside the optimizer, by name."""
        both = {"scheduler": self.scheduler, "loss scale": self.scaler}
        return {name: each for name, each in both.items() if each is not None}

    def note_sent(self, gradients: Iterable[Tensor]) -> None:
        """Look for an overflow in `gradients`: a stage without parameters has no other gradients to find it in."""
        if self.scaler is not None and not self.parameters:
            for gradient in gradients:
                overflow = torch.isfinite(gradient).all().logical_not()
                self._overflow = overflow if self._overflow is None else self._overflow | overflow

    def squared_norm(self, leave_out: Iterable[nn.Parameter] = ()) -> float:
        """Unscale all gradients and return their squared norm; inf or nan after an overflow."""
        self._unscale()
        if self._overflow is not None and bool(self._overflow):
            return math.inf
        left_out = set(leave_out)
        gradients = self._gradients(parameter for parameter in self.parameters if parameter not in left_out)
        # Squared in float64: its root is exactly the norm that float32 gave, as clip_grad_norm_ would use it.
        return float(get_total_norm(gradients)) ** 2 if gradients else 0.0

    def step(self, squared_norm: float | None) -> None:
        """Unscale and clip the gradients, and step; after an overflow, skip the step.

        Whether there was an overflow, the host must know: it waits for the device, once per update under float16. To
        clip by the stage's own norm it need not know it.

        Args:
            squared_norm: of all gradients that are clipped together; None for this stage's own.
        """
        self._unscale()
        if self.scaler is not None:
            squared_norm = self.squared_norm() if squared_norm is None else squared_norm
            finite = math.isfinite(squared_norm)
            self._unscaled, self._overflow = False, None
            self.scaler.update(finite)
            if not finite:
                self.skipped += 1
                return
        if self._clip_grad_norm is not None and self.parameters:
            clip_grads_with_norm_(self.parameters, self._clip_grad_norm, self._norm(squared_norm))
        if self.optimizer is not None:
            self.optimizer.step()

    def advance(self, minibatches: int) -> None:
        """Step the scheduler once for each of `minibatches`."""
        if self.scheduler is not None:
            for _ in range(minibatches):
                with warnings.catch_warnings():
                    # PyTorch warns when the first update was skipped; the schedule follows the data, not the updates.
                    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                    self.scheduler.step()

    def _norm(self, squared: float | None) -> Tensor:
        """Return the root of a squared norm; for None this stage's own norm, which stays on the device."""
        if squared is None:
            return get_total_norm(self._gradients(self.parameters))
        return torch.tensor(math.sqrt(squared))

    def _unscale(self) -> None:
        """Divide the gradients by the loss scale, once per update."""
        gradients = self._gradients(self.parameters)
        if self.scaler is not None and not self._unscaled and gradients:
            torch._foreach_mul_(gradients, 1 / self.scaler.scale)
            self._unscaled = True

    @staticmethod
    def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        return [parameter.grad for parameter in parameters if parameter.grad is not None]


class JointNorm:
    """Sums squared gradient norms over all workers, under synchronous schedules, where all stages update together.

    Args:
        group: of all workers, over gloo.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def sum(self, squared_norm: float) -> float:
        """Return the sum of all workers' `squared_norm`; each calls it once per update."""
        total = torch.tensor(squared_norm, dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return float(total)
