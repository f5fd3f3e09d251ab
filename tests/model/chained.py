"""Stages as another pipeline system would run them: each hands all that crosses its ends to its
neighbour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from planner.model.batch import Batch
from planner.model.capture.graph import LayerGraph, ValueSpec
from planner.model.stage.parts import Variant
from planner.model.stage.stage import build_stage


class ChainedStage(nn.Module):
    """Consecutive layers that take all values crossing the cut before them, and return those
    crossing the cut after.

    Values that only later stages use are passed on. Tensors have the form of messages: contiguous,
    expanded dimensions once. The last stage returns the loss alone, of shape (1,). Model inputs and
    targets are not passed: see `begin`.
    """

    def __init__(
        self,
        graph: LayerGraph,
        layers: Sequence[str],
        microbatch_size: int,
        *,
        seed: int = 0,
        recompute: Sequence[Sequence[str]] = (),
    ) -> None:
        super().__init__()
        variant = Variant(compiled=graph.options.compiled, recompute=tuple(map(tuple, recompute)))
        self.stage = build_stage(graph, layers, variant=variant)
        first, last = graph.position[layers[0]], graph.position[layers[-1]]
        self.received, self.sent = cut_values(graph, first), cut_values(graph, last + 1)
        self._size, self._seed = microbatch_size, seed
        self._upcoming: list[tuple[int, int, Batch]] = []

        def examples(specs: Sequence[ValueSpec]) -> tuple[Tensor, ...]:
            empty = [
                torch.empty(spec.wire_shape(self._size), dtype=spec.dtype, device="meta")
                for spec in specs
            ]
            return tuple(
                each.requires_grad_(spec.requires_grad)
                for each, spec in zip(empty, specs, strict=True)
            )

        # Examples of the tensors that `forward` takes and returns.
        loss = (torch.empty(1, device="meta").requires_grad_(),)
        self.input_args = examples(self.received)
        self.output_args = loss if self.stage.has_loss else examples(self.sent)

    def begin(self, minibatch: int, batches: Mapping[int, Batch]) -> None:
        """Set the microbatches of `minibatch`, by number, that the next calls of `forward` run in
        order.
        """
        self._upcoming = [(minibatch, microbatch, batch) for microbatch, batch in batches.items()]

    def forward(self, *received: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the layers on the next microbatch."""
        minibatch, microbatch, batch = self._upcoming.pop(0)
        self.stage.set_random_key(self._seed, minibatch, microbatch)
        wires = {spec.name: tensor for spec, tensor in zip(self.received, received, strict=True)}
        values = {spec.name: spec.from_wire(wires[spec.name], self._size) for spec in self.received}
        results = self.stage(batch, {spec.name: values[spec.name] for spec in self.stage.received})
        if self.stage.has_loss:
            loss: Tensor = results["loss"]
            return loss.reshape(1)
        return tuple(
            spec.to_wire(results[spec.name]).contiguous()
            if spec.name in results
            else wires[spec.name]
            for spec in self.sent
        )


def cut_values(graph: LayerGraph, position: int) -> tuple[ValueSpec, ...]:
    """Return the values that layers before `position` make and layers from there on use."""
    return tuple(
        graph.specs[node]
        for node in graph.crossing
        if graph.owner[node] < position and graph.last_use(node) >= position
    )
