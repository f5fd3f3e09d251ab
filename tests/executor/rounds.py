"""Asynchronous 1F1B with rounds of several minibatches per replica, from the formula, apart from
the executor.

Stage s of depth d with r replicas that update after K minibatches each: minibatch t sees the
weights after floor(max(0, floor(t / r) - d + 1) / K) rounds; a round averages the K·r minibatches
it has, or what is left at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

Weights = dict[str, Tensor]
# with the number of minibatches averaged
Step = Callable[[Optimizer, list[nn.Parameter], int], object]


@dataclass
class _Stage:
    newest: dict[str, nn.Parameter]
    optimizer: Optimizer
    replicas: int
    depth: int
    history: list[Weights] = field(default_factory=list)
    sums: dict[int, Weights] = field(default_factory=dict)  # by replica
    count: int = 0

    def weights_for(self, minibatch: int) -> Weights:
        return self.history[max(0, minibatch // self.replicas - self.depth + 1)]

    def add(self, minibatch: int, gradients: Weights) -> None:
        before = self.sums.get(minibatch % self.replicas)
        both = (
            gradients
            if before is None
            else {name: before[name] + g for name, g in gradients.items()}
        )
        self.sums[minibatch % self.replicas] = both
        self.count += 1

    def finish_round(self, step: Step) -> None:
        for name, parameter in self.newest.items():
            total = sum(gradients[name] for gradients in self.sums.values())
            assert isinstance(total, Tensor)
            parameter.grad = total / self.count
        step(self.optimizer, list(self.newest.values()), self.count)
        self.remember()
        self.sums.clear()
        self.count = 0

    def remember(self) -> None:
        self.history.append(
            {name: parameter.detach().clone() for name, parameter in self.newest.items()}
        )


def delayed_rounds(
    model: nn.Module,
    names: Sequence[Sequence[str]],
    replicas: Sequence[int],
    depths: Sequence[int],
    make_optimizer: Callable[[dict[str, nn.Parameter]], Optimizer],
    forward_loss: Callable[[nn.Module, int], Tensor],
    minibatches: int,
    step: Step,
) -> tuple[list[float], Weights]:
    """Losses by minibatch, and the weights at the end.

    Args:
        model: unsplit.
        names: of the parameters of each stage.
        replicas: of each stage.
        depths: of each stage.
        make_optimizer: for a stage's parameters by name.
        forward_loss: of a minibatch; it finds the weights to use in the model.
        minibatches: how many.
        step: what is done with the gradients of a round.
    """
    by_name = dict(model.named_parameters())
    stages = []
    for own, r, depth in zip(names, replicas, depths, strict=True):
        newest = {name: nn.Parameter(by_name[name].detach().clone()) for name in own}
        stages.append(_Stage(newest, make_optimizer(newest), r, depth))
        stages[-1].remember()
    losses = []
    for minibatch in range(minibatches):
        used = {
            n: t.clone().requires_grad_()
            for stage in stages
            for n, t in stage.weights_for(minibatch).items()
        }
        loss = _at(model, used, forward_loss, minibatch)
        torch.autograd.backward(loss)
        losses.append(float(loss.detach()))
        for stage in stages:
            stage.add(minibatch, {name: _gradient(used[name]) for name in stage.newest})
            if stage.count == stage.replicas or minibatch == minibatches - 1:
                stage.finish_round(step)
    return losses, {name: tensor for stage in stages for name, tensor in stage.history[-1].items()}


def _at(
    model: nn.Module,
    weights: Weights,
    forward_loss: Callable[[nn.Module, int], Tensor],
    minibatch: int,
) -> Tensor:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self) -> Tensor:
            return forward_loss(self.model, minibatch)

    loss: Tensor = functional_call(
        Loss(), {f"model.{name}": tensor for name, tensor in weights.items()}, ()
    )
    return loss


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad
