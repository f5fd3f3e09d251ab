"""Weights that several stages share: each stage updates a copy of its own with the sum of all
stages' gradients.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from planner.errors import WorkerError
from planner.executor.communication.gradients import check_dense
from planner.model.capture.graph import ValueSpec
from planner.model.options import copy_hooks, gradient_dtype, parameter_like
from planner.schedule.versions import sharers


class SharedGradients:
    """Gradients of the weights that one stage shares, from the end of a round until their sum is
    applied.

    Args:
        module: the stage's.
        pairs: by pair of stages, the names of the parameters that both hold.
        off_loss: names of parameters that get no gradient in any stage, and so no update, which
            gradients of zeros would give them.
    """

    def __init__(
        self,
        stage: int,
        module: nn.Module,
        pairs: Mapping[tuple[int, int], Collection[str]],
        off_loss: Collection[str] = (),
    ) -> None:
        self._stage = stage
        self._off_loss = frozenset(off_loss)
        parameters = dict(module.named_parameters(remove_duplicate=False))

        shared: set[str] = set()
        for pair, names in pairs.items():
            if stage in pair:
                shared.update(names)

        self.holders: dict[str, list[int]] = {}  # stages of each parameter, in order
        for name in sorted(shared):
            holding = [pair for pair, names in pairs.items() if name in names]
            self.holders[name] = sorted({stage, *sharers(holding, stage)})

        self.parameters = {name: parameters[name] for name in self.holders}
        self._rounds: dict[int, dict[int, dict[str, Tensor]]] = {}  # by round and stage

    @property
    def counted_elsewhere(self) -> list[nn.Parameter]:
        """Parameters whose gradient an earlier stage counts in the global gradient norm."""
        return [
            self.parameters[name]
            for name, stages in self.holders.items()
            if stages[0] != self._stage
        ]

    def specs(self, peer: int) -> list[ValueSpec]:
        """Return the gradients that are exchanged with stage `peer`, as values of a message."""
        shared = {
            name: self.parameters[name] for name, stages in self.holders.items() if peer in stages
        }
        return [
            ValueSpec(
                name, gradient_dtype(each), False, tuple(each.shape), tuple(range(each.dim()))
            )
            for name, each in shared.items()
        ]

    def take(self, round_: int, peer: int) -> dict[str, Tensor]:
        """Take the stage's own gradients of a round from `.grad`, for the weights that it shares
        with `peer`.
        """
        own = self._own(round_)
        return {name: own[name] for name, stages in self.holders.items() if peer in stages}

    def accept(self, round_: int, peer: int, gradients: dict[str, Tensor]) -> None:
        """Take a peer's gradients of a round."""
        # A replica that sends to no peer has not set its own gradients aside yet.
        self._own(round_)
        self._rounds[round_][peer] = gradients

    def add(self, round_: int) -> None:
        """Set every `.grad` to the sum over the stages, which all add in one order, so that copies
        stay equal; those off the loss stay None.
        """
        held = self._rounds.pop(round_)
        for name, parameter in self.parameters.items():
            total, *others = (held[stage].pop(name) for stage in self.holders[name])
            for other in others:
                total += other
            parameter.grad = None if name in self._off_loss else total

    def _own(self, round_: int) -> dict[str, Tensor]:
        held = self._rounds.setdefault(round_, {})
        if self._stage not in held:
            own = held[self._stage] = {}
            for name, parameter in self.parameters.items():
                gradient = parameter.grad
                parameter.grad = None
                if gradient is None:
                    own[name] = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
                    continue
                if name in self._off_loss:
                    raise gradient_off_loss(f"weight '{name}'")
                check_dense(gradient)
                # A view of a bucket that is kept for later rounds would keep the whole bucket.
                is_view = gradient.untyped_storage().nbytes() > gradient.nbytes
                own[name] = gradient.detach().clone() if is_view else gradient.detach()

        return held[self._stage]


def gradient_off_loss(what: str) -> WorkerError:
    """Return the error where something has a gradient that the captured graph does not tell of."""
    return WorkerError(
        f"{what} has a gradient, and in the captured graph the loss does not depend on it",
        hint="keep all layers that use it in one stage",
    )


def separate_copies(modules: Sequence[nn.Module]) -> None:
    """Give each stage of one worker its own copy of a parameter that an earlier stage holds as the
    same object.
    """
    seen: dict[nn.Parameter, nn.Parameter | None] = {}
    for module in modules:
        copies: dict[nn.Parameter, nn.Parameter] = {}
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if parameter in seen:
                if parameter not in copies:
                    copies[parameter] = parameter_like(parameter, parameter.detach().clone())
                    copy_hooks(parameter, copies[parameter])
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
