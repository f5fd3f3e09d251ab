"""Train the unsplit model in plain PyTorch, whole minibatches at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from planner.executor.run.data import make_batches, weighted
from planner.formats.plan import Plan
from planner.model.loss import loss_of
from planner.model.spec import TrainingSpec
from planner.profiler.this_machine import thread_count
from planner.schedule.instructions import Unit


@dataclass(frozen=True)
class Trained:
    """What a run gives: the loss of each minibatch, and the state of the unsplit model at
    its end.
    """

    losses: list[float]
    weights: Mapping[str, Tensor]

    def differences(self, other: Trained) -> tuple[float, float]:
        """Return the largest absolute differences of the losses and of the weights."""
        assert self.weights.keys() == other.weights.keys()
        assert len(self.losses) == len(other.losses)
        losses = max(abs(mine - its) for mine, its in zip(self.losses, other.losses, strict=True))
        return losses, largest_difference(self.weights, other.weights)


def largest_difference(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """Return the largest absolute difference of two states with the same names, counters
    left out.
    """
    return max(
        float((tensor.to(torch.complex128) - others[name]).abs().max())
        for name, tensor in some.items()
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel()
    )


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of a model without what else its modules keep in it, such as
    neuraloperator's `_metadata`.
    """
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def initial_weights(spec: TrainingSpec, seed: int) -> dict[str, Tensor]:
    """Return the weights that a run with this seed begins with."""
    torch.manual_seed(seed)
    return {name: tensor.clone() for name, tensor in tensors(spec.build_model()).items()}


def one_process(
    spec: TrainingSpec, plan: Plan, seed: int, minibatches: int, *, divided: bool
) -> Trained:
    """Train on the minibatches that the plan would be trained on.

    Args:
        spec: of a model without randomness in its forward.
        plan: its microbatches make the minibatch.
        seed: of the weights and of the order of the data.
        minibatches: how many.
        divided: run each microbatch by itself, for models that normalise over the samples they see
            together.
    """
    assert plan.microbatch_size is not None
    torch.manual_seed(seed)
    model = spec.build_model()
    optimizer = spec.optimizer({name: p for name, p in model.named_parameters() if p.requires_grad})
    parts = plan.microbatches if divided else 1
    batches = make_batches(spec, plan.microbatch_size * plan.microbatches // parts, parts, seed)
    data = weighted(batches, plan.loss, spec)
    losses = []
    with thread_count(1):
        for minibatch in range(minibatches):
            optimizer.zero_grad()
            units = [Unit(minibatch, part) for part in range(parts)]
            total = 0.0
            for unit in units:
                batch, share = data.batch(unit), data.share(unit)
                loss = loss_of(model(*batch.args, **batch.kwargs), batch.target, spec.loss) * share
                torch.autograd.backward(loss)
                total += float(loss.detach())
            losses.append(total)
            optimizer.step()
    return Trained(losses, tensors(model))
