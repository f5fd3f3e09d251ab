"""Refuse models whose forward changes which parameters there are, or which of them are trained.

Stages hold the parameters that the model has when it is captured, and train those that require a
gradient then. A forward that freezes one, or makes a new one, would train otherwise in a plain
process, without a word.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from planner.errors import CaptureError


@contextmanager
def refuse_changed_parameters(model: nn.Module, prefix: str = "") -> Iterator[None]:
    """Raise CaptureError when code within makes, removes or replaces a parameter, or changes its
    `requires_grad`.

    After an error the model has the parameters, and these the flags, that it had before.

    Args:
        prefix: what to put in front of the names of parameters in messages, such as "layers.3.".
    """
    before = _Parameters(model)
    try:
        yield
        before.compare(_Parameters(model), type(model).__name__, prefix)
    except BaseException:
        before.restore()
        raise


class _Parameters:
    """The parameters that a model has at a time, with what their modules hold."""

    def __init__(self, model: nn.Module) -> None:
        self._contents = [
            (module, dict(module._parameters), dict(module._modules))
            for module in model.modules()
            if not isinstance(module, torch.jit.ScriptModule)  # which has no dicts, and is refused
        ]
        self._named = dict(model.named_parameters(remove_duplicate=False))
        self._flags = {name: parameter.requires_grad for name, parameter in self._named.items()}

    def compare(self, after: "_Parameters", model: str, prefix: str) -> None:
        """Raise CaptureError where the parameters `after` a forward are others, or not trained as
        before.
        """
        for name in after._flags:
            if name not in self._flags:
                raise CaptureError(
                    f"forward of {model} makes parameter '{prefix}{name}', which the optimizer of "
                    f"a plain training "
                    "would not know",
                    hint="make it in build_model(), or call the model once there, on a batch of a "
                    "few samples",
                )

        for name, flag in self._flags.items():
            if name not in after._flags:
                raise CaptureError(
                    f"forward of {model} removes parameter '{prefix}{name}'",
                    hint="build the model without it in build_model(), or call the model once "
                    "there",
                )
            if after._named[name] is not self._named[name]:
                raise CaptureError(
                    f"forward of {model} puts another parameter in the place of '{prefix}{name}', "
                    f"which the optimizer "
                    "of a plain training would not know",
                    hint="compute with a tensor made from the parameter, as in F.linear(x, 0.5 * "
                    "self.weight), and "
                    "leave the parameter in its place",
                )
            if after._flags[name] != flag:
                raise CaptureError(
                    f"forward of {model} sets requires_grad of parameter '{prefix}{name}' to "
                    f"{after._flags[name]}, and "
                    f"a pipeline would go on with {flag}",
                    hint="set requires_grad in build_model(), where it holds from the first step "
                    "on",
                )

    def restore(self) -> None:
        """Give the modules the parameters that they had, and these their flags."""
        for module, parameters, modules in self._contents:
            module._parameters.clear()
            module._parameters.update(parameters)
            module._modules.clear()
            module._modules.update(modules)

        for name, parameter in self._named.items():
            if parameter.requires_grad != self._flags[name]:
                parameter.requires_grad_(self._flags[name])
