"""Deferred weights, for models larger than memory: each stage makes its own weights and no others.

The user's constructor runs twice. In the first run every parameter goes to the meta device as soon as a module
registers it; that model is captured and cut. In the second run everything is made as if the model were built whole, so
that the parameters of one stage get the values that they would have there, to the bit; but the memory of all others is
taken away again while it runs. See `planner.model.deferred_weights`. Buffers are small and always made.

Run a constructor as it is, but take the memory of most of its parameters away again while it runs.

A mode sees every operation, and so knows which values still exist. The pages of parameters that were not used for the
longest time are given back to the system; their values are then lost. Values made from lost ones are lost, too. An
operation that overwrites a lost tensor brings it back. What Python would have to decide by a lost value is refused. So
whatever exists at the end is what it would be with all memory, to the bit.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import Self

from planner.errors import ModelFileError, PlannerError
from planner.model.randomness import generators_kept

NEEDED = "meta tensor"  # in PyTorch's errors about values that are not there, and in those raised here
LEFT_BYTES = 1 << 28  # of parameters that may be forgotten but are not; the newest one stays in any case
_LEAST_BYTES = 1 << 16  # smaller parameters stay, because whole pages are given back
# Operations that overwrite all of a tensor, and draw as many random numbers whatever it held.
_OVERWRITES = frozenset(
    "aten::" + name
    for name in (
        "cauchy_",
        "copy_",
        "exponential_",
        "fill_",
        "geometric_",
        "log_normal_",
        "normal_",
        "random_",
        "uniform_",
        "zero_",
    )
)
_READ_DIRECTLY = ("numpy", "tolist")  # methods that no mode sees
_DONT_NEED = 4  # MADV_DONTNEED of Linux: anonymous pages are freed at once, and read as zeros


class Forgetting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that forgets parameters; see this module.

    Args:
        left_bytes: of parameters that may be forgotten, how much stays.
    """

    def __init__(self, left_bytes: int = LEFT_BYTES) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left_bytes = left_bytes
        self._kept: set[int] = set()
        # By key of the storage. A weak reference also keeps another storage from getting the same key.
        self._made: dict[int, StorageWeakRef] = {}  # by operations seen here: nobody outside can know them
        self._lost: dict[int, StorageWeakRef] = {}
        self._forgettable: dict[int, StorageWeakRef] = {}
        self._in_memory: OrderedDict[int, int] = OrderedDict()  # bytes of those that have pages, oldest use first
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        for name in _READ_DIRECTLY:
            self._patches.enter_context(mock.patch.object(Tensor, name, self._checked(getattr(Tensor, name))))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.close()

    def keep(self, tensor: Tensor) -> None:
        """Never forget `tensor`."""
        key = _key(tensor)
        self._kept.add(key)
        self._forgettable.pop(key, None)
        self._in_memory.pop(key, None)

    def may_forget(self, tensor: Tensor) -> None:
        """Forget `tensor` when others need its memory."""
        key, size_bytes = _key(tensor), tensor.untyped_storage().nbytes()
        if key in self._made and key not in self._kept and size_bytes >= _LEAST_BYTES:
            self._forgettable[key] = self._made[key]
            self._in_memory[key] = size_bytes

    def forgot(self, tensor: Tensor) -> bool:
        """Return whether the values of `tensor` are lost."""
        return not tensor.is_meta and _key(tensor) in self._lost

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        used = _tensors((args, kwargs))
        restores = func._schema.name in _OVERWRITES and not any(self.forgot(source) for source in used[1:])
        lost = any(self.forgot(tensor) for tensor in used) and not restores
        if lost and torch.Tag.nondeterministic_seeded in func.tags:
            self._refuse(f"{func} draws random numbers by")
        result = func(*args, **kwargs)
        made = _tensors(result)
        if lost:
            written = _written(func, args, kwargs)
            if not made and not written:
                self._refuse(f"{func} reads")
            for tensor in (*made, *written):
                self._lost[_key(tensor)] = _reference(tensor)
        elif restores and used and used[0].nbytes == used[0].untyped_storage().nbytes():
            self._lost.pop(_key(used[0]), None)
        keys = {_key(tensor) for tensor in used}
        for tensor in made:
            if (key := _key(tensor)) not in keys:
                self._made[key] = _reference(tensor)
        self._use(keys)
        return result

    def _use(self, keys: set[int]) -> None:
        """Note that these storages have been used, and give the pages of others back."""
        for key in keys & self._forgettable.keys():
            self._in_memory[key] = self._in_memory.get(key) or _bytes_of(self._forgettable[key])
            self._in_memory.move_to_end(key)
        while len(self._in_memory) > 1 and sum(self._in_memory.values()) > self._left_bytes:
            key, _ = self._in_memory.popitem(last=False)
            if _give_back(self._forgettable[key]):
                self._lost[key] = self._forgettable[key]

    def _checked(self, method: Any) -> Any:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.forgot(tensor):
                self._refuse(f"{method.__name__}() reads")
            return method(tensor, *args, **kwargs)

        return read

    def _refuse(self, what: str) -> None:
        raise RuntimeError(f"{what} the values of a {NEEDED}")


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _reference(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and not leaf.is_meta]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation changes in place."""
    declared = func._schema.arguments
    given = [*zip(declared, args, strict=False), *((each, kwargs.get(each.name)) for each in declared[len(args) :])]
    return [t for each, value in given if each.alias_info and each.alias_info.is_write for t in _tensors(value)]


def _storage(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """Return the storage, if it still exists."""
    found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return found


def _bytes_of(reference: StorageWeakRef) -> int:
    storage = _storage(reference)
    return 0 if storage is None else storage.nbytes()


def _give_back(reference: StorageWeakRef) -> bool:
    """Give the whole pages of a storage back to the system; return whether its values are lost by that."""
    storage = _storage(reference)
    if storage is None or not sys.platform.startswith("linux"):
        return False
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None)
    return int(libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _DONT_NEED)) == 0


_NUMBER = "_planner_number"  # on a parameter: its number in the order of construction
# On a deep copy, which nn.TransformerEncoder makes of its layer: the numbers of the originals, which it needs as well.
_SOURCE = "_planner_source"
_HINT = "train without `defer_weights`"
Build = Callable[[], nn.Module]


class DeferredModel:
    """A model that is built without memory for its weights, and then given those that are wanted.

    Args:
        build: the constructor. All generators of random numbers are left as they were.

    Attributes:
        model: its parameters are on the meta device until `materialize`.
        makes_buffers: whether the constructor makes something else than a parameter by random numbers or of parameters.

    Raises:
        ModelFileError: when the constructor reads the weights that it makes.
    """

    def __init__(self, build: Build) -> None:
        self._build = build
        draws = _Draws()
        with generators_kept(), _construction(_on_meta), draws:
            self.model = _built(build)
        self.makes_buffers = draws.found or any(buffer.is_meta for buffer in self.model.buffers())
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = torch.zeros_like(buffer, device="cpu")  # small, and captured with the model
        self._parameters = _outline(self.model)

    def materialize(self, names: Collection[str]) -> None:
        """Give the parameters and buffers called `names` the values that the constructor gives them.

        It draws from the generators as building the whole model does.

        Args:
            names: of a tied parameter any of its names.

        Raises:
            ModelFileError: when a value cannot be made without other stages' weights.
        """
        wanted = _without_values(self.model, names)
        keep = {_number(parameter) for parameter in wanted}
        sources = keep.union(*(getattr(parameter, _SOURCE, ()) for parameter in wanted))
        forgetting = Forgetting()

        def made_whole(parameter: nn.Parameter, number: int) -> nn.Parameter:
            (forgetting.keep if number in sources else forgetting.may_forget)(parameter)
            return parameter

        with _construction(made_whole), forgetting:
            made = _built(self._build)
        if _outline(made) != self._parameters:
            raise ModelFileError("build_model() builds another model each time that it is called", hint=_HINT)
        values = {_number(parameter): (name, parameter) for name, parameter in made.named_parameters()}
        buffers = {name: buffer for name, buffer in made.named_buffers(remove_duplicate=False) if name in names}
        for name, tensor in (*(values[number] for number in keep), *buffers.items()):
            if tensor.is_meta or forgetting.forgot(tensor):
                raise ModelFileError(
                    f"'{name}' is made from parameters that may be in another stage",
                    hint=f"give it its values without them, or {_HINT}",
                )
        _replace(self.model, {parameter: values[_number(parameter)][1] for parameter in wanted})
        for name, buffer in buffers.items():
            self.model.get_buffer(name).copy_(buffer)


def allocate(model: nn.Module, names: Collection[str]) -> None:
    """Give those parameters called `names` that have no memory some, without values: files give them."""
    empty = {
        parameter: nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
        for parameter in _without_values(model, names)
    }
    _replace(model, empty)


def allocate_buffers(model: nn.Module) -> None:
    """Give buffers that the constructor left on the meta device memory: they are small, and captured with it.

    Raises:
        ModelFileError: for a buffer that no file holds, because it is not persistent.
    """
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            if name in module._non_persistent_buffers_set:
                place = f"{path}.{name}" if path else name
                raise ModelFileError(
                    f"buffer '{place}' is on the meta device, and no file can hold it: it is not persistent",
                    hint='make it with its values, outside of torch.device("meta")',
                )
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")


@contextmanager
def without_storage(model: nn.Module) -> Iterator[None]:
    """Let a deferred model be captured: within, its parameters are on the CPU, but hold no bytes.

    Capture needs shapes, strides and the device alone; reading such a parameter would crash the process.
    """
    hollow = {parameter: _hollow(parameter) for parameter in model.parameters() if parameter.is_meta}
    _replace(model, hollow)
    try:
        yield
    finally:
        _replace(model, {new: old for old, new in hollow.items()})


def is_deferred(model: nn.Module) -> bool:
    """Return whether some of the model's parameters have no memory yet."""
    return any(parameter.is_meta for parameter in model.parameters())


