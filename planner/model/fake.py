"""Build models and batches without data, so that a step of them computes nothing and needs no memory.

PyTorch has two kinds of such tensors. Models are built on the meta device. They run as fake tensors that pretend to be
on a CPU, or on CUDA, because PyTorch chooses operations by device, and on the meta device some are others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from planner.errors import ModelFileError
from planner.model.batch import Batch

T = TypeVar("T")

_CPU = torch.device("cpu")


def on_meta(build: Callable[[], T]) -> T:
    """Return what `build` returns, on the meta device, or in memory if it looks at the tensors' numbers."""
    try:
        with torch.device("meta"):
            return build()
    except ModelFileError:
        return build()  # a mistake in the file raises again


def fake_modules(
    modules: Sequence[nn.Module], mode: FakeTensorMode, device: torch.device = _CPU
) -> tuple[nn.Module, ...]:
    """Return copies of the modules with fake weights on `device`; what they share stays shared."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    with mode:
        memo: dict[int, Any] = {id(tensor): _fake_weight(tensor, device) for tensor in tensors}
    return copy.deepcopy(tuple(modules), memo)


def make_fake(module: nn.Module, device: torch.device = _CPU) -> None:
    """Replace the weights in `module` by fake ones of the active mode on `device`."""
    fakes: dict[int, Tensor] = {}
    for owner in module.modules():
        registries: list[dict[str, Any]] = [owner._parameters, owner._buffers]
        for registry in registries:
            for name, tensor in registry.items():
                if tensor is not None:
                    registry[name] = fakes.setdefault(id(tensor), _fake_weight(tensor, device))


def fake_batch(batch: Batch, device: torch.device = _CPU) -> Batch:
    """Return a batch of fake tensors of the active mode on `device`."""
    return Batch(*tree_map(lambda leaf: _fake_input(leaf, device), (batch.args, batch.kwargs, batch.target)))


def _fake_weight(tensor: Tensor, device: torch.device) -> Tensor:
    empty = _fake_input(tensor, device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _fake_input(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)
