"""NVIDIA's measured iterations of its recipes for H100: Llama 3.1 and Nemotron-4 in bfloat16.

The source is NVIDIA/dgxc-benchmarking (MIT), version 25.05: the tables of `llama3.1/README.md` and
`nemotron/README.md`, and what their recipes set. They are NeMo with Megatron-Core and Transformer
Engine: fused kernels, attention by cuDNN, sequence parallelism, a divided optimizer whose
collectives overlap, interleaved stages. Ranks that divide the context have a part of the tokens of
a sample, and of its attention: all that a layer does is divided by them here, and what they
exchange for it is taken to hide behind the attention.

Each GPU's work is the same on any number of GPUs, and so are the measured seconds, within 0.5% (8
to 128, 64 to 2,048, and 512 to 2,048 GPUs), so the fewest stand for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.gpu_truth.by_layers import (
    Parts,
    divided,
    in_sequence,
    parts_of,
    summed,
    transformer,
)
from benchmarks.gpu_truth.gpt import Gpt
from benchmarks.gpu_truth.rows import Prediction, Row, device, half_precision, price
from planner.formats.cluster import hierarchical_cluster
from planner.formats.own_plan import OwnStage
from planner.formats.profile import Layer
from planner.profiler.estimated.devices import DEVICES, DeviceSpec

PER_SERVER = 8
# bytes per second of a server: eight links of 400 Gbit/s, as NVIDIA's reference architecture
BETWEEN = 8 * 50e9
_LLAMA = {
    "vocab": 128256,
    "seq": 8192,
    "biases": False,
    "gated": True,
    "flash": True,
    "key_heads": 8,
}
_NEMOTRON = {"vocab": 256000, "seq": 4096, "biases": False, "flash": True, "key_heads": 8}


@dataclass(frozen=True)
class Recipe:
    """How a model is trained on the fewest GPUs, and the measured seconds of an iteration.

    Attributes:
        gpt: the model.
        tensor, pipeline, context, chunks: ranks that divide layers, stages, ranks that divide
        tokens, chunks of a rank. samples, microbatches: of a microbatch, and of each replica. gpus,
        seconds: how many there were, and how long an iteration took.
    """

    gpt: Gpt
    tensor: int
    pipeline: int
    context: int
    chunks: int
    samples: int
    microbatches: int
    gpus: int
    seconds: float


RECIPES = (
    Recipe(
        Gpt("Llama 3.1 8B", 32, 4096, 32, 14336, **_LLAMA),  # type: ignore[arg-type]
        *(1, 1, 2, 1, 1, 32, 8, 12.27),
    ),
    Recipe(
        Gpt("Llama 3.1 70B", 80, 8192, 64, 28672, **_LLAMA),  # type: ignore[arg-type]
        *(4, 4, 2, 5, 1, 64, 64, 14.66),
    ),
    Recipe(
        Gpt("Llama 3.1 405B", 126, 16384, 128, 53248, **_LLAMA),  # type: ignore[arg-type]
        *(8, 8, 2, 8, 1, 64, 512, 19.78),
    ),
    Recipe(
        Gpt("Nemotron-4 15B", 32, 6144, 48, 24576, **_NEMOTRON),  # type: ignore[arg-type]
        *(2, 1, 1, 1, 2, 4, 16, 2.746),
    ),
    Recipe(
        Gpt("Nemotron-4 340B", 96, 18432, 96, 73728, **_NEMOTRON),  # type: ignore[arg-type]
        *(8, 8, 1, 12, 1, 16, 256, 4.606),
    ),
)


def rows() -> Iterator[Row]:
    """Yield all rows."""
    for recipe in RECIPES:
        gpt, chunks = recipe.gpt, f"x{recipe.chunks}" if recipe.chunks > 1 else ""
        plan = (
            f"pp {recipe.pipeline}{chunks}, tp {recipe.tensor}, cp {recipe.context}, "
            f"microbatch {recipe.samples}"
        )
        job = f"{gpt.name}, {recipe.gpus} H100, {gpt.seq} tokens"
        yield Row("dgxc", job, plan, recipe.seconds, partial(_predict, recipe), spec=_h100())


def _h100() -> DeviceSpec:
    """Return an H100 with the attention of cuDNN, which reaches what PyTorch's does on the H200,
    its sibling.
    """
    spec, attention = device("h100"), DEVICES["h200"].achieved_arithmetic["attention"]
    return replace(spec, achieved_arithmetic={**spec.achieved_arithmetic, "attention": attention})


def _predict(recipe: Recipe, spec: DeviceSpec) -> Prediction:
    gpt, gpus, tensor = recipe.gpt, recipe.gpus, recipe.tensor
    degrees = sorted({1, tensor})
    ranks = [
        of_tokens(
            parts_of(replace(gpt, tensor=t), recipe.samples, half_precision(), spec, "bfloat16"),
            recipe.context,
        )
        for t in degrees
    ]
    ranks[1:] = [
        in_sequence(ranks[0], rank, t) for rank, t in zip(ranks[1:], degrees[1:], strict=True)
    ]
    whole, *parts = (transformer(gpt.name, costs, [costs.layer] * gpt.layers) for costs in ranks)
    # those of layers hide behind their products
    reduces = (1, *(0,) * gpt.layers, 0), (0, *(0,) * gpt.layers, 1)
    profile = divided(whole, dict(zip(degrees[1:], parts, strict=True)), reduces)
    replicas = gpus // (tensor * recipe.pipeline)
    cluster = hierarchical_cluster((PER_SERVER, gpus // PER_SERVER), ("nvlink4", BETWEEN))
    stages = [
        OwnStage(blocks=blocks, replicas=replicas, tensor=tensor, sharded=replicas > 1)
        for blocks in blocks_of(gpt.layers, recipe.pipeline * recipe.chunks)
    ]
    chunks = recipe.chunks if recipe.chunks > 1 else None
    priced = price(profile, cluster, stages, recipe.microbatches * replicas, chunks)
    return Prediction(priced.predicted.seconds_per_minibatch)


def blocks_of(layers: int, stages: int) -> Sequence[int]:
    """Return the layers of each stage; where they do not divide evenly, embedding and head count as
    one each.
    """
    if layers % stages == 0:
        return [layers // stages] * stages
    each = (layers + 2) // stages
    return [each - 1, *[each] * (stages - 2), each - 1]


def of_tokens(parts: Parts, ranks: int) -> Parts:
    """Return what one of several ranks does that divide the tokens of a sample; weights are whole
    on each.
    """
    if ranks == 1:
        return parts
    operators, head_operators = (
        tuple(_shared(layer, ranks) for layer in layers)
        for layers in (parts.operators, parts.head_operators)
    )
    return replace(
        parts,
        embedding=_shared(parts.embedding, ranks),
        layer=summed("layer", operators),
        operators=operators,
        head_operators=head_operators,
        head=summed("head", head_operators),
        boundary_bytes=parts.boundary_bytes // ranks,
    )


def _shared(layer: Layer, ranks: int) -> Layer:
    seconds = {name: getattr(layer, name) / ranks for name in ("forward_s", "backward_s")}
    sizes = {name: getattr(layer, name) // ranks for name in ("saved_bytes", "workspace_bytes")}
    return layer.model_copy(update={**seconds, **sizes})
