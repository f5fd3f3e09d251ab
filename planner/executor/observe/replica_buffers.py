"""Notice buffers that forward() changes in a stage that several workers replicate.

Each replica sees a part of the samples alone, so a count of steps, a codebook or a moving average is another on each,
and none is that of one process. Nothing that replicas exchange would tell. The statistics of BatchNorm are left out: in
training nothing reads them, and `plan train` says in a line what they are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from planner.errors import ModelFileError

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_HINT = (
    "give the stage to one worker, as plans of `plan price` with `stages` and no `replicas` do; or let each replica "
    "have buffers of its own with `accept_divided_loss`"
)

Reading: TypeAlias = tuple[Tensor, Callable[[Tensor], None]]  # numbers, and who looks at them on the host


@dataclass
class _Seen:
    buffer: Tensor
    version: int  # as PyTorch counts changes in place
    first: Tensor  # a copy of the values at the start


class ReplicaBuffers:
    """Watches the buffers of a stage's module."""

    def __init__(self, module: nn.Module, stage: int) -> None:
        self._module, self._stage = module, stage
        self._seen = {
            name: _Seen(buffer, buffer._version, buffer.detach().clone())
            for name, buffer in module.named_buffers()
            if name.rpartition(".")[2] not in _STATISTICS
        }

    def readings(self, minibatch: int) -> list[Reading]:
        """Return what tells whether the forward of a minibatch has changed a buffer; reading it raises ModelFileError.

        The host waits for no device. A buffer that has another shape now is left alone: a table that grows with the
        length of samples.
        """
        if not self._seen:
            return []
        changed = []
        for name, buffer in self._module.named_buffers():
            seen = self._seen.get(name)
            if seen is None or (buffer is seen.buffer and buffer._version == seen.version):
                continue
            seen.buffer, seen.version = buffer, buffer._version
            if buffer.shape == seen.first.shape:
                changed.append(self._compared(name, seen.first, buffer.detach(), minibatch))
        return changed

    def _compared(self, name: str, first: Tensor, now: Tensor, minibatch: int) -> Reading:
        alike = (first == now) | ((first != first) & (now != now))

        def compare(differs: Tensor) -> None:
            if float(differs):
                raise ModelFileError(
                    f"forward() changes the buffer '{name}' in minibatch {minibatch}, and each replica of stage "
                    f"{self._stage} would have another, made of the samples that it sees",
                    hint=_HINT,
                )

        return (~alike.all()).to(torch.float64), compare
