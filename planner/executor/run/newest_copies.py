"""Lend stages the newest copies of weights that they share, while they evaluate.

Under 1f1b a stage with few units in flight applies the gradients of shared weights some rounds
later than its sharers can have all of them. So its copy is older at an evaluation than that of the
stage with most units in flight, whose copy has had all rounds: the one that one process would have.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from planner.executor.communication.control import control_group
from planner.executor.run.context import HeldStage, PipelineContext


class NewestCopies:
    """One worker's part of the exchange; all workers with stages make one together."""

    def __init__(self, context: PipelineContext) -> None:
        self._shape = context.shape
        self._rank = context.rank
        self._given: list[tuple[nn.Parameter, int]] = []  # and the ranks that take them
        self._taken: list[tuple[nn.Parameter, int]] = []  # and the ranks that give them
        for stage in context.stages.values():
            for name, holders in stage.shared.holders.items():
                self._note(stage, stage.shared.parameters[name], holders)

    def _note(self, stage: HeldStage, weight: nn.Parameter, holders: Sequence[int]) -> None:
        shape = self._shape
        giver = min(holders, key=shape.lag)
        givers = shape.ranks[giver]
        if shape.lag(stage.number) > shape.lag(giver):
            number = shape.replica_of(stage.number, self._rank)
            self._taken.append((weight, givers[number % len(givers)]))
        if stage.number != giver:
            return

        for other in holders:
            if shape.lag(other) > shape.lag(giver):
                self._given += [
                    (weight, rank)
                    for number, rank in enumerate(shape.ranks[other])
                    if givers[number % len(givers)] == self._rank
                ]

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let the weights of this worker's stages be the newest ones within."""
        copies = [weight.detach().cpu().contiguous() for weight, _ in self._given]
        sent = [
            dist.isend(copy, rank, control_group())
            for copy, (_, rank) in zip(copies, self._given, strict=True)
        ]
        own = [(weight, weight.data) for weight, _ in self._taken]
        for weight, rank in self._taken:
            newest = torch.empty_like(
                weight.data, device="cpu", memory_format=torch.contiguous_format
            )
            dist.recv(newest, rank, control_group())
            # As weight versions do: storage that units in flight use is not written.
            weight.data = newest.to(weight.device)
        for each in sent:
            assert each is not None
            each.wait()

        try:
            yield
        finally:
            for weight, data in own:
                weight.data = data