def _hollow(parameter: nn.Parameter) -> nn.Parameter:
    data = torch.empty_like(parameter, device="cpu")  # the system gives no page before it is written
    data.untyped_storage().resize_(0)
    return nn.Parameter(data, parameter.requires_grad)


def _without_values(model: nn.Module, names: Collection[str]) -> list[nn.Parameter]:
    named = model.named_parameters(remove_duplicate=False)
    return list(dict.fromkeys(parameter for name, parameter in named if name in names and parameter.is_meta))


def _replace(model: nn.Module, others: dict[nn.Parameter, nn.Parameter]) -> None:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and (new := others.get(parameter)) is not None:
                setattr(module, name, new)  # in recurrent modules this updates a list of their weights as well


def _number(parameter: nn.Parameter) -> int:
    """Return the parameter's number; -1 if it was registered in another way, and so is always made."""
    number: int = getattr(parameter, _NUMBER, -1)
    return number


def _outline(model: nn.Module) -> list[tuple[str, int, torch.Size, torch.dtype]]:
    """Return what must be the same each time that the model is built, or its parameters would be mistaken."""
    named = model.named_parameters(remove_duplicate=False)
    return [(name, _number(parameter), parameter.shape, parameter.dtype) for name, parameter in named]


def _built(build: Build) -> nn.Module:
    try:
        return build()
    except (PlannerError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
        if NEEDED not in str(error) and "Meta" not in str(error):
            raise
        reason = error.message if isinstance(error, PlannerError) else error
        raise ModelFileError(
            f"the model reads its weights while it is built, and cannot be built without them: {reason}", hint=_HINT
        ) from error


def _on_meta(parameter: nn.Parameter, _number: int) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)


