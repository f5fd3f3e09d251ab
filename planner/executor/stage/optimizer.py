"""Update the parameters of a stage: unscale and clip the gradients of a round, and step the user's
optimizer.

Gradients that are small underflow in float16, so backward starts from a loss times a large factor,
the loss scale (Micikevicius et al., "Mixed Precision Training", ICLR 2018; the constants are those
of torch.amp.GradScaler).
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from planner.errors import PlanError
from planner.executor.communication.sharding import Sharding
from planner.executor.stage.scheduler import StageScheduler
from planner.model.elementwise import is_elementwise, kept_whole
from planner.model.optimizer_part import (
    TrainedParameter,
    optimizer_of_part,
    step_part,
    trained_parameters,
)
from planner.model.reference_optimizer import ReferenceOptimizer
from planner.model.spec import TrainingSpec
from planner.model.tensor.division import divided_weights
from planner.model.tensor.whole_stand_ins import step_parts, with_whole_stand_ins
from planner.model.torch_private import multiply_all

FIRST_SCALE = 2.0**16
GROWTH = 2.0
BACKOFF = 0.5
GROWTH_INTERVAL = 2000  # updates without an overflow before a larger scale is tried


class LossScaler:
    """The loss scale of one stage: a power of two, so that unscaling is exact.

    Every stage has its own. Gradients from a later stage are rescaled to it when they arrive.
    """

    def __init__(self, scale: float = FIRST_SCALE, growth_interval: int = GROWTH_INTERVAL) -> None:
        self.scale = scale
        self._growth_interval = growth_interval
        self._clean = 0  # updates since the last change

    def update(self, finite: bool) -> None:
        """Adapt the scale after an update, which was skipped unless all gradients were `finite`."""
        self._clean = self._clean + 1 if finite else 0
        if not finite:
            self.scale *= BACKOFF
        elif self._clean == self._growth_interval:
            self.scale *= GROWTH
            self._clean = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"scale": self.scale, "clean": self._clean}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.scale = float(state_dict["scale"])
        self._clean = int(state_dict["clean"])


class StageOptimizer:
    """The user's optimizer for one stage's trained parameters, with its scheduler, loss scaler and
    clipping.

    It has the groups of the whole model's optimizer: see `planner.model.optimizer_part`. With
    `sharding` it steps this replica's part of each parameter, and replicas exchange the weights.

    Args:
        whole: all trained parameters of the model; None for those of `module` alone.

    Raises:
        PlanError: when the optimizer is to be divided, and does not treat each element of a
            parameter alone.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        module: nn.Module,
        *,
        learning_rate_factor: float = 1.0,
        clip_grad_norm: float | None = None,
        scale_loss: bool = False,
        sharding: Sharding | None = None,
        whole: Sequence[TrainedParameter] | None = None,
    ) -> None:
        trained = {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self._spec = spec
        self._division = divided_weights(module)
        self.parameters = list(trained.values())
        self.learning_rate_factor = 1.0
        if trained:
            self.learning_rate_factor = learning_rate_factor
        self.optimizer: Optimizer | None = None
        # of what optimizer() returned, for all parameters of the model
        self.groups_digest: int | None = None
        reference: ReferenceOptimizer | None = None
        if trained:
            everything = trained_parameters(module) if whole is None else whole
            named = dict(module.named_parameters(remove_duplicate=False))
            # First, because user code may keep the optimizer that it has returned last.
            divided = sharding is not None or bool(self._division.cuts)
            hollow = with_whole_stand_ins(self._division, named, torch.device("meta"))
            reference = ReferenceOptimizer(
                spec, everything, hollow, learning_rate_factor, divided=divided
            )
            given = with_whole_stand_ins(self._division, named)
            self.optimizer = optimizer_of_part(spec, everything, given)
            step_parts(self.optimizer, self._division, named, given)
            reference.check_groups(self.optimizer, named)
            self.groups_digest = reference.digest

        self.sharding = sharding
        self._alike = [
            parameter for name, parameter in trained.items() if name not in self._division.cuts
        ]
        over_ranks = len(self._alike) < len(trained)
        if over_ranks and self.optimizer is not None and not is_elementwise(self.optimizer):
            raise _indivisible(self.optimizer, "weights over ranks", "solve with `tensor=1`")
        # what steps, by whole parameters
        self._stepped = {parameter: parameter for parameter in self.parameters}
        if sharding is not None and self.optimizer is not None:
            undivided = kept_whole(self.optimizer) if sharding.divides else []
            if undivided is None:
                raise _indivisible(
                    self.optimizer,
                    "the optimizer's state over replicas",
                    "solve again with `shard_optimizer=never`",
                )
            sharding.divide(self.optimizer, set(undivided))
            self._stepped = {
                parameter: shard.stepped for parameter, shard in sharding.shards.items()
            }
            # may be new
            self.parameters = [
                parameter for parameter in module.parameters() if parameter.requires_grad
            ]

        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            group["lr"] = group["lr"] * learning_rate_factor
        self.scheduler = self._scheduled(reference)
        self.scaler = LossScaler() if scale_loss else None
        self.skipped = 0  # updates, because a gradient was not finite
        self._clip_grad_norm = clip_grad_norm
        # on the device: whether there was one in a gradient that was sent on
        self._overflow: Tensor | None = None
        self._unscaled = False

    def _scheduled(self, reference: ReferenceOptimizer | None) -> StageScheduler | None:
        """Return the user's scheduler of the optimizer; None where there is none of either."""
        if self.optimizer is None or reference is None:
            return None
        scheduler = self._spec.scheduler(self.optimizer)
        if scheduler is None:
            return None
        return StageScheduler(scheduler, self.optimizer, reference)

    @property
    def extras(self) -> dict[str, StageScheduler | LossScaler]:
        """What a checkpoint holds beside the optimizer, by name."""
        both = {"scheduler": self.scheduler, "loss scale": self.scaler}
        return {name: each for name, each in both.items() if each is not None}

    def note_sent(self, gradients: Iterable[Tensor]) -> None:
        """Look for an overflow in `gradients`, on a stage without parameters: it has no others to
        find it in.
        """
        if self.scaler is not None and not self.parameters:
            for gradient in gradients:
                overflow = torch.isfinite(gradient).all().logical_not()
                if self._overflow is None:
                    self._overflow = overflow
                else:
                    self._overflow = self._overflow | overflow

    def squared_norm(self, leave_out: Iterable[nn.Parameter] = ()) -> float:
        """Unscale all gradients and return the squared norm of this worker's part; inf or nan after
        an overflow.
        """
        self._prepare()
        if self._overflow is not None and bool(self._overflow):
            return math.inf
        gradients = self._counted_gradients(leave_out)
        # Squared in float64: its root is exactly the norm that float32 gave, as clip_grad_norm_
        # would use it.
        if not gradients:
            return 0.0
        return float(get_total_norm(gradients)) ** 2

    def step(self, squared_norm: float | None) -> None:
        """Unscale and clip the gradients, by this stage's own norm or that of all, and step unless
        one overflowed.
        """
        self._prepare()
        # Whether there was an overflow, the host must know: it waits for the device, once per
        # update under float16.
        if self.scaler is not None:
            if squared_norm is None:
                squared_norm = self.squared_norm()
                if not self._is_whole:
                    squared_norm = float(
                        self._sum(self.parameters[0].new_tensor(squared_norm, dtype=torch.float64))
                    )
            finite = math.isfinite(squared_norm)
            self._unscaled = False
            self._overflow = None
            self.scaler.update(finite)
            if not finite:
                self.skipped += 1
                return

        if self._clip_grad_norm is not None and self.parameters:
            clip_grads_with_norm_(
                list(self._stepped.values()), self._clip_grad_norm, self._norm(squared_norm)
            )

        if self.optimizer is None:
            return
        if self.sharding is None:
            step_part(self._spec, self.optimizer)
        else:
            self.sharding.update(partial(step_part, self._spec, self.optimizer))

    def forget_gradients(self) -> None:
        """Let go of all gradients."""
        for parameter in (*self.parameters, *self._stepped.values()):
            parameter.grad = None

    def advance(self, minibatches: int) -> None:
        """Move the learning rate on by so many minibatches."""
        if self.scheduler is not None:
            for _ in range(minibatches):
                self.scheduler.step()

    def _norm(self, squared: float | None) -> Tensor:
        # The stage's own norm stays on the device.
        if squared is not None:
            return torch.tensor(math.sqrt(squared))
        gradients = self._counted_gradients()
        if self._is_whole:
            return get_total_norm(gradients)
        if gradients:
            own = get_total_norm(gradients)
        else:
            own = self.parameters[0].new_zeros((), dtype=torch.float64)

        return self._sum(own.double().square()).sqrt().to(own.dtype)

    @property
    def _is_whole(self) -> bool:
        """Whether this worker has all gradients of the stage."""
        divides = self.sharding is not None and self.sharding.divides
        return not self.parameters or (not divides and self._division.group is None)

    def _counted_gradients(self, leave_out: Iterable[nn.Parameter] = ()) -> list[Tensor]:
        # Those that several ranks have, the first one counts.
        elsewhere = {*leave_out, *(() if self._division.is_first_rank else self._alike)}
        counted = (stepped for whole, stepped in self._stepped.items() if whole not in elsewhere)
        return [stepped.grad for stepped in counted if stepped.grad is not None]

    def _sum(self, value: Tensor) -> Tensor:
        total = value
        if self.sharding is not None and self.sharding.divides:
            total = self.sharding.sum(value)
        if self._division.group is None:
            return total
        return self._division.group.sum(total)

    def _prepare(self) -> None:
        if self.sharding is not None:
            self.sharding.take_gradients()
        gradients = [stepped.grad for stepped in self._stepped.values() if stepped.grad is not None]
        if self.scaler is not None and not self._unscaled and gradients:
            multiply_all(gradients, 1 / self.scaler.scale)
            self._unscaled = True


def _indivisible(optimizer: Optimizer, what: str, hint: str) -> PlanError:
    name = type(optimizer).__name__
    if getattr(optimizer, "elementwise", None) is False:
        reason = f"{name} updates an element by what its whole parameter is"
    else:
        reason = f"nobody says that {name} treats each element of a parameter alone"
        hint += f"; or, if it does, let optimizer() set {name}.elementwise = True"
    return PlanError(f"the plan divides {what}, but {reason}", hint=hint)
