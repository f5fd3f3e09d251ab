"""Weights that several stages hold: each has a copy, and all copies step with the sum of all stages' gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from planner.model.capture.graph import ValueSpec
from planner.schedule.shared import sharers


@dataclass(frozen=True)
class SharedParameter:
    """One of a stage's parameters that other stages hold too; `stages`: all that do, in order."""

    name: str
    parameter: nn.Parameter
    stages: tuple[int, ...]

    @property
    def spec(self) -> ValueSpec:
        """Of its gradient, as a message."""
        shape = tuple(self.parameter.shape)
        return ValueSpec(self.name, self.parameter.dtype, False, shape, tuple(range(len(shape))))


class SharedGradients:
    """The gradients of what one stage shares, by round, from the end of a round until they are added up.

    Args:
        stage: whose.
        parameters: those that it shares.
    """

    def __init__(self, stage: int, parameters: Iterable[SharedParameter]) -> None:
        self._stage = stage
        self._parameters = sorted(parameters, key=lambda each: each.name)
        self._rounds: dict[int, dict[int, dict[str, Tensor]]] = {}  # by round and stage

    @property
    def counted_elsewhere(self) -> list[nn.Parameter]:
        """Those whose gradient another stage adds to the norm of all."""
        return [each.parameter for each in self._parameters if each.stages[0] != self._stage]

    def specs(self, peer: int) -> list[ValueSpec]:
        """What goes to and comes from stage `peer`."""
        return [each.spec for each in self._parameters if peer in each.stages]

    def take(self, round_: int, peer: int) -> dict[str, Tensor]:
        """The stage's own gradients of a round, of what it shares with `peer`.

        They are taken from the parameters, whose update steps with the sum only. Where there is no gradient, zeros are
        sent: another stage may have one.
        """
        own = self._own(round_)
        return {each.name: own[each.name] for each in self._parameters if peer in each.stages}

    def accept(self, round_: int, peer: int, gradients: dict[str, Tensor]) -> None:
        """Take those of stage `peer`."""
        self._own(round_)  # where another replica has sent them, which all have
        self._rounds[round_][peer] = gradients

    def add(self, round_: int) -> None:
        """Give every parameter the sum, in the order of the stages: the same to the bit in all of them.

        It takes no further memory: what has been sent was copied, and what was received is ours.
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
                own[each.name] = torch.zeros_like(each.parameter) if gradient is None else _alone(gradient.detach())
            held[self._stage] = own
        return held[self._stage]


def _alone(gradient: Tensor) -> Tensor:
    """`gradient`, without the others of a replicated stage, which lie in one tensor and can be freed before it."""
    return gradient if gradient.untyped_storage().nbytes() == gradient.nbytes else gradient.clone()


def shared_parameters(
    stage: int, module: nn.Module, pairs: Mapping[tuple[int, int], Collection[str]]
) -> list[SharedParameter]:
    """Those of a stage.

    Args:
        stage: its number.
        module: the stage.
        pairs: by two stages, the names of what both hold.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    names = sorted({name for pair, shared in pairs.items() if stage in pair for name in shared})
    found = []
    for name in names:
        holding = [pair for pair, shared in pairs.items() if name in shared]
        found.append(SharedParameter(name, parameters[name], tuple(sorted({stage, *sharers(holding, stage)}))))
    return found


def separate_copies(modules: Sequence[nn.Module]) -> None:
    """Where stages of one worker hold the same parameter object, give the later ones copies of their own."""
    seen: dict[nn.Parameter, nn.Parameter | None] = {}
    for module in modules:
        copies: dict[nn.Parameter, nn.Parameter] = {}
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if parameter in seen:
                if parameter not in copies:
                    copies[parameter] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                path, _, last = name.rpartition(".")
                module.get_submodule(path)._parameters[last] = copies[parameter]
        seen.update(dict.fromkeys(module.parameters()))


def use_parameters(module: nn.Module, of: nn.Module) -> None:
    """Let `module` have the parameters of `of` for its own of the same names."""
    theirs = dict(of.named_parameters(remove_duplicate=False))
    for name, _ in list(module.named_parameters(remove_duplicate=False)):
        if name in theirs:
            path, _, last = name.rpartition(".")
            module.get_submodule(path)._parameters[last] = theirs[name]
