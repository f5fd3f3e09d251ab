"""Explain, in terms of the user's source, why a model cannot be captured or an operation of it
fails.
"""

import contextlib
import io
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from planner.errors import CaptureError, LayerError, ModelFileError, PlannerError, reason_of
from planner.formats.files import replace
from planner.model.capture.operations import scope_of
from planner.model.lengths import Varying
from planner.model.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    tree_leaves,
)
from planner.units import counted

_STANDARD = Path(contextlib.__file__).parent
_log = logging.getLogger(__name__)
# whose frames are not the user's
_LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parents[2])
_DATA_DEPENDENT = (
    "data-dependent",
    "GuardOnDataDependent",
    "DynamicOutputShape",
    "DataDependentOutput",
)
_BLOCKS = (
    "name parts of the model that run as they are in blocks(model): see docs/guides/own-model.md"
)
_VALUE_HINT = (
    f"replace Python's if, while and .item() on tensors by operations such as torch.where, or "
    f"{_BLOCKS}; make "
    "no distributions with validate_args=True; where only the model's own loss does this, give it "
    "no labels, and "
    "define loss(output, target)"
)
_NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)
_OTHER_SAMPLES = "does every sample of dataset() fit the model, as those of example_batch() do?"
_OTHER_DEGREE = (
    "its layers are sharded over several ranks, perhaps not evenly: solve with "
    "smaller degrees in `tensor`, and profile with the same"
)


def capture_failure(cause: Exception, model: nn.Module) -> PlannerError:
    """Return the error for a model whose tracing raised `cause`."""
    inner: BaseException | None = cause
    while inner is not None:
        if isinstance(inner, PlannerError):
            return inner
        inner = inner.__cause__ or inner.__context__

    what = f"{type(model).__name__} cannot be captured as a graph{_place_in(cause)}"
    if any(word in f"{type(cause).__name__} {cause}" for word in _DATA_DEPENDENT):
        return CaptureError(f"{what}: this depends on the values of a tensor", hint=_VALUE_HINT)
    return CaptureError(
        f"{what}: {reason_of(cause)}",
        hint=f"the model must run on example_batch(n), and must not depend on the values of "
        f"tensors; or {_BLOCKS}",
    )


def run_failure(cause: Exception, model: nn.Module, samples: int) -> ModelFileError:
    """Return the error for a model that raised `cause` as the user wrote it, on so many samples or
    on some of them.
    """
    return ModelFileError(
        f"{type(model).__name__} fails on {counted(samples, 'sample')} of example_batch() or "
        f"fewer{_place_in(cause)}: "
        f"{reason_of(cause)}",
        hint="the model and loss(output, target) must run on any number of samples, as "
        "output.squeeze(-1) does where "
        "output.squeeze() fails for one; or profile with a larger `batch_size`",
    )


def _place_in(cause: Exception) -> str:
    """Return the innermost line of the user's that led to an error, as " at model.py:12, 'return
    x'".
    """
    frames = traceback.extract_tb(cause.__traceback__)
    own = [each for each in frames if Path(each.filename).is_file() and is_users(each.filename)]
    if not own:
        return ""
    return f" at {own[-1].filename}:{own[-1].lineno}, '{own[-1].line}'"


def decides_by_values(error: BaseException | None) -> bool:
    """Return whether a run without data failed because sizes or branches depend on the values of a
    tensor.
    """
    while error is not None and not isinstance(error, _NEEDS_DATA):
        error = error.__cause__
    return error is not None


