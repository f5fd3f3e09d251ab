"""A stage for systems whose stages pass plain tensors to the next stage, and to no other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from planner.model.batch import Batch
from planner.model.capture.graph import LayerGraph, ValueSpec
from planner.model.stage.stage import build_stage


class ChainedStage(nn.Module):
    """Consecutive layers; takes every value that crosses the cut before them, and returns those that cross the next.

    Values that only later stages use are handed on. Tensors are as they travel: contiguous, and without repetition.
    The last stage returns the loss alone, shape (1,). Model inputs and targets do not travel: see `begin`.

    Args:
        graph: of the model.
        layers: of the stage, by name.
        microbatch_size: samples.
        seed: of the random numbers inside layers.
        recompute: keep only what was received for the backward.
        compile_: put the layers through torch.compile.
    """

    def __init__(
        self,
        graph: LayerGraph,
        layers: Sequence[str],
        microbatch_size: int,
        *,
        seed: int = 0,
        recompute: bool = False,
        compile_: bool = False,
    ) -> None:
        super().__init__()
        self.stage = build_stage(graph, layers, compile_=compile_)
        first, last = graph.position[layers[0]], graph.position[layers[-1]]
        self.received, self.sent = cut_values(graph, first), cut_values(graph, last + 1)
        self._size = microbatch_size
        self._seed = seed
        self._recompute = recompute
        self._upcoming: list[tuple[int, int, Batch]] = []

    @property
    def input_args(self) -> tuple[Tensor, ...]:
        """Tensors on the meta device like those that `forward` takes."""
        return tuple(self._example(spec) for spec in self.received)

    @property
    def output_args(self) -> tuple[Tensor, ...]:
        """Tensors on the meta device like those that `forward` returns."""
        if self.stage.has_loss:
            return (torch.empty(1, device="meta").requires_grad_(),)
        return tuple(self._example(spec) for spec in self.sent)

    def begin(self, minibatch: int, batches: Mapping[int, Batch]) -> None:
        """Say what the next calls of `forward` are for: the microbatches of `minibatch`, by number, in order."""
        self._upcoming = [(minibatch, microbatch, batch) for microbatch, batch in batches.items()]

    def forward(self, *received: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the layers on the next microbatch."""
        minibatch, microbatch, batch = self._upcoming.pop(0)

        def run(*values: Tensor) -> Tensor | tuple[Tensor, ...]:
            self.stage.set_random_key(self._seed, minibatch, microbatch)
            return self._run(batch, values)

        if not self._recompute:
            return run(*received)
        outputs: Tensor | tuple[Tensor, ...] = checkpoint(run, *received, use_reentrant=False)
        return outputs

    def _run(self, batch: Batch, received: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
        wires = {spec.name: tensor for spec, tensor in zip(self.received, received, strict=True)}
        values = {spec.name: spec.from_wire(wires[spec.name], self._size) for spec in self.received}
        results = self.stage(batch, {spec.name: values[spec.name] for spec in self.stage.received})
        if self.stage.has_loss:
            loss: Tensor = results["loss"]
            return loss.reshape(1)
        return tuple(
            spec.to_wire(results[spec.name]).contiguous() if spec.name in results else wires[spec.name]
            for spec in self.sent
        )

    def _example(self, spec: ValueSpec) -> Tensor:
        example = torch.empty(spec.wire_shape(self._size), dtype=spec.dtype, device="meta")
        return example.requires_grad_(spec.requires_grad)


def cut_values(graph: LayerGraph, position: int) -> tuple[ValueSpec, ...]:
    """The values that layers before `position` make and layers from there on use."""
    return tuple(
        graph.specs[node]
        for node in graph.crossing
        if graph.owner[node] < position and graph.last_use(node) >= position
    )