@contextmanager
def _construction(place: Callable[[nn.Parameter, int], nn.Parameter]) -> Iterator[None]:
    """Number the parameters as modules register them, and let `place` replace them."""
    # Patched for this time only: there is no other place that every parameter of a user's constructor passes through.
    register, deep_copy = nn.Module.register_parameter, nn.Parameter.__deepcopy__
    count = 0

    def numbered(parameter: nn.Parameter) -> nn.Parameter:
        nonlocal count
        number, count = count, count + 1
        if parameter.device.type not in ("cpu", "meta"):
            # Another device has another generator, and memory that is not the host's.
            raise ModelFileError(f"build_model() makes weights on {parameter.device}, not on the CPU", hint=_HINT)
        parameter = place(parameter, number)
        setattr(parameter, _NUMBER, number)
        return parameter

    def register_numbered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not hasattr(parameter, _NUMBER):
            parameter = numbered(parameter)
        register(module, name, parameter)

    def deep_copy_numbered(original: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        if id(original) in memo:
            known: nn.Parameter = memo[id(original)]
            return known
        copy = numbered(deep_copy(original, memo))  # type: ignore[no-untyped-call]
        setattr(copy, _SOURCE, {_number(original), *getattr(original, _SOURCE, ())})
        memo[id(original)] = copy
        return copy

    with (
        mock.patch.object(nn.Module, "register_parameter", register_numbered),
        mock.patch.object(nn.Parameter, "__deepcopy__", deep_copy_numbered),
    ):
        yield


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that notes whether random numbers are drawn for a tensor that has memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.found |= not (isinstance(result, Tensor) and result.is_meta)
        return result
