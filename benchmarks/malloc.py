"""Workers whose resident size is what they use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536"}


@contextmanager
def pages_returned() -> Iterator[None]:
    """Within, processes that are started give every larger block back to the system when it is freed (glibc)."""
    os.environ.update(_RETURNED)
    try:
        yield
    finally:
        for name in _RETURNED:
            del os.environ[name]
