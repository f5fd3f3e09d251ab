"""The functions that a model file may define: their arguments, and what they must return."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset, Sampler

NameInFile = Callable[[str], str | None]
"""From a weight's name in the model to its name in a file; None for one that is not there."""


def _anything(_: Any) -> bool:
    return True


def _no_hint(_: Any) -> str | None:
    return None


@dataclass(frozen=True)
class UserFunction:
    """A function that a user can give.

    Attributes:
        arguments: their names, as they are written in a definition.
        returns: what it must return, for messages.
        accepts: whether a value is that; it may raise an error instead.
        hint: what to do about a value that is not accepted; None for the general advice.
    """

    arguments: str = ""
    returns: str = ""
    accepts: Callable[[Any], object] = _anything
    hint: Callable[[Any], str | None] = _no_hint

    @property
    def argument_count(self) -> int:
        """The number of its arguments."""
        if not self.arguments:
            return 0
        return len(self.arguments.split(", "))


def _is_module(value: Any) -> bool:
    return isinstance(value, nn.Module)


def _is_lengths(value: Any) -> bool:
    for name, pair in value.items():
        least, most = pair
        if not (isinstance(least, int) and isinstance(most, int)):
            return False
        if not (str(name).isidentifier() and 1 <= least < most):
            return False
    return True


def _is_sampler(value: Any) -> bool:
    return isinstance(value, Sampler) and len(value) >= 0  # type: ignore[arg-type]


def _is_weight(value: Any) -> bool:
    return 0 <= float(value) < math.inf


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, Optimizer)


def _is_scheduler(value: Any) -> bool:
    return isinstance(value, LRScheduler) and not isinstance(value, ReduceLROnPlateau)


def _is_dataset(value: Any) -> bool:
    # An IterableDataset inherits a __getitem__ that only raises, and may have a length.
    has_items = hasattr(value, "__getitem__") and not isinstance(value, IterableDataset)
    return has_items and hasattr(value, "__len__")


def _dataset_hint(value: Any) -> str | None:
    if isinstance(value, DataLoader):
        return (
            "return the loader's dataset; planner shuffles and splits it itself, and calls "
            "collate(samples)"
        )

    if isinstance(value, Iterable):
        return (
            "workers read any item by its number; a stream can be trained on in a loop of your "
            "own, with planner.pipeline: docs/guides/own-loop.md"
        )

    return None


def _are_metrics(value: Any) -> bool:
    for each in value.values():
        float(each)
    return True


def _is_plan(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    return all(isinstance(part, str) for pair in value.items() for part in pair)


def _is_pretrained(value: Any) -> bool:
    path, name_in_file = value if isinstance(value, tuple) else (value, None)
    return isinstance(path, (str, Path)) and (name_in_file is None or callable(name_in_file))


_DATASET = UserFunction("", "something with a length and items", _is_dataset, _dataset_hint)

USER_FUNCTIONS: Mapping[str, UserFunction] = {
    "build_model": UserFunction("", "a torch.nn.Module", _is_module),
    "example_batch": UserFunction("batch_size"),
    "lengths": UserFunction(
        "", "a dict of names with the least and the greatest length", _is_lengths
    ),
    "collate": UserFunction("samples"),
    "sampler": UserFunction(
        "microbatch_size, microbatches, seed", "a sampler of indices with a length", _is_sampler
    ),
    "loss": UserFunction("output, target"),
    "loss_weight": UserFunction("target", "a number of labels, 0 or more", _is_weight),
    "optimizer": UserFunction("parameters", "a torch.optim.Optimizer", _is_optimizer),
    "scheduler": UserFunction(
        "optimizer", "a scheduler that follows the number of steps alone", _is_scheduler
    ),
    "dataset": _DATASET,
    "evaluation_dataset": _DATASET,
    "metrics": UserFunction("output, target", "numbers by name", _are_metrics),
    "on_update": UserFunction("minibatch, loss, metrics"),
    "blocks": UserFunction("model"),
    "tensor_parallel_plan": UserFunction("", "a dict of strings", _is_plan),
    "pretrained": UserFunction("", "a path, or a path and a function of a name", _is_pretrained),
}
