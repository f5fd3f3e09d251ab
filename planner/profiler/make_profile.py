"""Assemble a Profile from what was measured of each layer, or estimated."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from statistics import median, quantiles
from typing import Any, Literal

import torch

from planner.formats.names import FLOAT_BYTES, EightBits, StackName
from planner.formats.profile import (
    TF32,
    ChunkedLoss,
    Compiled,
    DegreeCosts,
    Device,
    Disturbance,
    Edge,
    Layer,
    LossMean,
    Profile,
    Provenance,
    Uncut,
    Value,
    WholeStep,
)
from planner.model.capture.graph import GraphLayer, LayerGraph
from planner.model.capture.joins import operations_in
from planner.model.capture.size import Extent
from planner.model.options import autocast_name, gradient_bytes
from planner.model.stage.chunked_loss import UnchunkedLossError, head_and_loss
from planner.profiler.step.timing import PARTS, StepTimes
from planner.profiler.step.update import LayerUpdate
from planner.version import __version__

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerMeasurement:
    """What one layer costs in training."""

    times: StepTimes
    update: LayerUpdate
    saved_bytes: int  # from forward to backward
    workspace_bytes: int  # uncompiled
    flops: tuple[int, int]  # model FLOPs of forward and backward
    weight_share: float | None = None  # of the backward, for gradients of weights, where known


@dataclass(frozen=True)
class Measurement:
    """What a model costs in training."""

    layers: Sequence[LayerMeasurement]
    # the user's model as it is, or all layers compiled at once; None for estimates
    whole: StepTimes | None = None
    # what the layers' times were computed from, where stages will be compiled
    compiled: Compiled | None = None
    # whole steps of a first measurement, and of a second one if there was one
    passes: Sequence[StepTimes] = ()


@dataclass(frozen=True)
class ModelFacts:
    """What a profile says of a model besides the costs of its layers; see `Profile`."""

    loss: LossMean | None = None
    capture_checked: Literal[True] | None = None
    deterministic: Literal[True] | None = None
    optimizer_elementwise: bool | None = None
    optimizer_separable: bool | None = None
    tokens_per_sample: int | None = None
    tensor: tuple[DegreeCosts, ...] | None = None
    tf32: bool = False  # products are in TF32, whatever the weights are in
    disturbance: Disturbance | None = None
    sizes: Literal["example"] | None = None
    products: EightBits | None = None
    stack: StackName | None = None
    loss_chunks: int = 1


def make_profile(
    model: str,
    graph: LayerGraph,
    extent: Extent,
    measured: Measurement,
    device: Device,
    facts: ModelFacts = ModelFacts(),
) -> Profile:
    """Return the profile of a model, given the times of its layers for batches of this extent."""
    whole = None
    if measured.whole is not None:
        whole = WholeStep(update_s=median(measured.whole.update_s), **_medians(measured.whole))
    alone_s = sum(layer.update.update_s for layer in measured.layers)
    # A step layer by layer pays the optimizer's overhead per layer, where a stage pays it once.
    update_share = 1.0
    if whole is not None and alone_s:
        update_share = whole.update_s / alone_s
    names = {name for name, _ in graph.model.named_parameters()}
    return Profile(
        model=model,
        graph_hash=graph.hash,
        autocast=autocast_name(graph.options.autocast),
        master_weights=autocast_name(graph.options.half),
        memory_format="channels-last" if graph.options.channels_last else None,
        compiled=measured.compiled,
        device=device,
        deterministic=facts.deterministic,
        dtype=TF32 if facts.tf32 else _dtype(graph),
        optimizer_elementwise=facts.optimizer_elementwise,
        optimizer_separable=facts.optimizer_separable,
        microbatch_size=extent if isinstance(extent, int) else extent[0],
        loss=facts.loss,
        capture_checked=facts.capture_checked,
        tokens_per_sample=facts.tokens_per_sample,
        tensor=facts.tensor,
        products=facts.products,
        stack=facts.stack,
        chunked_loss=_chunked_loss(graph, measured, facts.loss_chunks),
        layers=tuple(_layers(graph, extent, measured.layers, update_share)),
        uncut=tuple(_uncut(graph)),
        edges=tuple(
            Edge(source=edge.source, value=edge.value, target=edge.target) for edge in graph.edges
        ),
        tied_parameters=tuple(group for group in graph.tied_parameters if group[0] in names),
        whole_step=whole,
        provenance=Provenance(
            tool=f"planner {__version__}",
            torch=torch.__version__,
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            repeats=len(measured.whole.forward_s) if measured.whole is not None else None,
            source="measured" if measured.whole is not None else "estimated",
            disturbance=facts.disturbance,
            sizes=facts.sizes,
        ),
    )


def _chunked_loss(graph: LayerGraph, measured: Measurement, chunks: int) -> ChunkedLoss | None:
    """Return how training computes the loss in chunks; None where it computes it whole."""
    if chunks == 1:
        return None
    try:
        found = head_and_loss(graph)
    except UnchunkedLossError as error:
        _log.info("%s", error.message)
        return None

    return ChunkedLoss(
        chunks=chunks,
        head=graph.layers[found.first_layer].name,
        again_s=median(measured.layers[found.first_layer].times.forward_s),
    )


def _uncut(graph: LayerGraph) -> Iterator[Uncut]:
    total = sum(operations_in(graph.module, layer.nodes) for layer in graph.layers)
    for layer in graph.layers:
        if layer.cause is not None:
            operations = operations_in(graph.module, layer.nodes)
            yield Uncut(layer=layer.name, operations=operations, of=total, cause=layer.cause)


def first_uses(names: Iterable[Sequence[str]]) -> list[list[str]]:
    """Return by layer the names that no earlier layer has: what layers share counts in the first
    one that uses it.
    """
    seen: set[str] = set()
    new = []
    for layer in names:
        new.append([name for name in layer if name not in seen])
        seen.update(layer)
    return new


def last_uses(names: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return by layer the names that no later layer has: in its backward their gradients come into
    being.
    """
    return first_uses(reversed(names))[::-1]


