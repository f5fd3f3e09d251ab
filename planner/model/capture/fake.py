"""Models and batches without data, so that a step of them computes nothing and needs no memory.

PyTorch has two kinds of such tensors. Models are built on the meta device. They run as fake tensors that pretend to be
on a CPU, or on CUDA, because PyTorch chooses operations by device, and on the meta device some are others.

Where PyTorch was built without CUDA, `pretended` lets fake tensors be on it, so that PyTorch's own rules for autocast
are observed instead of a copy of its tables. Three things are in the way: autograd and some operations ask for the
device's guard and end the process if there is none, torch.autocast refuses, and a few kernels of CUDA have no fake
implementation.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from planner.errors import CaptureError, ModelFileError
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


_CUDA, _META = 1, 14  # c10::DeviceType
_DEVICE_TYPES = 21  # at least, since PyTorch 1.12
# std::atomic<const DeviceGuardImplInterface*> c10::impl::device_guard_impl_registry[]
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"


def fake_device(kind: str) -> torch.device:
    """Return the device of `kind`, "cpu" or "cuda", for fake tensors."""
    if kind != "cuda":
        return torch.device(kind)
    # With a number, or PyTorch asks the guard for it. The current one, for fake tensors open a context on theirs.
    return torch.device(kind, torch.cuda.current_device() if torch.cuda.is_available() else 0)


@contextmanager
def pretended(kind: str) -> Iterator[None]:
    """Let fake tensors within run on devices of `kind`, "cpu" or "cuda"; no effect where such a device is there.

    Raises:
        CaptureError: where this build of PyTorch cannot.
    """
    if kind != "cuda" or torch.cuda.is_available():
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(_guard())
        stack.enter_context(mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False))
        stack.enter_context(mock.patch("torch.cuda.is_bf16_supported", return_value=True))
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        library.impl("_thnn_fused_gru_cell", _gru_cell, "Meta")
        yield


@contextmanager
def _guard() -> Iterator[None]:
    # A guard that does nothing, as the meta device's. FakeTensorMode sets one by itself only where PyTorch has CUDA and
    # the machine has no GPU, and only in newer versions.
    guards = _guards()
    before, guards[_CUDA] = guards[_CUDA], guards[_META]
    try:
        yield
    finally:
        guards[_CUDA] = before


@cache
def _guards() -> ctypes.Array[ctypes.c_void_p]:
    try:
        (library,) = (Path(torch.__file__).parent / "lib").glob("libc10.*")
        return (ctypes.c_void_p * _DEVICE_TYPES).in_dll(ctypes.CDLL(str(library)), _GUARDS)
    except ValueError as cause:  # no such library or symbol
        raise CaptureError(
            "this build of PyTorch cannot tell which dtypes values have under autocast on CUDA",
            hint="profile in float32, or on a machine with a GPU",
        ) from cause


def _gru_cell(
    _input_gates: Tensor, _hidden_gates: Tensor, hx: Tensor, _bias: Tensor | None = None, _hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hx), hx.new_empty(hx.shape[0], 5 * hx.shape[1])
