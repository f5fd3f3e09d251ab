"""Run a module without lasting effects on its buffers and on random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn


def random_state_kept(device: torch.device) -> AbstractContextManager[None]:
    """Restore the random state of the CPU, and of `device` if it is a GPU that is there, afterwards."""
    # Without a list, fork_rng asks every GPU of the machine for its state, and so opens a context on each.
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" and torch.cuda.is_available() else [])


@contextmanager
def keep_state(module: nn.Module) -> Iterator[torch.device]:
    """Restore the module's buffers and its device's random state afterwards; yield the device."""
    device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    before = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    try:
        with random_state_kept(device):
            yield device
    finally:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(before[name])