def _layers(
    graph: LayerGraph, extent: Extent, measured: Sequence[LayerMeasurement], update_share: float
) -> Iterator[Layer]:
    tensors = {**dict(graph.model.named_parameters()), **dict(graph.model.named_buffers())}
    parameters = first_uses(layer.parameters for layer in graph.layers)
    buffers = first_uses(layer.buffers for layer in graph.layers)
    for layer, costs, own, others in zip(graph.layers, measured, parameters, buffers, strict=True):
        times = costs.times
        weights = [tensors[name] for name in own]
        update = asdict(costs.update) | {"update_s": costs.update.update_s * update_share}
        yield Layer(
            name=layer.name,
            op=layer.op,
            **_medians(times),
            forward_spread_s=_interquartile_range(times.forward_s),
            backward_spread_s=_interquartile_range(times.backward_s),
            **update,
            outputs=tuple(_outputs(graph, layer, extent)),
            weight_bytes=sum(weight.nbytes for weight in weights),
            gradient_bytes=sum(map(gradient_bytes, weights)),
            buffer_bytes=sum(tensors[name].nbytes for name in others),
            saved_bytes=costs.saved_bytes,
            workspace_bytes=costs.workspace_bytes,
            weight_share=costs.weight_share,
            forward_flops=costs.flops[0],
            backward_flops=costs.flops[1],
            parameters=layer.parameters,
        )


def _outputs(graph: LayerGraph, layer: GraphLayer, extent: Extent) -> Iterator[Value]:
    for node in layer.nodes:
        spec = graph.values.get(node.name)
        if spec is None:
            continue
        is_half = spec.dtype.itemsize != FLOAT_BYTES or graph.options.autocast is not None
        coded = spec.requires_grad and is_half
        yield Value(
            name=spec.name,
            output_bytes=spec.size_bytes(extent),
            gradient_bytes=spec.of_gradient.size_bytes(extent) if spec.requires_grad else 0,
            element_bytes=spec.dtype.itemsize if coded else None,
        )


def _medians(times: StepTimes) -> dict[str, Any]:
    # Medians, because other work on the machine interrupts some steps, and a mean would contain it.
    columns = ((name, getattr(times, name)) for name in PARTS)
    return {name: median(seconds) if seconds else None for name, seconds in columns}


def _interquartile_range(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = quantiles(values, n=4, method="inclusive")
    return high - low


def _dtype(graph: LayerGraph) -> str | None:
    """Return the dtype that most weights have."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in graph.model.parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    if not sizes:
        return None
    return str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.")
