"""Train the unsplit model in this process, in plain PyTorch, at the weight versions that a plan's instructions name.

Under a schedule that drains, this is ordinary training with the mean gradient of a minibatch's microbatches. Under an
asynchronous one, the gradient of a unit is taken at the weights that each stage had when the unit's forward ran there,
w(t+1) = w(t) - lr * grad f(w1(t-n+1), ..., wn(t)) for 1F1B with weight stashing (PipeDream, SOSP 2019, section 3.3).
Nothing of the executor takes part but the order of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from planner.executor.run.data import EvaluationBatches, make_batches
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.model.batch import Batch
from planner.model.loss import loss_of
from planner.model.spec import TrainingSpec
from planner.plan.shape import shape_of
from planner.profiler.this_machine import thread_count
from planner.schedule.instructions import Backward, BackwardWeight, Forward, Unit, Update
from planner.schedule.schedule import PipelineShape, stream

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class StageVersions:
    """The versions of one stage's weights, counted in updates: which a unit uses, and which it is the first to miss."""

    used: dict[Unit, int]
    round_of: dict[Unit, int]


def stage_versions(shape: PipelineShape, stage: int, minibatches: int) -> StageVersions:
    """Read from the instructions of all replicas of a stage which units use which version, and make which."""
    used: dict[Unit, int] = {}
    round_of: dict[Unit, int] = {}
    for rank in shape.ranks[stage]:
        updates = 0
        for instruction in stream(shape, stage, rank, minibatches):
            if instruction.stage != stage:
                continue
            match instruction:
                case Forward(unit=unit, version=version):
                    used[unit] = updates if version is None else version
                case Backward(unit=unit) | BackwardWeight(unit=unit):
                    round_of[unit] = updates
                case Update():
                    updates += 1
    return StageVersions(used, round_of)


@dataclass
class _Stage:
    names: list[str]
    newest: dict[str, nn.Parameter]
    optimizer: Optimizer | None
    versions: StageVersions
    history: list[Weights] = field(default_factory=list)  # by version
    pending: dict[int, list[Weights]] = field(default_factory=dict)  # gradients by round

    def add(self, unit: Unit, gradients: Weights) -> None:
        """Add a unit's gradients; update with their mean when they are the round's last."""
        number = self.versions.round_of[unit]
        found = self.pending.setdefault(number, [])
        found.append(gradients)
        if len(found) < sum(other == number for other in self.versions.round_of.values()):
            return
        for name, parameter in self.newest.items():
            if name in found[0]:  # a weight that the forward does not use has no gradient
                parameter.grad = torch.stack([each[name] for each in found]).mean(0)
        if self.optimizer is not None:
            self.optimizer.step()
        del self.pending[number]
        self.remember()

    def remember(self) -> None:
        self.history.append({name: parameter.detach().clone() for name, parameter in self.newest.items()})


class Reference:
    """The unsplit model, trained as a plan says.

    Args:
        spec: of a model without dropout; its random numbers would be others than the workers'.
        plan: made from that profile; if stages share weights, its schedule must drain.
    """

    def __init__(self, spec: TrainingSpec, profile: Profile, plan: Plan, seed: int, device: torch.device) -> None:
        torch.manual_seed(seed)
        self._spec, self._plan, self._device = spec, plan, device
        self._model = spec.build_model().to(device)
        assert plan.microbatch_size is not None
        self._data = make_batches(spec, plan.microbatch_size, plan.microbatches, seed)
        self._owners = _owners(profile, plan, self._model)

    def train(self, minibatches: int, after: Callable[[int], None] = lambda minibatch: None) -> list[float]:
        """Return the loss of each minibatch; `after` is told how many have been trained."""
        with thread_count(1):  # as the workers: how a sum is divided over threads changes its rounding
            stages = self._stages(minibatches)
            losses = []
            for minibatch in range(minibatches):
                units = [Unit(minibatch, microbatch) for microbatch in range(self._plan.microbatches)]
                losses.append(sum(self._unit(stages, unit) for unit in units) / len(units))
                for stage in stages:  # so that the model has the newest weights
                    for name, value in stage.history[-1].items():
                        self._model.get_parameter(name).data.copy_(value)
                after(minibatch + 1)
            return losses

    def weights(self) -> Weights:
        """Return the newest weights and the buffers, by name."""
        return dict(self._model.state_dict())

    def evaluate(self) -> float:
        """Return the mean loss of evaluation_dataset()."""
        assert self._plan.microbatch_size is not None
        data = EvaluationBatches(self._spec.evaluation_dataset(), self._plan.microbatch_size)
        total = 0.0
        self._model.eval()
        with torch.no_grad():
            for number in range(data.batches):
                batch = data.batch(Unit(number)).to(self._device)
                total += float(self._loss(self._model, batch)) * batch.size
        self._model.train()
        return total / data.samples

    def _stages(self, minibatches: int) -> list[_Stage]:
        shape = shape_of(self._plan)
        stages = []
        for number in range(len(self._plan.stages)):
            names = [name for name, owner in self._owners.items() if owner == number]
            newest = {name: nn.Parameter(self._model.get_parameter(name).detach().clone()) for name in names}
            optimizer = self._spec.optimizer(newest) if newest else None
            stages.append(_Stage(names, newest, optimizer, stage_versions(shape, number, minibatches)))
            stages[-1].remember()
        return stages

    def _unit(self, stages: Sequence[_Stage], unit: Unit) -> float:
        """Run a unit at each stage's version, and hand its gradients to the stages; return its loss."""
        weights = {
            name: tensor.clone().requires_grad_()
            for stage in stages
            for name, tensor in stage.history[stage.versions.used[unit]].items()
        }
        module = _Loss(self._model, lambda model: self._loss(model, self._data.batch(unit).to(self._device)))
        loss: Tensor = functional_call(module, {f"model.{name}": tensor for name, tensor in weights.items()}, ())
        torch.autograd.backward(loss)
        for stage in stages:
            gradients = {name: weights[name].grad for name in stage.names}
            stage.add(unit, {name: gradient for name, gradient in gradients.items() if gradient is not None})
        return float(loss.detach())

    def _loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return loss_of(model(*batch.args, **batch.kwargs), batch.target, self._spec.loss)


class _Loss(nn.Module):
    """Makes `functional_call` run forward and loss with the weights it is given."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._of = loss

    def forward(self) -> Tensor:
        return self._of(self.model)


def _owners(profile: Profile, plan: Plan, model: nn.Module) -> dict[str, int]:
    """Return the first stage that uses each trained parameter; a tied one has one name."""
    layers = {layer.name: layer.parameters for layer in profile.layers}
    canonical = {id(parameter): name for name, parameter in reversed(list(model.named_parameters()))}
    owners: dict[str, int] = {}
    for number, stage in enumerate(plan.stages):
        for name in (name for layer in stage.layers for name in layers[layer]):
            if (parameter := model.get_parameter(name)).requires_grad:
                owners.setdefault(canonical[id(parameter)], number)
    return owners
