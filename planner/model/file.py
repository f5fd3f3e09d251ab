"""The user's model file: a Python file with build_model(), example_batch() and, mostly, loss()."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from planner.errors import ModelFileError, PlannerError
from planner.model.batch import Batch, make_batch

DEFAULT_BUILDER = "build_model"
DEFAULT_LEARNING_RATE = 0.01


@dataclass(frozen=True)
class ModelFile:
    """A model file's functions, with what they return checked. Made by `load_model_file`.

    Attributes:
        path: the file.
        builder: name of the function that builds the model.
        has_loss: whether the file defines loss(output, target); if not, the model's output has the loss.
        default_optimizer: whether the file leaves the optimizer to us: SGD with learning rate 0.01.
    """

    path: Path
    builder: str
    module: ModuleType

    @property
    def name(self) -> str:
        """What to call the model: its file, or its folder where the file is called model.py; and the builder."""
        stem = self.path.resolve().parent.name if self.path.stem == "model" else self.path.stem
        return stem if self.builder == DEFAULT_BUILDER else f"{stem}:{self.builder}"

    @property
    def has_loss(self) -> bool:
        return hasattr(self.module, "loss")

    @property
    def has_blocks(self) -> bool:
        """Whether the file names the blocks of its model, which become the layers."""
        return hasattr(self.module, "blocks")

    @property
    def default_optimizer(self) -> bool:
        return not hasattr(self.module, "optimizer")

    def build_model(self) -> nn.Module:
        """A new model, initialised from PyTorch's generator.

        Raises:
            ModelFileError: when the builder fails or returns something else.
        """
        model = self._call(self.builder)
        if not isinstance(model, nn.Module):
            raise ModelFileError(
                f"{self._place(self.builder)} returned a {type(model).__name__}, not a torch.nn.Module",
                hint=f"end {self.builder}() with: return model",
            )
        return model

    def example_batch(self, batch_size: int) -> Batch:
        """A batch of `batch_size` samples.

        Raises:
            ModelFileError: when the function fails, returns something else or another number of samples.
        """
        place = self._place("example_batch")
        batch = make_batch(self._call("example_batch", batch_size), place)
        for leaf in tree_leaves((batch.args, batch.kwargs, batch.target)):
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] != batch_size:
                raise ModelFileError(
                    f"{place} returned for batch_size={batch_size} a tensor of shape {tuple(leaf.shape)}, whose first "
                    f"dimension is not {batch_size}",
                    hint="the batch is the first dimension of every tensor; masks and the like belong in the model",
                )
        if not any(isinstance(leaf, Tensor) and leaf.dim() for leaf in tree_leaves((batch.args, batch.kwargs))):
            raise ModelFileError(f"{place} returned no tensor for the model", hint="return (args, target)")
        return batch

    def blocks(self, model: nn.Module) -> Any:
        """The file's blocks(model); call it only where `has_blocks`.

        Raises:
            ModelFileError: when the function fails.
        """
        return self._call("blocks", model)

    def loss(self, output: Any, target: Any) -> Tensor:
        """The file's loss; call it only where `has_loss`."""
        loss: Tensor = self.module.loss(output, target)
        return loss

    def optimizer(self, parameters: Iterable[nn.Parameter] | Mapping[str, nn.Parameter]) -> Optimizer:
        """The user's optimizer for `parameters`, or SGD.

        A file's optimizer(named_parameters) gets them with their names, which a mapping tells.

        Raises:
            ModelFileError: when the function fails or returns something else.
        """
        named = parameters if isinstance(parameters, Mapping) else dict(_numbered(parameters))
        if self.default_optimizer:
            return SGD(list(named.values()), lr=DEFAULT_LEARNING_RATE)
        takes_names = next(iter(inspect.signature(self.module.optimizer).parameters)) == "named_parameters"
        optimizer = self._call("optimizer", list(named.items()) if takes_names else list(named.values()))
        if not isinstance(optimizer, Optimizer):
            raise ModelFileError(
                f"{self._place('optimizer')} returned a {type(optimizer).__name__}, not a torch.optim.Optimizer",
                hint="for example: return torch.optim.AdamW(parameters, lr=1e-3)",
            )
        return optimizer

    @property
    def has_scheduler(self) -> bool:
        """Whether the file has a learning-rate scheduler."""
        return hasattr(self.module, "scheduler")

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """The user's learning-rate scheduler; None where the file has none.

        Raises:
            ModelFileError: when the function fails or returns something else.
        """
        if not hasattr(self.module, "scheduler"):
            return None
        scheduler = self._call("scheduler", optimizer)
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
            raise ModelFileError(
                f"{self._place('scheduler')} returned a {type(scheduler).__name__}, not a scheduler of "
                "torch.optim.lr_scheduler that follows the number of steps alone",
                hint="for example: return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)",
            )
        return scheduler

    def dataset(self) -> Dataset[Any] | None:
        """The training data, a map-style dataset of (args, target) per sample; None where the file has none.

        Raises:
            ModelFileError: when the function fails or returns something else.
        """
        if not hasattr(self.module, "dataset"):
            return None
        return self._dataset("dataset")

    def _dataset(self, name: str) -> Dataset[Any]:
        dataset = self._call(name)
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise ModelFileError(
                f"{self._place(name)} returned a {type(dataset).__name__}, which has no length or no items",
                hint="return a map-style torch.utils.data.Dataset",
            )
        result: Dataset[Any] = dataset
        return result

    @property
    def has_metrics(self) -> bool:
        """Whether the file says more of an output than its loss."""
        return hasattr(self.module, "metrics")

    def evaluation_dataset(self) -> Dataset[Any]:
        """The data to evaluate on, like `dataset`.

        Raises:
            ModelFileError: when the file has none, or the function fails or returns something else.
        """
        if not hasattr(self.module, "evaluation_dataset"):
            raise ModelFileError(
                f"'{self.path}' has no evaluation_dataset(), which --evaluate-every needs",
                hint="define it as dataset(), with samples that are not trained on",
            )
        return self._dataset("evaluation_dataset")

    def metrics(self, output: Any, target: Any) -> dict[str, float]:
        """The file's metrics(output, target), means over the batch; call it only where `has_metrics`.

        Raises:
            ModelFileError: when the function fails or returns something else.
        """
        found = self._call("metrics", output, target)
        try:
            return {str(name): float(value) for name, value in found.items()}
        except (AttributeError, TypeError, ValueError, RuntimeError):
            raise ModelFileError(
                f"{self._place('metrics')} returned a {type(found).__name__}, not numbers by name",
                hint='for example: return {"accuracy": (output.argmax(1) == target).float().mean()}',
            ) from None

    @property
    def has_hook(self) -> bool:
        """Whether the file wants to know of updates."""
        return hasattr(self.module, "on_update")

    def on_update(self, minibatch: int, loss: float, metrics: Mapping[str, float | None]) -> None:
        """Call the file's hook; only where `has_hook`.

        Raises:
            ModelFileError: when it fails.
        """
        self._call("on_update", minibatch, loss, dict(metrics))

    def _call(self, name: str, *args: Any) -> Any:
        try:
            with _on_path(self.path.parent):
                return getattr(self.module, name)(*args)
        except PlannerError:
            raise  # from our own demonstration data: it says already what to do
        except (Exception, SystemExit) as cause:  # whatever the user's code raises, sys.exit() included
            raise ModelFileError(
                f"{name}() fails at {_failing_line(cause, self.path)}: {_reason(cause)}", hint=f"run it: {name}()"
            ) from cause

    def _place(self, name: str) -> str:
        return f"{name}() at {self.path}:{_line_of(getattr(self.module, name))}"