class FailuresPlaced:
    """Context that raises a LayerError, with its place in the user's file, where a captured
    operation fails.

    One may be entered many times: a generator would take longer for every unit.

    Args:
        places: by the names of values in the generated code; the errors of blocks lead to the
            user's line themselves.
        in_parts: whether several ranks run the operations, each a part of them.
    """

    def __init__(self, places: Mapping[str, str], *, in_parts: bool = False) -> None:
        self._places = places
        self._hint = _OTHER_DEGREE if in_parts else _OTHER_SAMPLES

    def __enter__(self) -> None:
        return

    def __exit__(
        self, _: type[BaseException] | None, cause: BaseException | None, __: TracebackType | None
    ) -> None:
        # what an operation raises
        if not isinstance(cause, (RuntimeError, IndexError, ValueError, TypeError)):
            return
        frames = traceback.extract_tb(cause.__traceback__)
        generated = [frame for frame in frames if frame.filename.startswith("<eval_with")]
        if not generated or not self._places:
            return
        # A line of generated code begins with the value that it makes: "linear_1 =
        # torch.nn.functional.linear(...)".
        name = re.match(r"\w+", generated[-1].line or "")
        hint = self._hint
        if isinstance(cause, torch.OutOfMemoryError):
            hint = "plan with less `memory`, or with `recompute=auto`"
        place = None
        if name is not None:
            place = self._places.get(name[0])
        raise LayerError(reason_of(cause), hint=hint, place=place) from cause


def user_place(node: fx.Node) -> str | None:
    """Return where the user's code asked for the operation: "model.py:12", or the part where only a
    library did.
    """
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [f"{file}:{line}" for file, line in frames if is_users(file)]
    if own:
        return own[-1]
    scope = scope_of(node)
    if scope is None:
        return "loss()" if frames else None
    return f"module '{scope}'" if scope else None


@contextlib.contextmanager
def noting_places() -> Iterator[None]:
    """Let the tracer note with all that it assumes of sizes which line of the user's made
    it do so.
    """
    # Private; the tracer notes places of its own choice, which are in libraries, too.
    located = ShapeEnv._get_sloc

    def noted(env: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
        return replace(located(env, *args, **kwargs), maybe_user_loc=calling_place())

    with mock.patch.object(ShapeEnv, "_get_sloc", noted):
        yield


def calling_place() -> str | None:
    """Return the line of the user's that is being run, "model.py:12"; None where only libraries
    are.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _runs_users_code(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _runs_users_code(file: str) -> bool:
    # A decorator may stand between the user's line and the operation.
    return Path(file).is_file() and is_users(file) and Path(file).parent != _STANDARD


def refuse_pinned(model: nn.Module, placeholders: Sequence[fx.Node], lengths: Varying) -> None:
    """Raise CaptureError where what the tracer assumed of sizes does not hold for all lengths that
    may come.
    """
    shapes: list[Any] = [
        node.meta["val"].shape if isinstance(node.meta["val"], Tensor) else ()
        for node in placeholders
    ]
    pinned = [place for place in lengths.places if isinstance(shapes[place[0]][place[1]], int)]
    symbolic = {
        (leaf, place): size.node
        for leaf, shape in enumerate(shapes)
        for place, size in enumerate(shape)
        if isinstance(size, torch.SymInt)
    }
    # Before what the tracer put in their place: the guards are of these.
    guards = next(iter(symbolic.values())).shape_env.guards if symbolic else ()
    for named, sizes in lengths.examples:
        values = {node._expr: sizes.get(place, node.hint) for place, node in symbolic.items()}
        # `guard.expr` is sympy's, and so is what it compares to.
        broken = (guard for guard in guards if guard.expr.subs(values) == False)  # noqa: E712
        failing = next(broken, None)
        if failing is None and not pinned:
            continue
        where = None if failing is None else failing.sloc.maybe_user_loc
        place = "" if where is None else f", at {where}"
        given = ", ".join(f"{name} {length}" for name, length in named.items())
        raise CaptureError(
            f"{type(model).__name__} does not compute the same for all that lengths() says: what "
            f"it does for the "
            f"greatest ones is another thing for {given}{place}",
            hint="take sizes from the inputs' shapes in place of numbers, and do not branch on "
            "them; or let lengths() "
            "say less, and pad to the rest",
        )


def refuse_untrainable(model: nn.Module) -> None:
    """Raise for models that are known before tracing to be impossible to capture or to train."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise CaptureError(
            f"{type(model).__name__} has a compiled script, whose layers cannot be seen",
            hint="build the model without torch.jit.script and torch.jit.trace",
        )

    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise CaptureError(
                f"parameter '{name}' has no shape yet, its module is lazy",
                hint="call the model once on an example at the end of build_model()",
            )

    for path, module in model.named_modules():
        for name in (*module._modules, *module._parameters, *module._buffers):
            if hasattr(nn.Module, name):
                place = f"{path}.{name}".removeprefix(".")
                raise CaptureError(
                    f"'{place}' of {type(model).__name__} is named like a method of "
                    f"torch.nn.Module, which hides it",
                    hint=f"give it another name, such as 'own_{name}'",
                )

    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise CaptureError(
            f"{type(model).__name__} has no parameters that require a gradient",
            hint="there is nothing to train; are they in modules or nn.Parameter, and not frozen?",
        )


