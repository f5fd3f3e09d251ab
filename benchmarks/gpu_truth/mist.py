"""Mist's measured iterations of its own plans on L4.

Its code says what ran (Dazz993/Mist: mist/modules/mha.py, mist/modules/losses.py, the
configurations of gpt2): Apex's fused softmax and Adam, and a loss in half precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.gpu_truth.by_layers import divided, layer_reduces, parts_of, transformer
from benchmarks.gpu_truth.gpt import Gpt
from benchmarks.gpu_truth.rows import (
    PCIE,
    Prediction,
    Row,
    anchors,
    device,
    half_precision,
    memory_of,
    price,
)
from planner.formats.cluster import flat_cluster
from planner.formats.own_plan import OwnStage
from planner.formats.profile import Profile
from planner.profiler.estimated.devices import DeviceSpec

# MHz: Mist's README sets the L4's clock (`nvidia-smi -ac 6251,1050`); the data sheet's boost
PINNED = 1050 / 2040


def rows() -> Iterator[Row]:
    """Yield the measured ones of Mist's own plans."""
    for config in anchors("mist.json")["configs"]:
        if config["measured_iteration_s"] is not None:
            yield _row(config)


def _row(config: Mapping[str, Any]) -> Row:
    model, stages = config["model"], config["stages"]
    job = f"{model['name']}, {config['gpus']} {config['gpu']}, batch {config['global_batch']}"
    replicas = ",".join(str(stage["dp"]) for stage in stages)
    plan = f"{len(stages)} stages x{replicas}{', flash' if model['flash_attention'] else ''}"
    if needs := needs_of(stages):
        return Row("mist", job, plan, config["measured_iteration_s"], needs=needs)
    return Row(
        "mist",
        job,
        plan,
        config["measured_iteration_s"],
        partial(_predict, config),
        spec=device("l4", PINNED),
    )


def _predict(config: Mapping[str, Any], spec: DeviceSpec) -> Prediction:
    stages = config["stages"]
    cluster = flat_cluster(sum(stage["dp"] for stage in stages), PCIE)
    microbatches = config["global_batch"] // stages[0]["microbatch"]
    priced = price(
        profile_of(config, stages[0]["microbatch"], spec), cluster, own_stages(stages), microbatches
    )
    memory = memory_of(priced, config["measured_stage_peak_allocated_mb"])
    return Prediction(priced.predicted.seconds_per_minibatch, memory)


def profile_of(config: Mapping[str, Any], microbatch_size: int, spec: DeviceSpec) -> Profile:
    """Return the estimated profile of the configuration's model, by blocks, also divided over the
    ranks of a stage.
    """
    whole = _profile_of(config, microbatch_size, spec)
    degree = max(stage["tp"] for stage in config["stages"])
    if degree == 1:
        return whole
    part = _profile_of(config, microbatch_size, spec, degree)
    return divided(whole, {degree: part}, layer_reduces(config["model"]["layers"], again=False))


def _profile_of(
    config: Mapping[str, Any], microbatch_size: int, spec: DeviceSpec, tensor: int = 1
) -> Profile:
    model = config["model"]
    sizes = {
        name: model[name]
        for name in ("name", "layers", "hidden", "heads", "ffn", "vocab", "seq", "biases")
    }
    gpt = Gpt(
        **sizes,
        gated=model["gated_mlp"],
        flash=model["flash_attention"],
        half_loss=True,
        tensor=tensor,
    )
    costs = parts_of(gpt, microbatch_size, half_precision(), spec)
    return transformer(gpt.name, costs, [costs.layer] * gpt.layers)


def own_stages(stages: Sequence[Mapping[str, Any]]) -> list[OwnStage]:
    """Return the stages as `plan price` takes them; a layer that recomputes is a unit."""
    return [
        OwnStage(
            blocks=stage["layers"],
            replicas=stage["dp"],
            tensor=stage["tp"],
            sharded=stage["dp"] > 1 and stage["zero_level"] > 0,
            recompute=stage["recomputed_layers"] or False,
        )
        for stage in stages
    ]


def needs_of(stages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return what the planner lacks for these stages."""
    needs = {
        "sharded gradients or weights": any(
            stage["zero_level"] > 1 and stage["dp"] > 1 for stage in stages
        ),
        "offload": any(any(stage["offload"].values()) for stage in stages),
    }
    return tuple(name for name, needed in needs.items() if needed)
