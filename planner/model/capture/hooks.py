"""Refuse hooks on gradients that a captured model would drop, or that a pipeline would apply to
parts of a sum.

A hook is Python that autograd calls, and no operation of a graph. So one on a value within the
model would be dropped in silence. One on a parameter stays, because the parameters of stages are
those of the model. It then sees the gradient of each microbatch instead of their sum, which makes
no difference where the hook is linear: a mask, or a factor.
"""

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from planner.errors import CaptureError
from planner.model.capture.failure import is_users
from planner.model.options import gradient_hooks

_PACKAGE = __name__.partition(".")[0]
_SAME = 1e-4  # relative difference that is rounding: hooks run in float32
_SIZES = (1e-3, 1.0, 1e3)  # of gradients: a hook that clips leaves small ones alone

# Read in PyTorch 2.13: register_multi_grad_hook puts a function of this module on every tensor,
# under the user's name.
_MULTIPLE = "torch.autograd.graph"

_GRADIENT_HINT = (
    "write it with operations: x * s + x.detach() * (1 - s) is x whose gradient is multiplied by "
    "s, negative to turn "
    "it round; or name parts that run as they are, hooks included, in blocks(model)"
)
_STEP_HINT = (
    "change gradients where the optimizer steps, once they are complete: in "
    "optimizer(parameters), call "
    "register_step_pre_hook() on what it returns"
)


@contextmanager
def refuse_new_hooks() -> Iterator[None]:
    """Raise when the traced code registers a hook on a tensor: tracing would drop it."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise CaptureError(
            f"a hook on the gradient of a value is registered in forward or in the "
            f"loss{_users_line()}, and a captured "
            "graph would drop it",
            hint=_GRADIENT_HINT,
        )

    with (
        mock.patch.object(Tensor, "register_hook", refuse),
        mock.patch.object(Tensor, "register_post_accumulate_grad_hook", refuse),
    ):
        yield


def refuse_hooks(model: nn.Module, blocks: Iterable[nn.Module] = ()) -> None:
    """Raise for hooks that were registered before the model was captured, and that its stages would
    not run alike.

    The modules within `blocks` run as they are, with their hooks.
    """
    as_they_are = {id(module) for block in blocks for module in block.modules()}
    for path, module in model.named_modules():
        if id(module) not in as_they_are and (module._backward_hooks or module._backward_pre_hooks):
            if path:
                where = f"module '{path}'"
            else:
                where = type(model).__name__
            raise CaptureError(
                f"{where} has a backward hook, and a captured graph would drop it",
                hint=_GRADIENT_HINT,
            )

    if torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks:
        raise CaptureError(
            "a backward hook is registered for all modules, and a captured graph would drop it",
            hint="remove it: torch.nn.modules.module.register_module_full_backward_hook() returns "
            "a handle for that",
        )

    for name, parameter in model.named_parameters():
        _refuse_hooks_of_parameter(name, parameter)


def _refuse_hooks_of_parameter(name: str, parameter: nn.Parameter) -> None:
    after = [
        hook for hook in (parameter._post_accumulate_grad_hooks or {}).values() if not _is_own(hook)
    ]
    if after:
        raise CaptureError(
            f"parameter '{name}' has a hook that runs after its gradient is accumulated, and a "
            f"stage accumulates one "
            "for every microbatch",
            hint=_STEP_HINT,
        )

    for hook in gradient_hooks(parameter):
        if getattr(hook, "__globals__", {}).get("__name__") == _MULTIPLE:
            raise CaptureError(
                f"parameter '{name}' has a hook on the gradients of several tensors, which may be "
                f"in several stages",
                hint=_STEP_HINT,
            )
        has_values = type(parameter) is nn.Parameter and not parameter.is_meta
        if has_values and parameter.dtype.is_floating_point and not _is_linear(hook, parameter):
            raise CaptureError(
                f"parameter '{name}' has a hook whose result for a sum of gradients is not the "
                f"sum of its results: in "
                "a pipeline it would see the gradient of one microbatch or of one replica at a "
                "time",
                hint=_STEP_HINT,
            )


def _is_linear(hook: Any, parameter: Tensor) -> bool:
    """Return whether a hook makes of a sum of gradients the sum of what it makes of each, whatever
    their size.
    """
    generator = torch.Generator(parameter.device).manual_seed(0)

    def drawn() -> Tensor:
        return torch.randn(
            parameter.shape, generator=generator, device=parameter.device, dtype=torch.float32
        )

    def result(gradient: Tensor) -> Tensor:
        changed = gradient.to(parameter.dtype, copy=True)
        returned = hook(changed)
        return (changed if returned is None else returned).detach().float()

    with torch.no_grad():
        for size in _SIZES:
            one = size * drawn()
            other = size * drawn()
            whole = result(one + other)
            of_parts = result(one) + result(other)
            scale = size
            if whole.numel():
                scale = max(float(whole.abs().max()), size)
            tolerance = scale * max(_SAME, 4 * torch.finfo(parameter.dtype).eps)
            if not torch.allclose(whole, of_parts, rtol=0.0, atol=tolerance):
                return False

    return True


def _is_own(hook: Any) -> bool:
    """Return whether a hook is this package's: a model in memory keeps those of an earlier
    training.
    """
    function = getattr(hook, "func", hook)  # of a partial
    return str(getattr(function, "__module__", "")).partition(".")[0] == _PACKAGE


def _users_line() -> str:
    frames = traceback.extract_stack()
    own = [frame for frame in frames if Path(frame.filename).is_file() and is_users(frame.filename)]
    if not own:
        return ""
    return f" at {own[-1].filename}:{own[-1].lineno}"