def refuse_loss(dimensions: int, requires_grad: bool) -> None:
    """Raise for a loss that cannot be trained."""
    if dimensions or not requires_grad:
        what = "does not depend on the model's parameters"
        if dimensions:
            what = "is not a single number"
        raise CaptureError(
            f"the loss {what}",
            hint="loss(output, target) must return a 0-dimensional tensor made from the output",
        )


def unregistered_modules(model: nn.Module) -> Iterator[tuple[str, str, list[nn.Module]]]:
    """Yield the modules in Python lists, tuples and dicts of a model, with path and type of each
    list.
    """
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_") or not isinstance(value, (list, tuple, dict)):
                continue
            modules = [each for each in tree_leaves(value) if isinstance(each, nn.Module)]
            yield f"{path}.{name}".removeprefix("."), type(value).__name__, modules


def warn_of_unregistered(model: nn.Module) -> None:
    """Say which modules never train, because they are in a Python list, tuple or dict: PyTorch does
    not.
    """
    known = {id(parameter) for parameter in model.parameters()}
    for place, kind, modules in unregistered_modules(model):
        if not known.issuperset(
            id(parameter) for each in modules for parameter in each.parameters()
        ):
            _log.warning(
                f"warning: the modules in the {kind} '{place}' of {type(model).__name__} will "
                "never be trained, moved to a GPU or saved, because PyTorch does not see them "
                "there; hint: make it "
                "an nn.ModuleList or nn.ModuleDict"
            )


@contextlib.contextmanager
def refuse_custom_autograd() -> Iterator[None]:
    """Raise when a model uses its own torch.autograd.Function: tracing would silently drop its
    backward.

    `Function.apply` may be bound already, as in `scan = Scan.apply`, so it is refused where that
    ends.
    """
    base = torch.autograd.function._SingleLevelFunction

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith("torch._library"):  # a registered operation keeps its backward
            return super(base, cls).apply(*args, **kwargs)  # type: ignore[misc]
        raise CaptureError(
            f"the model uses the autograd function '{cls.__name__}', whose backward cannot be "
            f"captured",
            hint="call torch.utils.checkpoint.checkpoint with use_reentrant=False"
            if cls.__name__ == "CheckpointFunction"
            else f"write it with ordinary tensor operations, register it with "
            f"torch.library.custom_op, or {_BLOCKS}",
        )

    with mock.patch.object(base, "apply", classmethod(refuse)):
        yield


@contextlib.contextmanager
def silent_tracer() -> Iterator[None]:
    """Keep the tracer's own reports off the terminal; the error says what matters of them."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\b")
            warnings.filterwarnings("ignore", message=".*assigned during export")
            yield
    finally:
        logging.disable(before)


@cache
def is_users(file: str) -> bool:
    """Return whether a file of code is the user's, or of a library that the user calls.

    Every operation of a model is asked about with each call that led to it, of few files.
    """
    return not any(Path(file).is_relative_to(library) for library in _LIBRARIES)
