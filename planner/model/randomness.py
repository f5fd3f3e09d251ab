"""Random numbers that do not depend on how the model is split: one seed per minibatch, microbatch and layer."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch
from torch import nn

from planner.runtime import runtime_of

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
        """Return the generator's seed for a layer, below 2^63; None while a stage is warmed up, or profiled."""
        return None if self._state is None else _mix(self._state ^ layer) >> 1


def reseed(key: RandomKey, device: torch.device, layer: int) -> None:
    """Seed the default generator of `device` for a layer."""
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
def generators_kept(*, on_success: bool = True) -> Iterator[None]:
    """Restore PyTorch's generator of the CPU, Python's and NumPy's; at least after an error."""
    state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = numpy.random.get_state()
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        if on_success or not succeeded:
            torch.set_rng_state(state)
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Restore the module's buffers afterwards, those that a forward replaces by other tensors too."""
    before = [
        (owner, name, buffer, buffer.detach().clone())
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, values in before:
                setattr(owner, name, buffer)  # a forward may have put another tensor in its place, of another shape
                buffer.copy_(values)


@contextmanager
def keep_state(module: nn.Module) -> Iterator[torch.device]:
    """Restore the module's buffers and its device's random state afterwards; yield the device."""
    device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    with buffers_kept(module), runtime_of(device).random_state_kept(device):
        yield device
