"""What asynchronous pipeline training computes, written from the formula and sharing nothing with
the executor.

PipeDream (SOSP'19, section 3.3): w(t+1) = w(t) - lr * grad f(w1(t-n+1), ..., wn(t)). With replicas,
stage s of depth d_s = ceil(sum_{u>=s} r_u / r_s) sees minibatch t with the weights after max(0,
floor(t / r_s) - d_s + 1) of its rounds, and a round averages the gradients of r_s minibatches, the
last one those of the minibatches it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call

Weights = dict[str, Tensor]
ForwardLoss = Callable[[nn.Module, int], Tensor]  # of a minibatch, through the unsplit model


class _Loss(nn.Module):
    """Makes `functional_call` run forward and loss with the weights it is given."""

    def __init__(self, model: nn.Module, forward_loss: ForwardLoss) -> None:
        super().__init__()
        self.model = model
        self._forward_loss = forward_loss

    def forward(self, minibatch: int) -> Tensor:
        return self._forward_loss(self.model, minibatch)


@dataclass
class _ReferenceStage:
    # parameters whose gradients are added up first: one each, or a stage's copies of one
    parts: list[list[str]]
    replicas: int
    depth: int
    newest: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer | None
    history: list[Weights] = field(default_factory=list)  # by number of rounds done
    pending: list[Weights] = field(default_factory=list)  # gradients of the round so far

    def rounds_before(self, minibatch: int) -> int:
        return max(0, minibatch // self.replicas - self.depth + 1)

    def weights_for(self, minibatch: int) -> Weights:
        return self.history[self.rounds_before(minibatch)]

    def finish_round(self) -> None:
        for part in self.parts:
            parameter, total = self.newest[part[0]], self.pending[0][part[0]]
            for gradients in self.pending[1:]:
                total = total + gradients[part[0]]
            mean = total / len(self.pending)
            # of an earlier stage's copies
            parameter.grad = mean if parameter.grad is None else parameter.grad + mean
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.pending.clear()
        self.remember()

    def remember(self) -> None:
        self.history.append(
            {name: parameter.detach().clone() for name, parameter in self.newest.items()}
        )


def delayed_updates(
    model: nn.Module,
    stage_parameters: Sequence[Sequence[str]],
    replicas: Sequence[int],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    forward_loss: ForwardLoss,
    minibatches: int,
    depths: Sequence[int] | None = None,
    *,
    copies: Sequence[Sequence[str]] = (),
) -> tuple[list[float], Weights]:
    """Losses by minibatch, and the weights at the end, of asynchronous 1F1B with weight stashing.

    `depths` are the d_s of the formula where they are not the published ones. Each of `copies` are
    parameters, in the order of their stages, that step as one: with the sum of their gradients, at
    the depth of the deepest of their stages.
    """
    by_name = dict(model.named_parameters())
    copied = {name for group in copies for name in group}
    stages = []
    for index, names in enumerate(stage_parameters):
        newest = {
            name: nn.Parameter(by_name[name].detach().clone())
            for name in names
            if name not in copied
        }
        stage = _ReferenceStage(
            parts=[[name] for name in newest],
            replicas=replicas[index],
            depth=-(-sum(replicas[index:]) // replicas[index]) if depths is None else depths[index],
            newest=newest,
            optimizer=make_optimizer(list(newest.values())) if newest else None,
        )
        stage.remember()
        stages.append(stage)
    for group in copies:
        parts = [[name for name in group if name in names] for names in stage_parameters]
        holders = [stage for stage, part in zip(stages, parts, strict=False) if part]
        one = nn.Parameter(by_name[group[0]].detach().clone())
        together = _ReferenceStage(
            parts=[part for part in parts if part],
            replicas=holders[0].replicas,
            depth=max(holder.depth for holder in holders),
            newest=dict.fromkeys(group, one),
            optimizer=make_optimizer([one]),
        )
        together.remember()
        stages.append(together)
    losses = []
    module = _Loss(model, forward_loss)
    for minibatch in range(minibatches):
        weights = {
            name: tensor.clone().requires_grad_()
            for stage in stages
            for name, tensor in stage.weights_for(minibatch).items()
        }
        loss: Tensor = functional_call(
            module, {f"model.{name}": tensor for name, tensor in weights.items()}, (minibatch,)
        )
        torch.autograd.backward(loss)
        losses.append(float(loss.detach()))
        for stage in stages:
            stage.pending.append(
                {
                    part[0]: _sum([_gradient(weights[name]) for name in reversed(part)])
                    for part in stage.parts
                }
            )
            if len(stage.pending) == stage.replicas or minibatch == minibatches - 1:
                stage.finish_round()
    return losses, {name: tensor for stage in stages for name, tensor in stage.history[-1].items()}


def double_buffered(
    model: nn.Module,
    stage_parameters: Sequence[Sequence[str]],
    replicas: Sequence[int],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    forward_loss: Callable[[nn.Module, int, int], Tensor],  # of a microbatch
    minibatches: int,
    microbatches: int,
) -> tuple[list[float], Weights]:
    """Losses by minibatch, and the weights at the end, of PipeDream-2BW (ICML'21): w(t+1) = w(t) -
    lr·∇f(w(t-1)).

    A minibatch's gradient is the mean over its microbatches. With replicas microbatch j of
    minibatch t goes to replica (t·m + j) mod r of a stage, each sums its own, and then they are
    added up.
    """
    parameters = {
        name: nn.Parameter(value.detach().clone()) for name, value in model.named_parameters()
    }
    optimizers = [
        make_optimizer([parameters[name] for name in names]) for names in stage_parameters if names
    ]
    history = [{name: value.detach().clone() for name, value in parameters.items()}]
    module, losses = _MicrobatchLoss(model, forward_loss), []
    for minibatch in range(minibatches):
        sums: dict[tuple[str, int], Tensor] = {}
        loss_sum = 0.0
        for microbatch in range(microbatches):
            weights = {
                name: value.clone().requires_grad_()
                for name, value in history[max(0, minibatch - 1)].items()
            }
            state = {f"model.{name}": tensor for name, tensor in weights.items()}
            loss: Tensor = functional_call(module, state, (minibatch, microbatch)) * (
                1 / microbatches
            )
            torch.autograd.backward(loss)
            loss_sum += float(loss.detach())
            for names, r in zip(stage_parameters, replicas, strict=True):
                for name in names:
                    key = name, (minibatch * microbatches + microbatch) % r
                    sums[key] = (
                        sums[key] + _gradient(weights[name])
                        if key in sums
                        else _gradient(weights[name])
                    )
        for names, r in zip(stage_parameters, replicas, strict=True):
            for name in names:
                total = sums[name, 0]
                for replica in range(1, r):
                    total = total + sums[name, replica]
                parameters[name].grad = total
        for optimizer in optimizers:
            optimizer.step()
        history.append({name: value.detach().clone() for name, value in parameters.items()})
        losses.append(loss_sum)
    return losses, history[-1]


class _MicrobatchLoss(nn.Module):
    """The same for microbatches."""

    def __init__(
        self, model: nn.Module, forward_loss: Callable[[nn.Module, int, int], Tensor]
    ) -> None:
        super().__init__()
        self.model = model
        self._forward_loss = forward_loss

    def forward(self, minibatch: int, microbatch: int) -> Tensor:
        return self._forward_loss(self.model, minibatch, microbatch)


def plain_training(
    model: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    microbatch_losses: Callable[[nn.Module, int], Sequence[Tensor]],
    minibatches: int,
) -> tuple[list[float], Weights]:
    """Ordinary training of the unsplit model, gradients of a minibatch's parts averaged before each
    step.
    """
    optimizer = make_optimizer(list(model.parameters()))
    losses = []
    for minibatch in range(minibatches):
        parts = list(microbatch_losses(model, minibatch))
        loss = torch.stack(parts).mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {
        name: parameter.detach().clone() for name, parameter in model.named_parameters()
    }


def _sum(gradients: Sequence[Tensor]) -> Tensor:
    """One after the other; a backward comes to the last use of a weight first."""
    total = gradients[0]
    for gradient in gradients[1:]:
        total = total + gradient
    return total


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad
