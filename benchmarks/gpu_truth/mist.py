"""Mist's measured iterations: its own plans, and Aceso's and Megatron's, on L4 and A10G."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from benchmarks.gpu_truth.by_layers import Parts, chain, divided, summed
from benchmarks.gpu_truth.gpt import Gpt
from benchmarks.gpu_truth.rows import Row, Stages, anchors, parts, price
from planner.formats.cluster import flat_cluster
from planner.formats.profile import Layer
from planner.profiler.estimated.devices import DEVICES
from planner.profiler.estimated.estimate import EstimateOptions
from planner.profiler.estimated.execution import Fusion
from planner.solver.result import Evaluation

_DEVICES = {"L4-24GB": "l4", "A10G-24GB": "a10g", "A100-SXM4-40GB": "a100"}
_L4_CLOCK = 1050 / 2040  # MHz: README of the anchors, and the data sheet's boost
_PCIE = 4e9  # README of the anchors: 3 to 5 GB/s
# Aceso's operators in each captured operation of a layer: softmax has its dropout, and the first product its GELU.
_OPERATORS = (1, 1, 1, 2, 1, 1, 1, 1, 2, 1, 1)
_HEAD = 2  # operators: the norm and the classifier, with the loss
_MB = 2**20


def mist_rows() -> Iterator[Row]:
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
    costs = parts(gpt, stages[0]["microbatch"], _options(config["gpu"]))
    each: list[Layer] = [costs.embedding]
    for stage in stages:
        again = stage["recomputed_layers"]
        each += [costs.recomputed(costs.layer)] * again + [costs.layer] * (stage["layers"] - again)
    each.append(costs.head)
    counts = [stage["layers"] for stage in stages]
    counts[0] += 1
    counts[-1] += 1
    evaluation = price(
        chain(gpt.name, costs, each),
        flat_cluster(sum(replicas), _PCIE),
        Stages(counts, replicas),
        config["global_batch"] // stages[0]["microbatch"],
    )
    memory = _memory(evaluation, config["measured_stage_peak_allocated_mb"])
    return Row("mist", job, plan, config["measured_iteration_s"], evaluation.seconds, memory=memory)


def _options(gpu: str, fusion: Fusion | None = None) -> EstimateOptions:
    device = DEVICES[_DEVICES[gpu]].at_clock(_L4_CLOCK if gpu == "L4-24GB" else 1.0)
    return EstimateOptions(device, "float16", fusion=fusion, master_weights=True)


def _needs_of(stages: list[Mapping[str, Any]]) -> tuple[str, ...]:
    needs = {
        "tensor parallelism": any(stage["tp"] > 1 for stage in stages),
        "sharded optimizer": any(stage["zero_level"] and stage["dp"] > 1 for stage in stages),
        "offload": any(any(stage["offload"].values()) for stage in stages),
    }
    return tuple(name for name, needed in needs.items() if needed)


def _memory(evaluation: Evaluation, peaks_mb: list[float] | None) -> tuple[tuple[float, float], ...]:
    """Pair the stages' predicted bytes with those of the allocator's peak, where it was logged."""
    predicted = evaluation.price.gpu_bytes
    pairs = zip(predicted, peaks_mb or (), strict=False)
    return tuple((ours, theirs * _MB) for ours, theirs in pairs if theirs is not None)


def aceso_rows() -> Iterator[Row]:
    """Yield all of Aceso's and Megatron's runs; those with tensor parallelism have no prediction.

    Between its scores and their dropout Aceso has one operator, Megatron's fused scale, mask and softmax.
    """
    for run in anchors("mist-aceso-runs.json"):
        yield _aceso_row(run)


def _aceso_row(run: Mapping[str, Any]) -> Row:
    model, stages = run["model"], run["stages"]
    job = f"GPT {model['size']}, {run['total_gpus']} {run['gpu']}, batch {run['global_batch']}"
    plan = f"{len(stages)} stages, microbatch {run['micro_batch']}"
    source, measured_s = f"aceso {_DEVICES[run['gpu']]}", run["measured_iteration_ms"] / 1e3
    if any(tp > 1 for stage in stages for tp, _ in stage["tp_runs"]):
        return Row(source, job, plan, measured_s, needs=("tensor parallelism",))
    hidden, layers = model["hidden"], model["layers"]
    gpt = Gpt(f"gpt-{model['size']}", layers, hidden, model["heads"], 4 * hidden, 50432, model["seq"], dropout=0.1)
    costs = parts(gpt, run["micro_batch"], _options(run["gpu"], "apex"))
    stage_layers = _merged(costs, stages, layers)
    replicas = [stage["dp_runs"][0][0] for stage in stages]
    evaluation = price(
        chain(gpt.name, costs, stage_layers),
        flat_cluster(sum(replicas), _PCIE),
        Stages([1] * len(stages), replicas),
        run["global_batch"] // run["micro_batch"],
    )
    memory = _memory(evaluation, [stage.get("peak_allocated_mb") for stage in stages])
    return Row(source, job, plan, measured_s, evaluation.seconds, memory=memory)


def _merged(costs: Parts, stages: Sequence[Mapping[str, Any]], layers: int) -> list[Layer]:
    """Return a profile's layer for each stage, because stages begin and end within transformer layers.

    The logs say how many operators of a stage run again, not which: each is taken to run again in part.
    """
    in_layer = [
        part for layer, count in zip(costs.operators, _OPERATORS, strict=True) for part in divided(layer, count)
    ]
    operators = iter([costs.embedding, *in_layer * layers, *divided(costs.head, _HEAD)])
    merged = []
    for stage in stages:
        share = stage["recomputed_ops"] / stage["ops"]
        own = list(islice(operators, stage["ops"]))
        merged.append(summed("stage", [costs.recomputed(layer, share) for layer in own]))
    return merged