def load_model_file(spec: str | Path) -> ModelFile:
    """Import a model file.

    Args:
        spec: "model.py", or "model.py:other_builder" to build another model than build_model() does.

    Raises:
        ModelFileError: when there is no such file, it cannot be imported, or a function is missing.
    """
    path, builder = _split(str(spec))
    if not path.is_file():
        raise ModelFileError(
            f"there is no model file '{path}'", hint="give the path of a file like profiles/vgg16/model.py"
        )
    module = _import(path)
    for name, required in (
        (builder, True),
        ("example_batch", True),
        ("loss", False),
        ("optimizer", False),
        ("scheduler", False),
        ("dataset", False),
        ("evaluation_dataset", False),
        ("metrics", False),
        ("on_update", False),
        ("blocks", False),
    ):
        _check_function(module, path, name, required)
    return ModelFile(path, builder, module)


_ARGUMENTS = {"example_batch": 1, "loss": 2, "optimizer": 1, "scheduler": 1, "metrics": 2, "on_update": 3, "blocks": 1}
_SIGNATURES = {
    "example_batch": "example_batch(batch_size)",
    "loss": "loss(output, target)",
    "optimizer": "optimizer(parameters)",
    "scheduler": "scheduler(optimizer)",
    "metrics": "metrics(output, target)",
    "on_update": "on_update(minibatch, loss, metrics)",
    "blocks": "blocks(model)",
}


