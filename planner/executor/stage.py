"""What the executor asks of a stage, so that it does not care how stages are made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from planner.model.batch import Batch
from planner.model.graph import ValueSpec


class StageProgram(Protocol):
    """Consecutive layers as one module that holds only their parameters."""

    @property
    def received(self) -> Sequence[ValueSpec]:
        """Values that come from earlier stages."""
        ...

    @property
    def sent(self) -> Sequence[ValueSpec]:
        """Values that later stages use: made here, or received and passed on."""
        ...

    @property
    def needs_batch(self) -> bool:
        """Whether `forward` reads model inputs or targets."""
        ...

    @property
    def has_loss(self) -> bool:
        """Whether `forward` returns "loss"."""
        ...

    def set_random_key(self, seed: int, minibatch: int, microbatch: int) -> None:
        """Make the next forward's random numbers a function of these and of the layer alone."""
        ...

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The stage's own parameters, each once."""
        ...

    def __call__(self, batch: Batch | None, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values of `sent` by name, and "loss" where the stage has it."""
        ...
