"""Hide from user code, for a while, that this process is a worker among others: what it then does,
one process does.

A habit from DistributedDataParallel is to divide a rate by WORLD_SIZE, or to look at RANK.
torchrun, Slurm and MPI say such things by environment variables, and torch.distributed by
`is_initialized()`. Both are hidden from this thread alone: those that watch the worker need them.

`os.environ` and `torch.distributed.is_initialized` are replaced meanwhile, the latter also where
PyTorch itself looks for it (written for PyTorch 2.13). What a module has imported by name before is
not hidden from it.
"""

import os
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch.distributed as dist

_NAMES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "ROLE_NAME",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)
# what two threads replace, they would restore in the wrong order
_ONE_AT_A_TIME = threading.RLock()
_PREFIXES = ("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "PMIX_")


@contextmanager
def as_one_process() -> Iterator[None]:
    """Let this thread see neither variables of workers nor a process group."""
    with without_process_group():
        environment = _Environment(os.environ, threading.get_ident())
        with patch.object(os, "environ", environment):
            yield


@contextmanager
def without_process_group() -> Iterator[None]:
    """Let this thread see no process group.

    Modules that find one when they are made, as those of codebooks do, communicate in forward: with
    ranks that have other layers, or other microbatches, and never answer.
    """
    thread = threading.get_ident()
    with _ONE_AT_A_TIME, ExitStack() as replaced:
        is_initialized = dist.is_initialized

        def is_initialized_elsewhere() -> bool:
            return threading.get_ident() != thread and is_initialized()

        for module in (dist, dist.distributed_c10d):
            replaced.enter_context(patch.object(module, "is_initialized", is_initialized_elsewhere))
        yield


class _Environment(MutableMapping[str, str]):
    """The environment without the variables of workers for one thread, and as it is for all
    others.
    """

    def __init__(self, whole: MutableMapping[str, str], thread: int) -> None:
        self._whole = whole
        self._thread = thread

    def __getitem__(self, name: str) -> str:
        if self._hides(name):
            raise KeyError(name)
        return self._whole[name]

    def __setitem__(self, name: str, value: str) -> None:
        self._whole[name] = value

    def __delitem__(self, name: str) -> None:
        del self._whole[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._whole if not self._hides(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def copy(self) -> dict[str, str]:
        """Return a dict, as `os.environ.copy()` does."""
        return dict(self)

    def __or__(self, other: Mapping[str, str]) -> dict[str, str]:
        return {**self, **other}

    def __ror__(self, other: Mapping[str, str]) -> dict[str, str]:
        return {**other, **self}

    def _hides(self, name: str) -> bool:
        return threading.get_ident() == self._thread and (
            name in _NAMES or name.startswith(_PREFIXES)
        )
