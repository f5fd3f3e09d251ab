"""Weights that several stages share: each stage updates a copy of its own with the sum of all stages' gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from planner.model.capture.graph import ValueSpec
from planner.schedule.versions import sharers


@dataclass(frozen=True)
class SharedParameter:
    """A parameter of a stage that other stages hold too; `stages` are all of them, in order."""

    name: str
    parameter: nn.Parameter
    stages: tuple[int, ...]

    @property
    def spec(self) -> ValueSpec:
        """Its gradient as a value of a message."""
        shape = tuple(self.parameter.shape)
        return ValueSpec(self.name, self.parameter.dtype, False, shape, tuple(range(len(shape))))


class SharedGradients:
    """Gradients of the weights that one stage shares, from the end of a round until their sum is applied.

    Args:
        parameters: that it shares.
    """

    def __init__(self, stage: int, parameters: Iterable[SharedParameter]) -> None:
        self._stage = stage
        self._parameters = sorted(parameters, key=lambda each: each.name)
        self._rounds: dict[int, dict[int, dict[str, Tensor]]] = {}  # by round and stage

    @property
    def counted_elsewhere(self) -> list[nn.Parameter]:
        """Parameters whose gradient an earlier stage counts in the global gradient norm."""
        return [each.parameter for each in self._parameters if each.stages[0] != self._stage]

    def specs(self, peer: int) -> list[ValueSpec]:
        """Return the gradients that are exchanged with stage `peer`, as values of a message."""
        return [each.spec for each in self._parameters if peer in each.stages]

    def take(self, round_: int, peer: int) -> dict[str, Tensor]:
        """Return the stage's own gradients of a round, for the weights that it shares with `peer`.

        They are moved out of `.grad`, because only the sum may reach the optimizer. A missing gradient becomes zeros:
        another stage may have one.
        """
        own = self._own(round_)
        return {each.name: own[each.name] for each in self._parameters if peer in each.stages}

    def accept(self, round_: int, peer: int, gradients: dict[str, Tensor]) -> None:
        """Store the gradients of stage `peer`."""
        # A replica that sends to no peer has not set its own gradients aside yet.
        self._own(round_)
        self._rounds[round_][peer] = gradients

    def add(self, round_: int) -> None:
        """Set every `.grad` to the sum over the stages.

        All stages add in the same order, so that their copies of a weight stay equal to the bit. The sum overwrites the
        first term: what was sent is a copy, and what was received belongs to this stage.
        """
        held = self._rounds.pop(round_)
        for each in self._parameters:
            total, *others = (held[stage].pop(each.name) for stage in each.stages)
            for other in others:
                total += other
            each.parameter.grad = total

    def _own(self, round_: int) -> dict[str, Tensor]:
        held = self._rounds.setdefault(round_, {})
        if self._stage not in held:
            own: dict[str, Tensor] = {}
            for each in self._parameters:
                gradient = each.parameter.grad
                each.parameter.grad = None
                own[each.name] = torch.zeros_like(each.parameter) if gradient is None else _compact(gradient.detach())
            held[self._stage] = own
        return held[self._stage]


def _compact(gradient: Tensor) -> Tensor:
    """Return `gradient`, cloned if it is a view of a bucket: kept for later rounds, it would keep the whole bucket."""
    return gradient if gradient.untyped_storage().nbytes() == gradient.nbytes else gradient.clone()


def shared_parameters(
    stage: int, module: nn.Module, pairs: Mapping[tuple[int, int], Collection[str]]
) -> list[SharedParameter]:
    """Return the parameters that a stage shares with others.

    Args:
        pairs: by pair of stages, the names of the parameters that both hold.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    found = []
    for name in sorted({name for pair, shared in pairs.items() if stage in pair for name in shared}):
        holding = [pair for pair, shared in pairs.items() if name in shared]
        found.append(SharedParameter(name, parameters[name], tuple(sorted({stage, *sharers(holding, stage)}))))
    return found


def separate_copies(modules: Sequence[nn.Module]) -> None:
    """Give each stage of one worker its own copy of a parameter that an earlier stage holds as the same object."""
    seen: dict[nn.Parameter, nn.Parameter | None] = {}
    for module in modules:
        copies: dict[nn.Parameter, nn.Parameter] = {}
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if parameter in seen:
                if parameter not in copies:
                    copies[parameter] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                _set_parameter(module, name, copies[parameter])
        seen.update(dict.fromkeys(module.parameters()))


def use_parameters(module: nn.Module, of: nn.Module) -> None:
    """Replace the parameters of `module` by those of `of` with the same names."""
    theirs = dict(of.named_parameters(remove_duplicate=False))
    for name, _ in list(module.named_parameters(remove_duplicate=False)):
        if name in theirs:
            _set_parameter(module, name, theirs[name])


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, last = name.rpartition(".")
    module.get_submodule(path)._parameters[last] = parameter
