"""Estimate a transformer by its kinds of layers, and make the profile of one with any number of
them.

A layer of the profile is the embedding, one transformer layer, or the head with the loss: the parts
of which plans of such models are made. A model of two layers is traced, however many the model has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.gpu_truth.gpt import Gpt
from planner.cost.tensor import by_tokens
from planner.cost.work import working_bytes
from planner.formats.profile import (
    DEGREE_COLUMNS,
    DegreeCosts,
    Device,
    Edge,
    Layer,
    Profile,
    Provenance,
    Value,
)
from planner.profiler.estimated.devices import DeviceSpec, DType
from planner.profiler.estimated.estimate import profile_of_trace
from planner.profiler.estimated.execution import Execution
from planner.profiler.estimated.operations import OperationRecorder
from planner.profiler.estimated.trace import StepTrace, trace_step

_SUMS = (
    "forward_s",
    "backward_s",
    "update_s",
    "accumulate_s",
    "weight_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "buffer_bytes",
    "saved_bytes",
)


Reduces = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True)
class Parts:
    """Estimated costs of a model's kinds of layers, for one microbatch.

    Attributes:
        embedding, layer, head: summed over their operations; the head has the loss.
        operators, head_operators: of the layer and of the head, as they were captured.
        boundary_bytes: that one layer sends to the next, and as much comes back.
        microbatch_size: samples.
        device: estimated for.
        graph_hash: of the traced model.
    """

    embedding: Layer
    layer: Layer
    head: Layer
    operators: tuple[Layer, ...]
    head_operators: tuple[Layer, ...]
    boundary_bytes: int
    microbatch_size: int
    device: Device
    graph_hash: str | None

    def recomputed(self, layer: Layer, share: float = 1.0) -> Layer:
        """Return the layer with this share of its forward run again in the backward, keeping the
        rest.
        """
        kept = min(layer.saved_bytes, self.boundary_bytes)
        backward_s = layer.backward_s + share * layer.forward_s
        return layer.model_copy(
            update={
                "backward_s": backward_s,
                "weight_share": layer.backward_weight_s / backward_s,
                "saved_bytes": round(share * kept + (1 - share) * layer.saved_bytes),
                "workspace_bytes": layer.workspace_bytes
                + round(share * (layer.saved_bytes - kept)),
            }
        )


def parts_of(
    gpt: Gpt, microbatch_size: int, run: Execution, spec: DeviceSpec, dtype: DType = "float16"
) -> Parts:
    """Estimate the kinds of layers of `gpt` on a device, as it runs them."""
    profile = profile_of_trace(_traced(replace(gpt, layers=2), microbatch_size, run, dtype), spec)
    inner = [
        number for number, layer in enumerate(profile.layers) if layer.name.startswith("layers.1.")
    ]
    first = next(
        number for number, layer in enumerate(profile.layers) if layer.name.startswith("layers.0.")
    )
    # Without names of weights: layers that are repeated would share them.
    unnamed = [layer.model_copy(update={"parameters": ()}) for layer in profile.layers]
    operators, head = tuple(unnamed[inner[0] : inner[-1] + 1]), tuple(unnamed[inner[-1] + 1 :])
    return Parts(
        embedding=summed("embedding", profile.layers[:first]),
        layer=summed("layer", operators),
        operators=operators,
        head_operators=head,
        head=summed("head", head),
        boundary_bytes=microbatch_size
        * gpt.seq
        * gpt.hidden
        * (4 if dtype in ("float32", "tf32") else 2),
        microbatch_size=microbatch_size,
        device=profile.device,
        graph_hash=profile.graph_hash,
    )


@cache
def _traced(gpt: Gpt, microbatch_size: int, run: Execution, dtype: DType) -> StepTrace:
    return trace_step(gpt.training_spec(), microbatch_size, dtype, execution=run)


def summed(name: str, layers: Sequence[Layer]) -> Layer:
    """Return one layer with the costs of all; its workspace is at the peak of their forward and
    backward.
    """
    sums = {field: sum(getattr(layer, field) for layer in layers) for field in _SUMS}
    saved, gradients, workspaces = (
        np.array([getattr(layer, field) for layer in layers], dtype=np.float64)
        for field in ("saved_bytes", "gradient_bytes", "workspace_bytes")
    )
    working, _ = working_bytes(saved, gradients, workspaces)
    weights_s = sum(layer.backward_weight_s for layer in layers)
    return Layer(
        name=name,
        op=name,
        workspace_bytes=max(0, int(working[-1])),
        weight_share=min(1.0, weights_s / sums["backward_s"]),
        **sums,
    )


def transformer(model: str, parts: Parts, layers: Sequence[Layer]) -> Profile:
    """Return the profile of a transformer with these layers, each a block; embedding and head are
    beside them.
    """
    blocks = [
        layer.model_copy(update={"name": f"layers.{number}"}) for number, layer in enumerate(layers)
    ]
    return chain(model, parts, [parts.embedding, *blocks, parts.head])


def divided(whole: Profile, parts: Mapping[int, Profile], reduces: Reduces) -> Profile:
    """Return the profile with what one of several ranks does that divide the layers as Megatron's
    do.

    Args:
        whole: on one rank.
        parts: of one of them, by how many there are.
        reduces: how many hidden states each layer all-reduces, forward and backward.
    """
    hidden_bytes = whole.layers[0].outputs[0].output_bytes
    forward, backward = reduces

    def columns(part: Profile) -> dict[str, Any]:
        return {
            name: tuple(getattr(layer, name) for layer in part.layers) for name in DEGREE_COLUMNS
        }

    costs = (
        DegreeCosts(
            degree=degree,
            source="estimated",
            forward_reduced_bytes=tuple(count * hidden_bytes for count in forward),
            backward_reduced_bytes=tuple(count * hidden_bytes for count in backward),
            forward_reduces=tuple(forward),
            backward_reduces=tuple(backward),
            **columns(part),
        )
        for degree, part in sorted(parts.items())
    )
    return whole.model_copy(update={"tensor": tuple(costs) or None})


def layer_reduces(layers: int, *, again: bool) -> Reduces:
    """Return what the layers of a transformer all-reduce, between an embedding and a head.

    A layer all-reduces its hidden state twice forward and twice backward, the embedding once
    forward, the head once backward (Shoeybi et al. 2019, section 3). Where it runs `again` in its
    backward, its forward's are there, too.
    """
    return (1, *(2,) * layers, 0), (0, *(4 if again else 2,) * layers, 1)


def in_sequence(whole: Parts, part: Parts, degree: int) -> Parts:
    """Return what one of several ranks does where they divide by tokens, too
    (`planner.cost.tensor.by_tokens`).
    """
    nothing = [0] * len(whole.operators)
    profiles = [chain("layer", each, each.operators) for each in (whole, part)]
    (costs,) = divided(profiles[0], {degree: profiles[1]}, (nothing, nothing)).tensor or ()
    columns = zip(
        *(getattr(by_tokens(profiles[0], costs), name) for name in DEGREE_COLUMNS), strict=True
    )
    operators = tuple(
        layer.model_copy(update=dict(zip(DEGREE_COLUMNS, row, strict=True)))
        for layer, row in zip(part.operators, columns, strict=True)
    )
    return replace(part, operators=operators, layer=summed("layer", operators))


def chain(
    model: str, parts: Parts, layers: Sequence[Layer], sends: Sequence[float] | None = None
) -> Profile:
    """Return the profile of a chain of layers, each of which sends a hidden state, or so many of
    them.
    """
    sizes = [round(parts.boundary_bytes * states) for states in sends or [1.0] * len(layers)]
    named = [
        layer.model_copy(
            update={"outputs": (Value(name=layer.name, output_bytes=size, gradient_bytes=size),)}
        )
        for layer, size in zip(layers[:-1], sizes, strict=False)
    ]
    named.append(layers[-1])
    edges = [Edge(source=a.name, value=a.name, target=b.name) for a, b in pairwise(named)]
    return Profile(
        model=model,
        device=parts.device,
        graph_hash=parts.graph_hash,  # memory is that of a step which was run
        optimizer_elementwise=True,
        microbatch_size=parts.microbatch_size,
        layers=tuple(named),
        edges=tuple(edges),
        provenance=Provenance(tool="benchmarks.gpu_truth", source="estimated"),
    )


def both_ways(block: nn.Module, x: Tensor) -> OperationRecorder:
    """Record a block's forward and backward, whose operations end at `until[1:3]`, and begin at
    `until[0]`.
    """
    recorder = OperationRecorder(gpu=True)
    with recorder:
        recorder.end_span()
        y = block(x)
        recorder.end_span()
        y.backward(torch.empty_like(y))
        recorder.end_span()
    return recorder
