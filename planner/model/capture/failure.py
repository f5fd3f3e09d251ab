"""Explain, in terms of the user's source, why a model cannot be captured or an operation of it fails."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_leaves

from planner.errors import CaptureError, LayerError, PlannerError, first_line, reason_of
from planner.model.capture.operations import scope_of

_log = logging.getLogger(__name__)
_LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parents[2])  # whose frames are not the user's
_FUNCTION_HINTS = {
    "CheckpointFunction": "call torch.utils.checkpoint.checkpoint with use_reentrant=False",
    "BackwardHookFunction": "remove the module's backward hooks; hooks on its parameters work",
}
_DATA_DEPENDENT = ("data-dependent", "GuardOnDataDependent", "DynamicOutputShape", "DataDependentOutput")
_VALUE_HINT = (
    "replace Python's if, while and .item() on tensors by operations such as torch.where, or name the parts of the "
    "model in blocks(model): see docs/guides/own-model.md; make distributions with validate_args=False; where only the "
    "model's own loss does this, give it no labels, and define loss(output, target)"
)
_NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)


def capture_failure(cause: Exception, model: nn.Module) -> PlannerError:
    """Return the error for a model whose tracing raised `cause`."""
    inner: BaseException | None = cause
    while inner is not None:
        if isinstance(inner, PlannerError):
            return inner
        inner = inner.__cause__ or inner.__context__
    frame = _user_frame(cause)
    place = f" at {frame.filename}:{frame.lineno}, '{frame.line}'" if frame is not None else ""
    what = f"{type(model).__name__} cannot be captured as a graph{place}"
    if any(word in f"{type(cause).__name__} {cause}" for word in _DATA_DEPENDENT):
        return CaptureError(f"{what}: this depends on the values of a tensor", hint=_VALUE_HINT)
    if (unsupported := re.search(r"Unsupported input type <class '([^']+)'>", first_line(cause))) is not None:
        return CaptureError(
            f"example_batch() gives the model a {unsupported[1].rpartition('.')[2]}, which no graph can take",
            hint="give tensors, numbers, strings and None, within tuples, lists and dicts, and make anything else "
            "of them in forward",
        )
    return CaptureError(
        f"{what}: {reason_of(cause)}",
        hint="the model must run on example_batch(n), and must not depend on the values of tensors",
    )


def is_of_tracer(failure: CaptureError) -> bool:
    """Return whether it is the tracer that fails, and not a model that could not be trained in a pipeline either."""
    return "cannot be captured" in failure.message


def decides_by_values(error: BaseException | None) -> bool:
    """Return whether a run without data failed because sizes or branches depend on the values of a tensor."""
    while error is not None and not isinstance(error, _NEEDS_DATA):
        error = error.__cause__
    return error is not None


def operation_failure(cause: Exception, places: Mapping[str, str]) -> LayerError | None:
    """Return the error for a captured operation that raised `cause` while the model trained.

    Args:
        places: where the user's file makes each value of the generated code, by the value's name; empty for blocks.

    Returns:
        None when the user's own code raised it, in a block: then the frames of `cause` lead to the user's line.
    """
    generated = [
        frame for frame in traceback.extract_tb(cause.__traceback__) if frame.filename.startswith("<eval_with")
    ]
    if not generated or not places:
        return None
    # A line of generated code begins with the value that it makes: "linear_1 = torch.nn.functional.linear(...)".
    name = re.match(r"\w+", generated[-1].line or "")
    hint = "does every sample of dataset() fit the model, as those of example_batch() do?"
    if isinstance(cause, torch.OutOfMemoryError):
        hint = "plan with less `memory_bytes`, or with `recompute=auto`"
    return LayerError(reason_of(cause), hint=hint, place=places.get(name[0]) if name is not None else None)


def user_place(node: fx.Node) -> str | None:
    """Return where the user's code asked for the operation: "model.py:12".

    For operations that only library code asked for, "module 'path'" or "loss()" says in which part they are.
    """
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [f"{file}:{line}" for file, line in frames if _is_users(file)]
    if own:
        return own[-1]
    scope = scope_of(node)
    if scope is None:
        return "loss()" if frames else None
    return f"module '{scope}'" if scope else None


def refuse_untrainable(model: nn.Module) -> None:
    """Raise for models that are known before tracing to be impossible to capture or to train."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"module '{name or type(model).__name__}' is a compiled script, whose layers cannot be seen",
                hint="build the model without torch.jit.script and torch.jit.trace",
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise CaptureError(
                f"parameter '{name}' has no shape yet, its module is lazy",
                hint="call the model once on an example at the end of build_model()",
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        has_none = next(model.parameters(), None) is None
        raise CaptureError(
            f"{type(model).__name__} has no parameters" + ("" if has_none else " that require a gradient"),
            hint="there is nothing to train; are they in modules or nn.Parameter, and not frozen?",
        )


def warn_of_unregistered(model: nn.Module) -> None:
    """Say which weights never train, because they are in a Python list, tuple or dict: PyTorch does not."""
    known = {id(parameter) for parameter in model.parameters()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_") or not isinstance(value, (list, tuple, dict)):
                continue
            for kind, wanted in (("Module", nn.Module), ("Parameter", nn.Parameter)):
                held = [each for each in tree_leaves(value) if isinstance(each, wanted)]
                weights = [p for each in held for p in (each.parameters() if isinstance(each, nn.Module) else [each])]
                if not known.issuperset(map(id, weights)):
                    _log.warning(
                        f"warning: the {kind.lower()}s in the {type(value).__name__} "
                        f"'{path}{'.' if path else ''}{name}' of {type(model).__name__} will never be trained, moved "
                        "to a GPU or saved, because PyTorch does not see them there; hint: make it an "
                        f"nn.{kind}{'Dict' if isinstance(value, dict) else 'List'}"
                    )


@contextlib.contextmanager
def refuse_custom_autograd() -> Iterator[None]:
    """Raise when a model uses its own torch.autograd.Function: tracing would silently drop its backward.

    Libraries often write `scan = Scan.apply` once, which is bound to `Function.apply` before it could be replaced here.
    So it is refused one class further up, where `Function.apply` ends in either case.
    """
    base = torch.autograd.function._SingleLevelFunction

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith("torch._library"):  # a registered operation keeps its backward
            return super(base, cls).apply(*args, **kwargs)  # type: ignore[misc]
        raise CaptureError(
            f"the model uses the autograd function '{cls.__name__}', whose backward cannot be captured",
            hint=_FUNCTION_HINTS.get(
                cls.__name__, "write it with ordinary tensor operations, or register it with torch.library.custom_op"
            ),
        )

    with mock.patch.object(base, "apply", classmethod(refuse)):
        yield


@contextlib.contextmanager
def refuse_assignments(model: nn.Module) -> Iterator[None]:
    """Raise when the traced forward replaces a tensor that `model` holds: tracing would drop the new one.

    Tensors under new names are removed again: they are the tracer's, without data, and of no use to later code.
    """
    before = _held_tensors(model)
    yield
    for key, (holder, name, tensor) in _held_tensors(model).items():
        if key not in before:
            delattr(holder, name)
        elif before[key][2] is not tensor:
            raise CaptureError(
                f"{type(holder).__name__} assigns 'self.{name}' in forward, and the next minibatch would not see it",
                hint=f"make it a buffer and change it in place, with self.{name}.copy_(...)",
            )


@contextlib.contextmanager
def refuse_kept_tensors() -> Iterator[None]:
    """Raise when the tracer warns that a container which outlives the forward, such as a list, holds its tensors."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        text = str(warning.message)
        if "assigned during export" in text:
            # LSTM and GRU rebuild the list of their weights in forward; that is harmless, the weights are parameters.
            if kept := [name for name in re.findall(r"self\.model\.([\w.\[\]]+)", text) if "_flat_weights" not in name]:
                raise CaptureError(
                    f"the model keeps a tensor in 'self.{kept[0]}' from one forward to the next",
                    hint="keep state in buffers that are changed in place, and nothing else",
                )
        elif not Path(warning.filename).is_relative_to(_LIBRARIES[0]):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _held_tensors(model: nn.Module) -> dict[tuple[int, str], tuple[nn.Module, str, Tensor]]:
    # The tracer wraps a module that has several names, each time anew. Its wrappers share the module's attributes.
    return {
        (id(vars(module)), name): (module, name, value)
        for module in model.modules()
        for name, value in {**vars(module), **module._buffers}.items()
        if isinstance(value, Tensor)
    }


@contextlib.contextmanager
def silent_tracer() -> Iterator[None]:
    """Keep the tracer's own reports off the terminal; the error says what matters of them."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _user_frame(cause: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost frame that is not the planner's, PyTorch's or generated."""
    frames = traceback.extract_tb(cause.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_file() and _is_users(frame.filename)]
    return own[-1] if own else None


def _is_users(file: str) -> bool:
    return not any(Path(file).is_relative_to(library) for library in _LIBRARIES)
