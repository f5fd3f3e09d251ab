"""TrainingSpec: the model, loss, optimizer and data of a training, from a model file or from objects.

An error in the user's code is raised again with the line of the user's file that it comes from.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from planner.errors import ModelFileError, PlannerError, reason_of
from planner.model.batch import Batch, make_batch

DEFAULT_BUILDER = "build_model"


def split_location(location: str) -> tuple[Path, str]:
    """Split "model.py:builder" into the path and the name of the builder, which may be left out."""
    path, colon, builder = location.rpartition(":")
    # The colon of a Windows drive is followed by a path, not by a function's name.
    return (Path(path), builder) if colon and builder.isidentifier() else (Path(location), DEFAULT_BUILDER)


def import_file(path: Path) -> ModuleType:
    """Import the Python file at `path`; raise ModelFileError when it is no Python file, or fails."""
    path = path.resolve()
    # Named by its path, because two model files may both be called model.py.
    name = "planner_model_file_" + "".join(c if c.isalnum() else "_" for c in str(path))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelFileError(f"'{path}' is not a Python file", hint="a model file ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        with on_path(path.parent):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as cause:  # whatever the user's code raises, sys.exit() included
        del sys.modules[name]
        if isinstance(cause, SyntaxError):
            place = f"{cause.filename}:{cause.lineno}"
            raise ModelFileError(f"{place} is not Python: {cause.msg}", hint="correct the file") from cause
        raise ModelFileError(
            f"'{path}' cannot be imported, it fails at {failing_line(cause, path.parent) or path}: {reason_of(cause)}",
            hint="python " + str(path) + " shows the whole traceback",
        ) from cause
    return module


@contextmanager
def on_path(folder: Path) -> Iterator[None]:
    """Put `folder` on the import path, so that a model file in it can import its siblings."""
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


def failing_line(cause: BaseException, folder: Path) -> str | None:
    """Return the innermost line of code in `folder` on the way to the error, "model.py:12"."""
    frames = traceback.extract_tb(cause.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).resolve().parent == folder.resolve()]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else None


DEFAULT_LEARNING_RATE = 0.01

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
"""(output, target) -> the mean loss of the batch, a 0-dimensional tensor."""

# Functions that a user can give, by their arguments.
_ARGUMENTS = {
    "build_model": "",
    "example_batch": "batch_size",
    "loss": "output, target",
    "loss_weight": "target",
    "optimizer": "parameters",
    "scheduler": "optimizer",
    "dataset": "",
    "evaluation_dataset": "",
    "metrics": "output, target",
    "on_update": "minibatch, loss, metrics",
    "blocks": "model",
    "tensor_parallel_plan": "",
    "pretrained": "",
}
_REQUIRED = ("build_model", "example_batch")
NameInFile = Callable[[str], str | None]


@dataclass(frozen=True, eq=False)
class TrainingSpec:
    """What to train.

    Its methods call the user's functions and check what they return. They raise a ModelFileError when a function is
    missing, fails or returns something else.

    Attributes:
        name: of the model: the name of its file, or of its folder where the file is called model.py, and the builder
            where it is not build_model(); for objects, the model's class.
        functions: the user's; all but build_model and example_batch are optional.
        path: of the model file; None when made from objects.
        builder: name of the function that builds the model.
    """

    name: str
    functions: Mapping[str, Callable[..., Any]]
    path: Path | None = None
    builder: str = DEFAULT_BUILDER

    @classmethod
    def from_file(cls, location: str | Path) -> TrainingSpec:
        """Import a model file.

        Args:
            location: "model.py", or "model.py:other_builder" to build another model than build_model() does.

        Raises:
            ModelFileError: when there is no such file, it cannot be imported, or a function is missing.
        """
        path, builder = split_location(str(location))
        if not path.is_file():
            raise ModelFileError(
                f"there is no model file '{path}'", hint="give the path of a file like profiles/vgg16/model.py"
            )
        module = import_file(path)
        written = {name: builder if name == "build_model" else name for name in _ARGUMENTS}
        functions = {name: found for name in _ARGUMENTS if (found := getattr(module, written[name], None)) is not None}
        for name in _REQUIRED:
            if name not in functions:
                own = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
                raise ModelFileError(
                    f"'{path}' has no {written[name]}({_ARGUMENTS[name]})",
                    hint=f"it defines {', '.join(own) or 'no function'}; the model file needs {written[name]}()",
                )
        stem = path.resolve().parent.name if path.stem == "model" else path.stem
        return cls(stem if builder == DEFAULT_BUILDER else f"{stem}:{builder}", functions, path, builder)

    @classmethod
    def from_objects(
        cls,
        model: nn.Module,
        *,
        example_batch: Any,
        loss: LossFunction | None = None,
        optimizer: Callable[..., Optimizer] | None = None,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        loss_weight: Callable[[Any], Any] | None = None,
        dataset: Any = None,
        evaluation_dataset: Any = None,
        metrics: Callable[[Any, Any], Mapping[str, Any]] | None = None,
        on_update: Callable[[int, float, Mapping[str, Any]], object] | None = None,
        blocks: Callable[[nn.Module], Any] | None = None,
        tensor_parallel_plan: Mapping[str, str] | None = None,
        pretrained: Any = None,
    ) -> TrainingSpec:
        """Describe a model that exists already, for `profile` and `pipeline`, as a model file would.

        Args:
            model: every worker makes the same one, weights included: seed before you build it.
            example_batch: (args, target) or (args, kwargs, target) of at least one sample.
            loss: of (output, target), the mean over the batch; None where the model's output has one.
            optimizer: of the parameters of a stage; SGD when None.
            scheduler: of the optimizer.
            loss_weight: of a target, how many of its labels count in the loss.
            dataset, evaluation_dataset, tensor_parallel_plan: what these functions of a model file return.
            metrics, on_update, blocks: as these functions of a model file.
            pretrained: what pretrained() of a model file returns. The model's weights may then be on the meta device.
        """
        batch = make_batch(example_batch, "example_batch")
        functions: dict[str, Any] = {"build_model": lambda: model, "example_batch": batch.repeated}
        functions |= {"loss": loss, "optimizer": optimizer, "scheduler": scheduler, "loss_weight": loss_weight}
        functions |= {"metrics": metrics, "on_update": on_update, "blocks": blocks}
        returned = {"dataset": dataset, "evaluation_dataset": evaluation_dataset, "pretrained": pretrained}
        returned["tensor_parallel_plan"] = None if tensor_parallel_plan is None else dict(tensor_parallel_plan)
        functions |= {name: partial(_same, value) for name, value in returned.items() if value is not None}
        return cls(type(model).__name__, {name: each for name, each in functions.items() if each is not None})

    def __post_init__(self) -> None:
        for name in self.functions:
            self._check_signature(name)

    @property
    def origin(self) -> str:
        """Where the model comes from, for messages: the file's path, or the class of a model in memory."""
        return str(self.path or self.name)

    @property
    def loss(self) -> LossFunction | None:
        """The loss function; None where the model's output has the loss."""
        return self.functions.get("loss")

    def loss_weight(self, target: Any) -> float:
        """Return how many labels of `target` count in its mean loss; call it only where that is defined."""
        weight = self._call("loss_weight", target)
        with suppress(TypeError, ValueError, RuntimeError):
            if 0 <= float(weight) < math.inf:
                return float(weight)
        hint = "for example: return (target != PAD).sum()"
        raise self._wrong_type("loss_weight", weight, "a number of labels, 0 or more", hint)

    def defines(self, name: str) -> bool:
        """Return whether there is a user's function `name`."""
        assert name in _ARGUMENTS, name
        return name in self.functions

    def build_model(self) -> nn.Module:
        """Return a new model, initialised from PyTorch's generator."""
        model = self._call("build_model")
        if not isinstance(model, nn.Module):
            raise self._wrong_type(
                "build_model", model, "a torch.nn.Module", f"end {self.builder}() with: return model"
            )
        return model

    def without_model(self) -> TrainingSpec:
        """Return this spec without build_model(), which keeps a model in memory alive."""
        return replace(self, functions={name: f for name, f in self.functions.items() if name != "build_model"})

    def example_batch(self, batch_size: int) -> Batch:
        """Return a batch of `batch_size` samples."""
        place = self._place("example_batch")
        batch = make_batch(self._call("example_batch", batch_size), place)
        for leaf in tree_leaves((batch.args, batch.kwargs, batch.target)):
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] != batch_size:
                raise ModelFileError(
                    f"{place} returned for batch_size={batch_size} a tensor of shape {tuple(leaf.shape)}, whose first "
                    f"dimension is not {batch_size}",
                    hint="the batch is the first dimension of every tensor: pad what differs in length; masks and the "
                    "like belong in the model",
                )
        if not any(isinstance(leaf, Tensor) and leaf.dim() for leaf in tree_leaves((batch.args, batch.kwargs))):
            raise ModelFileError(f"{place} returned no tensor for the model", hint="return (args, target)")
        return batch

    def blocks(self, model: nn.Module) -> Any:
        """Return the user's blocks(model), unchecked; call it only where that is defined."""
        return self._call("blocks", model)

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Return the user's patterns of module names with how each is divided; call it only where that is defined."""
        plan = self._call("tensor_parallel_plan")
        if not isinstance(plan, dict) or not all(isinstance(part, str) for pair in plan.items() for part in pair):
            hint = 'for example: return {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}'
            raise self._wrong_type("tensor_parallel_plan", plan, "a dict of strings", hint)
        return plan

    def optimizer(self, parameters: Iterable[nn.Parameter] | Mapping[str, nn.Parameter]) -> Optimizer:
        """Return the user's optimizer for `parameters`, or SGD.

        A mapping gives the parameters their names in the model, for a user's optimizer(named_parameters).
        """
        named = parameters if isinstance(parameters, Mapping) else {str(i): p for i, p in enumerate(parameters)}
        if not self.defines("optimizer"):
            return SGD(list(named.values()), lr=DEFAULT_LEARNING_RATE)
        takes_names = next(iter(inspect.signature(self.functions["optimizer"]).parameters)) == "named_parameters"
        optimizer = self._call("optimizer", list(named.items()) if takes_names else list(named.values()))
        if not isinstance(optimizer, Optimizer):
            hint = "for example: return torch.optim.AdamW(parameters, lr=1e-3)"
            raise self._wrong_type("optimizer", optimizer, "a torch.optim.Optimizer", hint)
        given = set(map(id, named.values()))
        if any(id(each) not in given for group in optimizer.param_groups for each in group["params"]):
            raise ModelFileError(
                f"{self._place('optimizer')} returned an optimizer of other parameters than it was given, and would "
                "not train the model's",
                hint="every stage has an optimizer of its own: make it of the argument, as in "
                "torch.optim.AdamW(parameters, lr=1e-3)",
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise self._needs_closure(optimizer)
        return optimizer

    def step(self, optimizer: Optimizer) -> None:
        """Step the user's optimizer; raise ModelFileError when that needs a closure."""
        try:
            optimizer.step()
        except Exception as cause:
            # Some, such as SAM, have a closure for an option, and then ask for it, or call it.
            if "closure" in str(cause) or "'NoneType' object is not callable" in str(cause):
                raise self._needs_closure(optimizer) from cause
            raise

    def _needs_closure(self, optimizer: Optimizer) -> ModelFileError:
        return ModelFileError(
            f"{self._place('optimizer')} returned {type(optimizer).__name__}, whose step() needs a closure that "
            "computes the loss again, and no stage of a pipeline can do that alone",
            hint="take an optimizer whose step() needs no closure, such as torch.optim.AdamW",
        )

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Return the user's learning-rate scheduler; None where there is none."""
        if not self.defines("scheduler"):
            return None
        scheduler = self._call("scheduler", optimizer)
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
            wanted = "a scheduler of torch.optim.lr_scheduler that follows the number of steps alone"
            hint = "for example: return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)"
            raise self._wrong_type("scheduler", scheduler, wanted, hint)
        return scheduler

    def pretrained(self) -> tuple[Path, NameInFile | None] | None:
        """Return where initial weights are read from; None where the constructor's are the initial ones.

        Returns:
            A file or a folder; and, where the user gives it, the function from a name in the model to the name in the
            files, or to None for a weight that keeps the constructor's values.
        """
        if not self.defines("pretrained"):
            return None
        path, name_in_file = returned if isinstance(returned := self._call("pretrained"), tuple) else (returned, None)
        if not isinstance(path, (str, Path)) or not (name_in_file is None or callable(name_in_file)):
            hint = 'for example: return "model.safetensors", or: return "folder", lambda name: "model." + name'
            raise self._wrong_type("pretrained", returned, "a path, or a path and a function of a name", hint)
        # A model file means what lies beside it, wherever the command is run.
        return (Path(path) if self.path is None else self.path.parent / path), name_in_file

    def dataset(self) -> Dataset[Any] | None:
        """Return the training data, a map-style dataset of (args, target) per sample; None where there is none."""
        return self._dataset("dataset") if self.defines("dataset") else None

    def evaluation_dataset(self) -> Dataset[Any]:
        """Return the data to evaluate on, like `dataset`."""
        if not self.defines("evaluation_dataset"):
            raise ModelFileError(
                f"'{self.origin}' has no evaluation_dataset(), which `evaluate_every` needs",
                hint="define it as dataset(), with samples that are not trained on",
            )
        return self._dataset("evaluation_dataset")

    def metrics(self, output: Any, target: Any) -> dict[str, float]:
        """Return the user's metrics(output, target), means over the batch; call it only where that is defined."""
        found = self._call("metrics", output, target)
        try:
            return {str(name): float(value) for name, value in found.items()}
        except (AttributeError, TypeError, ValueError, RuntimeError):
            hint = 'for example: return {"accuracy": (output.argmax(1) == target).float().mean()}'
            raise self._wrong_type("metrics", found, "numbers by name", hint) from None

    def on_update(self, minibatch: int, loss: float, metrics: Mapping[str, float | None]) -> None:
        """Call the user's hook; only where it is defined."""
        self._call("on_update", minibatch, loss, dict(metrics))

    def _dataset(self, name: str) -> Dataset[Any]:
        dataset: Dataset[Any] = self._call(name)
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            hint = "return a map-style torch.utils.data.Dataset"
            raise self._wrong_type(name, dataset, "something with a length and items", hint)
        return dataset

    def _call(self, name: str, *args: Any) -> Any:
        folder = self.path.parent if self.path is not None else Path()
        try:
            with on_path(folder):
                return self.functions[name](*args)
        except PlannerError:
            raise  # of planner.demo, which the project's own model files use; it says what to do
        except (Exception, SystemExit) as cause:  # whatever the user's code raises, sys.exit() included
            written, line = self._written(name), failing_line(cause, folder) or self.origin
            raise ModelFileError(
                f"{written}() fails at {line}: {reason_of(cause)}", hint=f"run it: {written}()"
            ) from cause

    def _check_signature(self, name: str) -> None:
        function, written, arguments = self.functions[name], self._written(name), _ARGUMENTS[name]
        if not callable(function):
            raise ModelFileError(
                f"{written} in '{self.origin}' is a {type(function).__name__}, not a function",
                hint=f"def {written}(...)",
            )
        count = len(arguments.split(", ")) if arguments else 0
        try:
            inspect.signature(function).bind(*range(count))
        except ValueError:
            return  # Python knows no signature of some functions written in C
        except TypeError as cause:
            raise ModelFileError(
                f"{self._place(name)} cannot be called with {count} arguments: {cause}",
                hint=f"define it as {written}({arguments})",
            ) from None

    def _wrong_type(self, name: str, returned: Any, wanted: str, hint: str) -> ModelFileError:
        return ModelFileError(f"{self._place(name)} returned a {type(returned).__name__}, not {wanted}", hint=hint)

    def _place(self, name: str) -> str:
        """Where the user's function is: "loss() at model.py:12", or "loss() of Net" for a model in memory."""
        if self.path is None:
            return f"{name}() of {self.name}"
        code = getattr(inspect.unwrap(self.functions[name]), "__code__", None)
        return f"{self._written(name)}() at {self.path}:{1 if code is None else code.co_firstlineno}"

    def _written(self, name: str) -> str:
        """The name that the user gave to the function."""
        return self.builder if name == "build_model" else name


def _same(value: Any) -> Any:
    return value


load_model_file = TrainingSpec.from_file
in_memory = TrainingSpec.from_objects
