"""vTrain's measured iterations: Megatron-DeepSpeed GPT on 64 to 512 A100."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import partial

from benchmarks.gpu_truth.by_layers import divided, layer_reduces, parts_of, transformer
from benchmarks.gpu_truth.gpt import Gpt
from benchmarks.gpu_truth.rows import (
    ANCHORS,
    Prediction,
    Row,
    device,
    half_precision,
    price,
    reducing,
    servers,
    without_overlap,
)
from planner.formats.own_plan import OwnStage
from planner.formats.profile import Profile
from planner.profiler.estimated.devices import DeviceSpec

NODE = 100e9  # README of the anchors: 800 Gbit/s


def rows() -> Iterator[Row]:
    """Yield all rows."""
    return map(_row, records())


def records() -> Iterator[dict[str, float]]:
    """Yield what the rows are made of."""
    with (ANCHORS / "vtrain-multi.csv").open(encoding="utf-8") as file:
        for record in csv.DictReader(file):
            yield {name: float(value) for name, value in record.items()}


def _row(record: dict[str, float]) -> Row:
    gpus, micro, tp, dp, pp = (
        int(record[name]) for name in ("gpus", "micro_batch", "tp", "dp", "pp")
    )
    billion, measured_s = record["params_billion"], record["measured_ms"] / 1e3
    job = f"GPT {billion:g}B, {gpus} GPUs"
    plan = f"pp {pp}, dp {dp}, tp {tp}, microbatch {micro}"
    return Row("vtrain", job, plan, measured_s, partial(_predict, record), spec=device("a100-80gb"))


def _predict(record: dict[str, float], spec: DeviceSpec) -> Prediction:
    micro, tp, dp, pp, layers = (
        int(record[name]) for name in ("micro_batch", "tp", "dp", "pp", "layers")
    )
    profile, cluster = _profile(record, spec), servers(int(record["gpus"]), NODE)
    if tp > 1:
        profile = divided(
            profile, {tp: _profile(record, spec, tp)}, layer_reduces(layers, again=True)
        )
        cluster = reducing(cluster, tp, profile.layers[0].outputs[0].output_bytes)
    stages = [OwnStage(blocks=layers // pp, replicas=dp, tensor=tp)] * pp
    return Prediction(
        without_overlap(price(profile, cluster, stages, int(record["global_batch"]) // micro))
    )


def _profile(record: dict[str, float], spec: DeviceSpec, tensor: int = 1) -> Profile:
    micro, hidden, layers = (int(record[name]) for name in ("micro_batch", "hidden", "layers"))
    gpt = Gpt(
        "gpt",
        layers,
        hidden,
        int(record["heads"]),
        4 * hidden,
        51200,
        2048,
        dropout=0.1,
        tensor=tensor,
    )
    costs = parts_of(gpt, micro, half_precision(), spec)
    # Not as units of stages, because the head, which belongs to the last one, does not run again.
    return transformer(gpt.name, costs, [costs.recomputed(costs.layer)] * layers)
