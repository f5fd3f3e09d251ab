"""Notice buffers that forward() changes in a stage that several workers compute, each for its own
samples.

Each worker sees a part of the samples alone, so a count of steps, a codebook or a moving average
is another on each, and none is that of one process. Nothing that workers exchange would tell. The
statistics of BatchNorm are left out: in training nothing reads them, and `plan train` says in a
line what they are.
"""

import torch
from torch import Tensor

from planner.errors import ModelFileError
from planner.executor.communication.later import Reading
from planner.model.stage.stage import StageModule

_HINT = (
    "give the stage to one worker, as plans of `plan price` with `stages` and no `replicas` do; "
    "or let each worker "
    "have buffers of its own with `accept_divided_loss`"
)


class ReplicaBuffers:
    """Watches the buffers of a stage's module."""

    def __init__(self, module: StageModule, stage: int) -> None:
        self._module = module
        self._stage = stage
        self._initial = {
            name: buffer.detach().clone()
            for name, buffer in module.named_buffers()
            if name not in module.statistics
        }

    def readings(self, minibatch: int) -> list[Reading]:
        """Return what tells whether the forward of a minibatch has changed a buffer; reading it
        raises ModelFileError.

        Values are compared, because PyTorch counts no changes that are made through `.data`. The
        host waits for no device. A buffer that has another shape now is left alone: a table that
        grows with the length of samples.
        """
        return [
            self._compared(name, self._initial[name], buffer.detach(), minibatch)
            for name, buffer in self._module.named_buffers()
            if name in self._initial and buffer.shape == self._initial[name].shape
        ]

    def _compared(self, name: str, initial: Tensor, now: Tensor, minibatch: int) -> Reading:
        alike = (initial == now) | ((initial != initial) & (now != now))

        def compare(differs: Tensor) -> None:
            if float(differs):
                raise ModelFileError(
                    f"forward() changes the buffer '{name}' in minibatch {minibatch}, and each "
                    f"worker of stage {self._stage} would have another, made of the samples that "
                    f"it sees",
                    hint=_HINT,
                )

        return (~alike.all()).to(torch.float64), compare
