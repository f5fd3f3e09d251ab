"""What all stages of a synchronous schedule do as one: clip by the norm of all gradients of the model."""

from __future__ import annotations

import torch
import torch.distributed as dist


class JointNorm:
    """Adds up squared norms over all workers; each of these calls it once per update.

    Args:
        group: of all workers.
        device: that the group's messages are made on.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device

    def sum(self, squared_norm: float) -> float:
        """The sum of all workers' `squared_norm`."""
        total = torch.tensor(squared_norm, dtype=torch.float64, device=self._device)
        dist.all_reduce(total, group=self._group)
        return float(total)
