"""Optimizers of people, in short: some combine what stages would step apart, and some do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer


def gradients_of(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], nn.Parameter, Tensor]]:
    """Yield group, parameter and gradient of all that have one."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield group, parameter, parameter.grad


def norm_of(gradients: Iterable[Tensor]) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(
        torch.stack([gradient.norm() for gradient in gradients])
    )
    return norm


class Normalised(Optimizer):
    """Normalised gradient descent: one norm of all gradients."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        norm = norm_of(gradient for _, _, gradient in gradients_of(self))
        for group, parameter, gradient in gradients_of(self):
            parameter.sub_(gradient / norm, alpha=group["lr"])


class NormalisedGroups(Normalised):
    """The same with a norm per group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            own = [each for each in group["params"] if each.grad is not None]
            norm = norm_of(each.grad for each in own)
            for parameter in own:
                parameter.sub_(parameter.grad / norm, alpha=group["lr"])


class Lamb(Optimizer):
    """LAMB with a trust ratio per tensor; timm's divides all gradients by their norm first, where
    that exceeds 1.
    """

    def __init__(
        self, parameters: Any, lr: float = 0.01, max_grad_norm: float | None = 1.0
    ) -> None:
        super().__init__(parameters, {"lr": lr})
        self.max_grad_norm = max_grad_norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        factor = 1.0
        if self.max_grad_norm is not None:
            norm = norm_of(gradient for _, _, gradient in gradients_of(self))
            factor = 1.0 / max(1.0, float(norm) / self.max_grad_norm)
        for group, parameter, gradient in gradients_of(self):
            state = self.state[parameter]
            if not state:
                state |= {
                    "step": 0,
                    "first": torch.zeros_like(parameter),
                    "second": torch.zeros_like(parameter),
                }
            state["step"] += 1
            state["first"].lerp_(factor * gradient, 0.1)
            state["second"].lerp_((factor * gradient).square(), 0.001)
            first = state["first"] / (1 - 0.9 ** state["step"])
            second = state["second"] / (1 - 0.999 ** state["step"])
            update = first / (second.sqrt() + 1e-6)
            trust = parameter.norm() / update.norm()
            parameter.sub_(update * trust, alpha=group["lr"])


class Prodigy(Optimizer):
    """Prodigy's estimate of the distance to the solution, from sums over all parameters."""

    def __init__(self, parameters: Any, lr: float = 1.0) -> None:
        super().__init__(parameters, {"lr": lr, "d": 1e-6, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        shared = self.param_groups[0]
        rate = shared["d"] * shared["lr"]
        denominator = 0.0
        for _, parameter, gradient in gradients_of(self):
            state = self.state[parameter]
            if not state:
                state |= {"began": parameter.clone(), "sum": torch.zeros_like(parameter)}
            shared["numerator"] += rate * float((gradient * (state["began"] - parameter)).sum())
            state["sum"].add_(gradient, alpha=rate)
            denominator += float(state["sum"].abs().sum())
        if denominator:
            shared["d"] = max(shared["d"], shared["numerator"] / denominator)
        for _, parameter, gradient in gradients_of(self):
            parameter.sub_(gradient.sign(), alpha=shared["d"] * shared["lr"])


def clipping_adamw(parameters: Any) -> Optimizer:
    """AdamW itself, with a hook that clips all gradients."""
    optimizer = AdamW(parameters, lr=0.01)

    def clip(stepped: Optimizer, args: Any, kwargs: Any) -> None:
        nn.utils.clip_grad_norm_(
            [each for group in stepped.param_groups for each in group["params"]], 1.0
        )

    optimizer.register_step_pre_hook(clip)
    return optimizer


class ClippingLate(SGD):
    """Clips all gradients by one norm, but only after three steps, whose gradients are larger than
    later updates.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.3)
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        if self.steps > 3:
            nn.utils.clip_grad_norm_([parameter for _, parameter, _ in gradients_of(self)], 0.001)
        super().step()


class NormalisedOnce(SGD):
    """Divides all gradients by one norm, in a step between others of much larger gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.3)
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        if self.steps == 3:
            norm = norm_of(gradient for _, _, gradient in gradients_of(self))
            for _, _, gradient in gradients_of(self):
                gradient.mul_(0.01 / norm)
        super().step()


class Noisy(SGD):
    """Langevin dynamics: noise is added to the gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for _, _, gradient in gradients_of(self):
            gradient.add_(torch.randn_like(gradient))
        super().step()


class NoisyBySelf(Noisy):
    """One that accepts noise of its own in each stage."""

    separable = True


class Averaging(SGD):
    """Sums gradients up itself, if it is one worker among others."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if dist.is_initialized():
            for _, _, gradient in gradients_of(self):
                dist.all_reduce(gradient)
        super().step()


class Gathering(SGD):
    """Muon's way over a process group: who has computed an update sends it to all others."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for _, _, gradient in gradients_of(self):
            dist.all_gather(
                [torch.empty_like(gradient) for _ in range(dist.get_world_size())], gradient
            )
        super().step()


class FalselyElementwise(Lamb):
    """A trust ratio per tensor, and a wrong word on itself."""

    elementwise = True


class FalselySeparable(Normalised):
    """One norm of all gradients, and a wrong word on itself."""

    separable = True


class Particular(SGD):
    """Fails where it has not all parameters of a model of four."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert len(self.param_groups[0]["params"]) == 4, "all four, please"
        super().step()


COMBINING: dict[str, Callable[[Any], Optimizer]] = {
    "one norm": Normalised,
    "norms of groups": NormalisedGroups,
    "LAMB that clips": Lamb,
    "Prodigy": Prodigy,
    "a hook that clips": clipping_adamw,
    "one that clips late": ClippingLate,
    "one norm in a step of small gradients": NormalisedOnce,
    "a wrong word": FalselySeparable,
}
