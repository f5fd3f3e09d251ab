"""Mist's measured iterations of its own plans on L4."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.gpu_truth.by_layers import transformer
from benchmarks.gpu_truth.gpt import Gpt
from benchmarks.gpu_truth.rows import PCIE, Row, anchors, half_precision, memory_of, parts, price
from planner.formats.cluster import flat_cluster
from planner.formats.own_plan import OwnStage
from planner.formats.profile import Layer


def rows() -> Iterator[Row]:
    """Yield the measured ones of Mist's own plans."""
    for config in anchors("mist.json")["configs"]:
        if config["measured_iteration_s"] is not None:
            yield _mist_row(config)


def _mist_row(config: Mapping[str, Any]) -> Row:
    model, stages = config["model"], config["stages"]
    job = f"{model['name']}, {config['gpus']} {config['gpu']}, batch {config['global_batch']}"
    replicas = [stage["dp"] for stage in stages]
    plan = f"{len(stages)} stages x{','.join(map(str, replicas))}{', flash' if model['flash_attention'] else ''}"
    needs = _needs_of(stages)
    if needs:
        return Row("mist", job, plan, config["measured_iteration_s"], needs=needs)
    gpt = Gpt(
        model["name"],
        model["layers"],
        model["hidden"],
        model["heads"],
        model["ffn"],
        model["vocab"],
        model["seq"],
        biases=model["biases"],
        flash=model["flash_attention"],
    )
    costs = parts(gpt, stages[0]["microbatch"], half_precision("l4"))
    each: list[Layer] = []
    for stage in stages:
        again = stage["recomputed_layers"]
        each += [costs.recomputed(costs.layer)] * again + [costs.layer] * (stage["layers"] - again)
    own = [OwnStage(blocks=stage["layers"], replicas=stage["dp"]) for stage in stages]
    microbatches = config["global_batch"] // stages[0]["microbatch"]
    priced = price(transformer(gpt.name, costs, each), flat_cluster(sum(replicas), PCIE), own, microbatches)
    memory = memory_of(priced, config["measured_stage_peak_allocated_mb"])
    seconds = priced.predicted.seconds_per_minibatch
    return Row("mist", job, plan, config["measured_iteration_s"], seconds, memory=memory)


def _needs_of(stages: list[Mapping[str, Any]]) -> tuple[str, ...]:
    needs = {
        "tensor parallelism": any(stage["tp"] > 1 for stage in stages),
        "sharded optimizer": any(stage["zero_level"] and stage["dp"] > 1 for stage in stages),
        "offload": any(any(stage["offload"].values()) for stage in stages),
    }
    return tuple(name for name, needed in needs.items() if needed)
