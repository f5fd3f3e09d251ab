"""Keep all generators of random numbers that a user's code may draw from."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore PyTorch's generator of the CPU, Python's, and NumPy's where it is in use."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
