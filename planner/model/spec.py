"""TrainingSpec: the model, loss, optimizer and data of a training, from a model file or from
objects.

An error in the user's code is raised again with the line of the user's file that it comes from.
"""

import importlib.util
import inspect
import reprlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Sampler

from planner.errors import ModelFileError, PlannerError, reason_of
from planner.model.batch import Batch, collate, make_batch
from planner.model.generators import seeded
from planner.model.one_process import without_process_group
from planner.model.options import LossFunction
from planner.model.samples import check_first_dimensions
from planner.model.torch_private import tree_leaves
from planner.model.user_functions import USER_FUNCTIONS, NameInFile

DEFAULT_BUILDER = "build_model"


def split_location(location: str) -> tuple[Path, str]:
    """Split "model.py:builder" into the path and the name of the builder, which may be left out."""
    path, colon, builder = location.rpartition(":")
    # The colon of a Windows drive is followed by a path, not by a function's name.
    if colon and builder.isidentifier():
        return Path(path), builder
    return Path(location), DEFAULT_BUILDER


def import_file(path: Path) -> ModuleType:
    """Import the Python file at `path`; raise ModelFileError when it is no Python file, or
    fails.
    """
    path = path.resolve()
    # Named by its path, because two model files may both be called model.py.
    name = "planner_model_file_" + "".join(c if c.isalnum() else "_" for c in str(path))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelFileError(f"'{path}' is not a Python file", hint="a model file ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        # What a module draws while it is imported must be the same in all workers.
        with on_path(path.parent), seeded(0):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as cause:  # whatever the user's code raises, sys.exit() included
        del sys.modules[name]
        place = failing_line(cause, path.parent) or path
        if isinstance(cause, SyntaxError):
            place = f"{cause.filename}:{cause.lineno}"
        raise ModelFileError(
            f"'{path}' cannot be imported, it fails at {place}: {reason_of(cause)}",
            hint=f"python {path} shows the whole traceback",
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
    if not own:
        return None
    return f"{own[-1].filename}:{own[-1].lineno}"


DEFAULT_LEARNING_RATE = 0.01


def _functions_of(module: ModuleType) -> list[str]:
    """Return the names of the functions that a module defines, and does not only import."""
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]


def _returning(value: Any) -> Callable[[], Any]:
    return lambda: value


@dataclass(frozen=True, eq=False)
class TrainingSpec:
    """What to train.

    Its methods raise a ModelFileError when a user's function is missing, fails or returns something
    wrong.
    """

    # of the file (of its folder if that is model.py) and of another builder; for objects, the
    # model's class
    name: str
    # all but build_model and example_batch are optional
    functions: Mapping[str, Callable[..., Any]]
    path: Path | None = None  # of the model file; None when made from objects
    builder: str = DEFAULT_BUILDER
    objects: Mapping[str, Any] | None = None  # what `from_objects` was given; None for a file

    @classmethod
    def from_file(cls, location: str | Path) -> "TrainingSpec":
        """Import a model file: "model.py", or "model.py:builder" to build another model than
        build_model() does.

        Raise ModelFileError when there is no such file, it cannot be imported, or a function is
        missing.
        """
        path, builder = split_location(str(location))
        if not path.is_file():
            raise ModelFileError(
                f"there is no model file '{path}'",
                hint="give the path of a file like profiles/vgg16/model.py",
            )

        module = import_file(path)
        functions = {}
        for name in USER_FUNCTIONS:
            function = getattr(module, builder if name == "build_model" else name, None)
            if function is not None:
                functions[name] = function

        for name, written in (("build_model", builder), ("example_batch", "example_batch")):
            if name not in functions:
                raise ModelFileError(
                    f"'{path}' has no {written}({USER_FUNCTIONS[name].arguments})",
                    hint=f"it defines {', '.join(_functions_of(module)) or 'no function'}; the "
                    f"model file needs {written}()",
                )

        if path.stem == "model":
            stem = path.resolve().parent.name
        else:
            stem = path.stem

        name = stem
        if builder != DEFAULT_BUILDER:
            name = f"{stem}:{builder}"
        return cls(name, functions, path, builder)

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
        lengths: Mapping[str, tuple[int, int]] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        sampler: Callable[[int, int, int], Any] | None = None,
    ) -> "TrainingSpec":
        """Describe a model that exists already, for `profile`, `train` and `pipeline`, as a model
        file would.

        Args:
            model: every worker makes the same one, weights included: seed before you build it.
            example_batch: (args, target) or (args, kwargs, target) of at least one sample; or as
                this function of a model file, which it must be with `lengths`.
            loss, optimizer, scheduler, loss_weight, metrics, on_update, blocks, collate, sampler:
                as these functions of a model file.
            dataset, evaluation_dataset, tensor_parallel_plan, lengths: what these functions of a
                model file return.
            pretrained: what pretrained() of a model file returns. The model's weights may then be
                on the meta device.
        """
        values = {
            "build_model": model,
            "dataset": dataset,
            "evaluation_dataset": evaluation_dataset,
            "tensor_parallel_plan": tensor_parallel_plan,
            "pretrained": pretrained,
            "lengths": lengths,
        }
        given = {
            "example_batch": example_batch,
            "loss": loss,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "loss_weight": loss_weight,
            "metrics": metrics,
            "on_update": on_update,
            "blocks": blocks,
            "collate": collate,
            "sampler": sampler,
        }
        returning = {name: _returning(value) for name, value in values.items() if value is not None}
        functions = returning | {name: each for name, each in given.items() if each is not None}
        if not callable(example_batch):
            functions["example_batch"] = make_batch(example_batch, "example_batch").repeated
        # What was given, by the names of the arguments, to describe the same elsewhere.
        others = {name: value for name, value in values.items() if name != "build_model"}
        objects = {"model": model, **others, **given}
        return cls(type(model).__name__, functions, objects=objects)

    def __post_init__(self) -> None:
        for name, function in self.functions.items():
            expected = USER_FUNCTIONS[name]
            try:
                signature = inspect.signature(function)
                # Lengths that vary are keyword arguments of example_batch(), with defaults or
                # without.
                if name == "example_batch":
                    bind = signature.bind_partial
                else:
                    bind = signature.bind
                bind(*range(expected.argument_count))
            except ValueError:
                continue  # Python knows no signature of some functions written in C
            except TypeError as cause:
                raise ModelFileError(
                    f"{self.place(name)} cannot be called with {expected.argument_count} "
                    f"arguments: {cause}",
                    hint=f"define it as {self._written(name)}({expected.arguments})",
                ) from None

    @property
    def origin(self) -> str:
        """Where the model comes from, for messages: the file's path, or the class of a model in
        memory.
        """
        return str(self.path or self.name)

    @property
    def location(self) -> str:
        """The model file, with its builder where that is not the usual one."""
        path = str(self.path)
        if self.builder == DEFAULT_BUILDER:
            return path
        return f"{path}:{self.builder}"

    @property
    def loss(self) -> LossFunction | None:
        """The loss function; None where the model's output has the loss."""
        return self.functions.get("loss")

    def loss_weight(self, target: Any) -> float:
        """Return how many labels of `target` count in its mean loss; call it only where that is
        defined.
        """
        return float(self._call("loss_weight", target))

    def defines(self, name: str) -> bool:
        """Return whether there is a user's function `name`."""
        assert name in USER_FUNCTIONS, name
        return name in self.functions

    def build_model(self) -> nn.Module:
        """Return a new model, initialised from PyTorch's generator."""
        with without_process_group():
            model: nn.Module = self._call("build_model")
        return model

    def lengths(self) -> dict[str, tuple[int, int]]:
        """Return the arguments of example_batch() that are lengths, each with the least and the
        greatest.
        """
        if not self.defines("lengths"):
            return {}
        return {str(name): (least, most) for name, (least, most) in self._call("lengths").items()}

    def random_batch(self, batch_size: int) -> Batch:
        """Return a batch of `batch_size` samples, of lengths drawn evenly between the least and the
        greatest.
        """
        between = self.lengths().items()
        drawn = {name: int(torch.randint(least, most + 1, ())) for name, (least, most) in between}
        return self.example_batch(batch_size, drawn)

    def example_batch(
        self, batch_size: int, lengths: Mapping[str, int] | None = None, *, checked: bool = True
    ) -> Batch:
        """Return a batch of `batch_size` samples, and of the greatest lengths where none are given.

        Raise ModelFileError when it has no tensor for the model, or, if `checked`, when samples are
        not the first dimension of all tensors.
        """
        place = self.place("example_batch")
        if lengths is None:
            lengths = {name: most for name, (_, most) in self.lengths().items()}
        batch = make_batch(self._call("example_batch", batch_size, **lengths), place)
        if checked:
            check_first_dimensions(batch, batch_size, place)

        inputs = tree_leaves((batch.args, batch.kwargs))
        if not any(isinstance(leaf, Tensor) and leaf.dim() for leaf in inputs):
            raise ModelFileError(
                f"{place} returned no tensor for the model",
                hint="return (args, target), with tensors in args; torch.from_numpy makes one of "
                "an array of NumPy's",
            )

        return batch

    def blocks(self, model: nn.Module) -> Any:
        """Return the user's blocks(model), unchecked; call it only where that is defined."""
        return self._call("blocks", model)

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Return the user's patterns of module names with how each is divided; call it only where
        that is defined.
        """
        return dict(self._call("tensor_parallel_plan"))

    def optimizer(
        self, parameters: Iterable[nn.Parameter] | Mapping[str, nn.Parameter]
    ) -> Optimizer:
        """Return the user's optimizer for `parameters`, or SGD.

        A mapping gives the parameters their names in the model, for a user's
        optimizer(named_parameters).
        """
        if isinstance(parameters, Mapping):
            named = parameters
        else:
            named = {str(number): each for number, each in enumerate(parameters)}

        if not self.defines("optimizer"):
            return SGD(list(named.values()), lr=DEFAULT_LEARNING_RATE)

        first_argument = next(iter(inspect.signature(self.functions["optimizer"]).parameters))
        takes_names = first_argument == "named_parameters"
        try:
            optimizer: Optimizer = self._call(
                "optimizer", list(named.items()) if takes_names else list(named.values())
            )
        except ModelFileError as error:
            self._refuse_values(error, named.values())
            raise

        given = {id(each) for each in named.values()}
        taken = {id(each) for group in optimizer.param_groups for each in group["params"]}
        if not taken <= given:
            raise ModelFileError(
                f"{self.place('optimizer')} returned an optimizer of other parameters than it was "
                f"given, and would not train the model's",
                hint="every stage has an optimizer of its own: make it of the argument, as in "
                "torch.optim.AdamW(parameters, lr=1e-3); put parameters of the loss into the "
                "model, whose output can have them",
            )

        return optimizer

    def _refuse_values(self, error: ModelFileError, parameters: Iterable[nn.Parameter]) -> None:
        """Raise ModelFileError where optimizer() has failed because it reads values of parameters
        of other stages.
        """
        without_values = any(parameter.is_meta for parameter in parameters)
        if not without_values or "meta tensors" not in str(error.__cause__):
            return

        line = None
        if self.path is not None and error.__cause__:
            line = failing_line(error.__cause__, self.path.parent)
        raise ModelFileError(
            f"optimizer() reads the values of parameters at {line or self.origin}, and a stage "
            f"has those of its own parameters alone: each would make something else of them",
            hint="give the optimizer numbers, as in torch.optim.SGD(parameters, lr=0.1)",
        ) from error.__cause__

    def step(self, optimizer: Optimizer) -> None:
        """Step the user's optimizer; raise ModelFileError when that needs a closure."""
        try:
            optimizer.step()
        except Exception as cause:
            # Some, such as SAM, have a closure for an option, and then ask for it, or call it.
            signs = ("closure", "'NoneType' object is not callable")
            if not any(sign in str(cause) for sign in signs):
                raise
            raise ModelFileError(
                f"{self.place('optimizer')} returned {type(optimizer).__name__}, whose step() "
                f"needs a closure that computes the loss again, and no stage of a pipeline can "
                f"do that alone",
                hint="take an optimizer whose step() needs no closure, such as torch.optim.AdamW",
            ) from cause

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Return the user's learning-rate scheduler; None where there is none."""
        if not self.defines("scheduler"):
            return None
        scheduler: LRScheduler = self._call("scheduler", optimizer)
        return scheduler

    def pretrained(self) -> tuple[Path, NameInFile | None] | None:
        """Return a file or folder of initial weights, and the user's function from a weight's name
        to that in it.

        That may return None for a weight that keeps the constructor's values; None where all do.
        """
        if not self.defines("pretrained"):
            return None
        returned = self._call("pretrained")
        path, name_in_file = returned if isinstance(returned, tuple) else (returned, None)
        # A model file means what lies beside it, wherever the command is run.
        folder = Path() if self.path is None else self.path.parent
        return folder / path, name_in_file

    def dataset(self) -> Dataset[Any] | None:
        """Return the training data, a map-style dataset of (args, target) per sample; None where
        there is none.
        """
        if not self.defines("dataset"):
            return None
        dataset: Dataset[Any] = self._call("dataset")
        return dataset

    def sampler(self, microbatch_size: int, microbatches: int, seed: int) -> Sampler[int] | None:
        """Return the user's order of the training data; None where that is random."""
        if not self.defines("sampler"):
            return None
        sampler: Sampler[int] = self._call("sampler", microbatch_size, microbatches, seed)
        return sampler

    def evaluation_dataset(self) -> Dataset[Any]:
        """Return the data to evaluate on, like `dataset`."""
        if not self.defines("evaluation_dataset"):
            raise ModelFileError(
                f"'{self.origin}' has no evaluation_dataset(), which `evaluate_every` needs",
                hint="define it as dataset(), with samples that are not trained on",
            )
        dataset: Dataset[Any] = self._call("evaluation_dataset")
        return dataset

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Return the batch of a dataset's samples, as the user's collate() or PyTorch's
        makes it.
        """
        if not self.defines("collate"):
            return collate(samples)
        return make_batch(self._call("collate", list(samples)), self.place("collate"))

    def metrics(self, output: Any, target: Any) -> dict[str, float]:
        """Return the user's metrics(output, target), means over the batch; call it only where that
        is defined.
        """
        values = self._call("metrics", output, target)
        return {str(name): float(value) for name, value in values.items()}

    def on_update(self, minibatch: int, loss: float, metrics: Mapping[str, float | None]) -> None:
        """Call the user's hook; only where it is defined."""
        self._call("on_update", minibatch, loss, dict(metrics))

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        folder = self.path.parent if self.path is not None else Path()
        written = self._written(name)
        try:
            with on_path(folder):
                returned = self.functions[name](*args, **kwargs)
        except PlannerError:
            raise  # of planner.demo, which the project's own model files use; it says what to do
        # whatever the user's code raises, sys.exit() included
        except (Exception, SystemExit) as cause:
            line = failing_line(cause, folder) or self.origin
            raise ModelFileError(
                f"{written}() fails at {line}: {reason_of(cause)}", hint=f"run it: {written}()"
            ) from cause

        function = USER_FUNCTIONS[name]
        with suppress(AttributeError, TypeError, ValueError, RuntimeError):
            if function.accepts(returned):
                return returned

        if name == "lengths":
            shown = reprlib.repr(returned)
        else:
            shown = f"a {type(returned).__name__}"

        raise ModelFileError(
            f"{self.place(name)} returned {shown}, not {function.returns}",
            hint=function.hint(returned)
            or f"docs/guides/own-model.md says what {written}({function.arguments}) returns",
        )

    def place(self, name: str) -> str:
        """Where the user's function is: "loss() at model.py:12", or "loss() of Net" for a model in
        memory.
        """
        if self.path is None:
            return f"{name}() of {self.name}"
        code = getattr(inspect.unwrap(self.functions[name]), "__code__", None)
        line = 1 if code is None else code.co_firstlineno
        return f"{self._written(name)}() at {self.path}:{line}"

    def _written(self, name: str) -> str:
        if name == "build_model":
            return self.builder
        return name


load_model_file = TrainingSpec.from_file
in_memory = TrainingSpec.from_objects
