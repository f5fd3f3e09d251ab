"""Let glibc return freed memory, so that a worker's resident size is what it uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536"}


@contextmanager
def pages_returned() -> Iterator[None]:
    """Let processes started within the context return each larger block to the system when they
    free it (glibc).
    """
    os.environ.update(_RETURNED)
    try:
        yield
    finally:
        for name in _RETURNED:
            del os.environ[name]
