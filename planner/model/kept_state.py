"""Run a module without lasting effects on its buffers and on random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def keep_state(module: nn.Module) -> Iterator[torch.device]:
    """Restore the module's buffers and its device's random state afterwards; yield the device."""
    device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    before = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield device
    finally:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(before[name])
