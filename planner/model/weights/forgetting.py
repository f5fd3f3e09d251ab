"""Run a constructor as it is, but take the memory of most of its parameters away again while it runs.

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
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import Self

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