def _numbered(parameters: Iterable[nn.Parameter]) -> Iterator[tuple[str, nn.Parameter]]:
    """Numbers for names, where nobody knows better."""
    return ((str(number), parameter) for number, parameter in enumerate(parameters))


def _split(spec: str) -> tuple[Path, str]:
    path, colon, builder = spec.rpartition(":")
    # The colon of a Windows drive is followed by a path, not by a function's name.
    return (Path(path), builder) if colon and builder.isidentifier() else (Path(spec), DEFAULT_BUILDER)


def _import(path: Path) -> ModuleType:
    path = path.resolve()
    # A name of its own: two model files may both be called model.py.
    name = "planner_model_file_" + "".join(c if c.isalnum() else "_" for c in str(path))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelFileError(f"'{path}' is not a Python file", hint="a model file ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        with _on_path(path.parent):
            spec.loader.exec_module(module)
    except SyntaxError as cause:
        del sys.modules[name]
        place = f"{cause.filename}:{cause.lineno}"
        raise ModelFileError(f"{place} is not Python: {cause.msg}", hint="correct the file") from cause
    except (Exception, SystemExit) as cause:  # whatever the user's code raises, sys.exit() included
        del sys.modules[name]
        raise ModelFileError(
            f"'{path}' cannot be imported, it fails at {_failing_line(cause, path)}: {_reason(cause)}",
            hint="python " + str(path) + " shows the whole traceback",
        ) from cause
    return module


@contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    """Let the file import its siblings, then and in its functions."""
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


def _check_function(module: ModuleType, path: Path, name: str, required: bool) -> None:
    function = getattr(module, name, None)
    if function is None:
        if required:
            others = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
            found = f"it defines {', '.join(others)}" if others else "it defines no function"
            raise ModelFileError(
                f"'{path}' has no {_SIGNATURES.get(name, name + '()')}", hint=f"{found}; the model file needs {name}()"
            )
        return
    if not callable(function):
        raise ModelFileError(
            f"{name} in '{path}' is a {type(function).__name__}, not a function", hint=f"def {name}(...)"
        )
    arguments = _ARGUMENTS.get(name, 0)
    try:
        inspect.signature(function).bind(*range(arguments))
    except (TypeError, ValueError) as cause:
        raise ModelFileError(
            f"{name}() at {path}:{_line_of(function)} cannot be called with {arguments} arguments: {cause}",
            hint=f"define it as {_SIGNATURES.get(name, name + '()')}",
        ) from None


def _line_of(function: Callable[..., Any]) -> int:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code.co_firstlineno if code is not None else 1


def _failing_line(cause: BaseException, path: Path) -> str:
    """The innermost line of the user's folder on the way to the error."""
    frames = traceback.extract_tb(cause.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).resolve().parent == path.resolve().parent]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else str(path)


def _reason(cause: BaseException) -> str:
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__
