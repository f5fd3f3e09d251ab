"""Refuse to capture weights that are not the model's, such as those of a loss with weights of its
own.

The tracer takes them for constants: they would be part of the plan's graph, and no stage would
train them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from planner.errors import CaptureError
from planner.model.capture.failure import calling_place, unregistered_modules
from planner.model.torch_private import FakeTensor, tree_leaves


class RefuseForeignWeights(TorchFunctionMode):
    """Context that raises CaptureError when a leaf that requires a gradient, and is not the
    model's, is used in it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # What is in a Python list of the model is never trained, as in PyTorch: a warning says so.
        listed = [module for _, _, modules in unregistered_modules(model) for module in modules]
        modules = (model, *listed)
        self._known = {
            id(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())
        }
        self._made = WeakIdKeyDictionary()  # within, as x.detach().requires_grad_() is

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # under no_grad they get no gradient in a plain training, either
        if torch.is_grad_enabled():
            for leaf in tree_leaves((args, kwargs)):
                if self._is_foreign(leaf):
                    self._refuse(leaf)

        result = func(*args, **kwargs)
        if torch.is_grad_enabled():
            # x.requires_grad = True
            sets = args[:1] if getattr(func, "__name__", "") == "__set__" else ()
            for leaf in tree_leaves((result, sets)):
                if self._is_foreign(leaf):
                    self._made[leaf] = True

        return result

    def _is_foreign(self, leaf: Any) -> bool:
        # While the model is traced, its own weights are fake.
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
            return False
        return (
            leaf.requires_grad
            and leaf.is_leaf
            and id(leaf) not in self._known
            and leaf not in self._made
        )

    def _refuse(self, leaf: Tensor) -> None:
        place = calling_place()
        where = "" if place is None else f" at {place}"
        raise CaptureError(
            f"a weight of shape {tuple(leaf.shape)} is used{where}, and is none of the model's "
            f"parameters: no stage "
            "would train it",
            hint="put it into the model, that of loss() too: make it in the model's __init__, and "
            "let forward return "
            "it, or what is computed with it, for loss(output, target); if it is not to be "
            "trained, call "
            "requires_grad_(False)",
        )
