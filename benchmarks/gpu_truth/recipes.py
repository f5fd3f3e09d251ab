"""Published iterations in FP8 and MXFP8 of dense models, by NVIDIA's recipes.

    python -m benchmarks.gpu_truth --source recipes

The rows are those of `megatron-bridge.csv` (NVIDIA-NeMo/Megatron-Bridge 067f987, Apache-2.0) and
`nemo-launcher-h100-fp8.csv` (NVIDIA/NeMo-Framework-Launcher 26e42fa, Apache-2.0) whose models are
described there. They are priced as `dgxc.py` prices NVIDIA's recipes in bfloat16: Megatron's fused
kernels, attention by cuDNN, collectives of divided layers that hide behind products. Products of
linear layers are in 8 bits (`planner.profiler.estimated.eight_bits`). No constant was fitted to
these rows.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.gpu_truth.by_layers import divided, in_sequence, parts_of, transformer
from benchmarks.gpu_truth.dgxc import BETWEEN, PER_SERVER, blocks_of, of_tokens
from benchmarks.gpu_truth.gpt import Gpt
from benchmarks.gpu_truth.rows import ANCHORS, Prediction, Row, device, half_precision, price
from planner.formats.cluster import Cluster, flat_cluster, hierarchical_cluster
from planner.formats.names import EightBits
from planner.formats.own_plan import OwnStage
from planner.profiler.estimated.devices import DeviceSpec, parse_precision
from planner.profiler.estimated.eight_bits import eight_bit_products
from planner.profiler.estimated.stacks import MEGATRON

_GPUS = {
    "DGX-H100": "h100",
    "DGX-B200": "b200",
    "DGX-GB200": "gb200",
    "H100-80GB SXM": "h100",
}
_ONE_SWITCH = ("gb200",)  # all GPUs of these rows
_LINKS = {"h100": "nvlink4", "b200": "nvlink5", "gb200": "nvlink5"}


@dataclass(frozen=True)
class Recipe:
    """How a model is trained, and the measured seconds of an iteration.

    Attributes:
        gpt: the model.
        gpu, gpus: the kind, by the name of the table of devices, and how many.
        precision: of the products.
        tensor, pipeline, context, chunks, replicas: ranks that divide layers, stages, ranks that
            divide tokens, chunks of a rank, and replicas.
        samples, microbatches: of a microbatch, and of each replica.
        sharded: whether replicas divide the weights (FSDP).
        again: layers that recompute.
        seconds: of an iteration.
    """

    gpt: Gpt
    gpu: str
    gpus: int
    precision: EightBits
    tensor: int
    pipeline: int
    context: int
    chunks: int
    replicas: int
    samples: int
    microbatches: int
    sharded: bool
    again: int
    seconds: float

    @property
    def plan(self) -> str:
        """In words."""
        words = [f"pp {self.pipeline}", f"tp {self.tensor}", f"cp {self.context}"]
        words += [f"vp {self.chunks}", f"dp {self.replicas}", f"microbatch {self.samples}"]
        return ", ".join([*words, *(["FSDP"] if self.sharded else [])])

    @property
    def cluster(self) -> Cluster:
        """The servers, or the one switch that joins all GPUs."""
        if self.gpu in _ONE_SWITCH or self.gpus <= PER_SERVER:
            return flat_cluster(self.gpus, _LINKS[self.gpu])
        sizes = PER_SERVER, self.gpus // PER_SERVER
        return hierarchical_cluster(sizes, (_LINKS[self.gpu], BETWEEN))


def rows() -> Iterator[Row]:
    """Yield all rows."""
    for recipe in recipes():
        job = f"{recipe.gpt.name}, {recipe.gpus} {recipe.gpu}, {recipe.precision}"
        spec = MEGATRON.on(device(recipe.gpu))
        predict = partial(_predict, recipe)
        yield Row("recipes", job, recipe.plan, recipe.seconds, predict, spec=spec)


def recipes() -> Iterator[Recipe]:
    """Yield the recipes of both files that the planner can express."""
    for name in ("megatron-bridge.csv", "nemo-launcher-h100-fp8.csv"):
        with (ANCHORS / name).open(encoding="utf-8") as file:
            for record in csv.DictReader(file):
                if (recipe := _recipe(record)) is not None:
                    yield recipe


def _predict(recipe: Recipe, spec: DeviceSpec) -> Prediction:
    return Prediction(predicted_s(recipe, spec))


def _recipe(record: dict[str, str]) -> Recipe | None:
    system = record.get("system") or record["gpu"]
    if system not in _GPUS or record["precision"] not in ("FP8", "MXFP8"):
        return None
    if record.get("experts_inferred") or not record["layers_inferred"]:
        return None
    if record.get("host_offload_inferred") or "lora" in record["task"].lower():
        return None
    number = {name: int(record[name]) for name in ("gpus", "tp", "pp", "cp", "dp", "micro_batch")}
    sharded = record.get("zero_level_inferred") == "3"
    again = 5 if record["recompute"] == "full on 5 layers" else 0
    return Recipe(
        gpt=_gpt(record),
        gpu=_GPUS[system],
        gpus=number["gpus"],
        precision=parse_precision(record["precision"]),
        tensor=number["tp"],
        pipeline=number["pp"],
        context=number["cp"],
        chunks=int(record.get("vp") or record.get("vp_inferred") or 1),
        replicas=number["dp"],
        samples=number["micro_batch"],
        microbatches=int(record["global_batch"]) // (number["dp"] * number["micro_batch"]),
        sharded=sharded,
        again=again,
        seconds=float(record["measured_iteration_seconds_inferred"]),
    )


def _gpt(record: dict[str, str]) -> Gpt:
    heads, keys = int(record["attention_heads_inferred"]), int(record["kv_heads_inferred"])
    name = record["model"]
    return Gpt(
        name,
        layers=int(record["layers_inferred"]),
        hidden=int(record["hidden_size_inferred"]),
        heads=heads,
        ffn=int(record.get("ffn_size_dense_inferred") or record["ffn_size_inferred"]),
        vocab=int(record["vocabulary_inferred"]),
        seq=int(record["sequence_length"]),
        biases=name.startswith("GPT3"),
        gated=name.startswith("LLAMA"),
        flash=True,
        key_heads=None if keys == heads else keys,
    )


def predicted_s(recipe: Recipe, spec: DeviceSpec) -> float:
    """Return the seconds of an iteration, as estimated and simulated."""
    gpt, tensor = recipe.gpt, recipe.tensor
    degrees = sorted({1, tensor})
    how = replace(half_precision(), eight_bits=eight_bit_products(recipe.precision, [spec]))
    ranks = [
        of_tokens(
            parts_of(replace(gpt, tensor=degree), recipe.samples, how, spec, "bfloat16"),
            recipe.context,
        )
        for degree in degrees
    ]
    ranks[1:] = [
        in_sequence(ranks[0], rank, t) for rank, t in zip(ranks[1:], degrees[1:], strict=True)
    ]
    whole, *parts = (transformer(gpt.name, costs, [costs.layer] * gpt.layers) for costs in ranks)
    # those of layers hide behind their products
    reduces = (1, *(0,) * gpt.layers, 0), (0, *(0,) * gpt.layers, 1)
    profile = divided(whole, dict(zip(degrees[1:], parts, strict=True)), reduces)
    replicas = recipe.replicas * recipe.context
    stages = [
        OwnStage(
            blocks=blocks,
            replicas=replicas,
            tensor=tensor,
            sharded=replicas > 1,
            sharding_level=3 if recipe.sharded else 1,
            recompute=recipe.again or False,
        )
        for blocks in blocks_of(gpt.layers, recipe.pipeline * recipe.chunks)
    ]
    chunks = recipe.chunks if recipe.chunks > 1 else None
    microbatches = recipe.microbatches * replicas
    priced = price(profile, recipe.cluster, stages, microbatches, chunks)
    return priced.predicted.seconds_per_minibatch
