"""Random numbers that do not depend on how the model is split: one seed per minibatch, microbatch
and layer.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy
import torch
from torch import nn

from planner.model.buffers import buffers_kept
from planner.runtime import runtime_of

CPU = torch.device("cpu")
_MASK = (1 << 64) - 1


class RandomKey:
    """What determines the random numbers of a forward, besides the layer."""

    def __init__(self, state: int | None = None) -> None:
        self._state = state

    def copy(self) -> "RandomKey":
        """Return a key that stays as this one is now."""
        return RandomKey(self._state)

    def set(self, seed: int, minibatch: int, microbatch: int) -> None:
        """Use these numbers from now on."""
        self._state = _mix(_mix(_mix(seed) ^ minibatch) ^ microbatch)

    def seed_of(self, layer: int) -> int | None:
        """Return the generator's seed for a layer, below 2^63; None while a stage is warmed up, or
        profiled.
        """
        if self._state is None:
            return None
        return _mix(self._state ^ layer) >> 1


def reseed(key: RandomKey, device: torch.device, layer: int) -> None:
    """Seed the default generators of the CPU and of `device` for a layer."""
    seed = key.seed_of(layer)
    if seed is not None:
        runtime_of(device).seed(device, seed)


def _mix(number: int) -> int:
    """Mix 64 bits one to one, such that every input bit reaches every output bit (splitmix64)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


@contextmanager
def generators_kept(device: torch.device = CPU, *, on_success: bool = True) -> Iterator[None]:
    """Restore the generators of the host, Python's, NumPy's and PyTorch's, and that of `device`.

    Args:
        on_success: whether to restore the host's where nothing fails; they are after an error.
    """
    state = torch.get_rng_state()
    python_state = random.getstate()
    numpy_state = numpy.random.get_state()
    on_device = (
        nullcontext() if device.type == CPU.type else runtime_of(device).random_state_kept(device)
    )
    succeeded = False
    try:
        with on_device:
            yield
        succeeded = True
    finally:
        if on_success or not succeeded:
            torch.set_rng_state(state)
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)


@contextmanager
def keep_state(module: nn.Module) -> Iterator[torch.device]:
    """Restore the module's buffers, and all generators, afterwards; yield the module's device.

    Buffers that a forward replaces by other tensors are restored, too.
    """
    device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), CPU)
    with buffers_kept(module), generators_kept(device):
        yield device
