"""vTrain's measured iterations: Megatron-DeepSpeed GPT on 64 to 512 A100."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import partial

from benchmarks.gpu_truth.by_layers import parts_of, transformer
from benchmarks.gpu_truth.gpt import Gpt
from benchmarks.gpu_truth.rows import ANCHORS, Prediction, Row, device, half_precision, price
from planner.formats.cluster import hierarchical_cluster
from planner.formats.own_plan import OwnStage
from planner.profiler.estimated.devices import DeviceSpec

_PER_NODE = 8
_NVLINK = 300e9  # data sheet: NVLink 3, 600 GB/s both ways
_NODE = 100e9  # README of the anchors: 800 Gbit/s


def rows() -> Iterator[Row]:
    """Yield all rows; those with tensor parallelism have no prediction."""
    with (ANCHORS / "vtrain-multi.csv").open(encoding="utf-8") as file:
        for record in csv.DictReader(file):
            yield _row({name: float(value) for name, value in record.items()})


def _row(record: dict[str, float]) -> Row:
    gpus, micro, tp, dp, pp = (int(record[name]) for name in ("gpus", "micro_batch", "tp", "dp", "pp"))
    billion, measured_s = record["params_billion"], record["measured_ms"] / 1e3
    job = f"GPT {billion:g}B, {gpus} GPUs"
    plan = f"pp {pp}, dp {dp}, tp {tp}, microbatch {micro}"
    if tp > 1:
        return Row("vtrain", job, plan, measured_s, needs=("tensor parallelism",))
    return Row("vtrain", job, plan, measured_s, partial(_predict, record), spec=device("a100-80gb"))


def _predict(record: dict[str, float], spec: DeviceSpec) -> Prediction:
    micro, dp, pp, hidden, layers = (int(record[name]) for name in ("micro_batch", "dp", "pp", "hidden", "layers"))
    gpt = Gpt("gpt", layers, hidden, int(record["heads"]), 4 * hidden, 51200, 2048, dropout=0.1)
    costs = parts_of(gpt, micro, half_precision("apex"), spec)
    # Not as units of stages, because the head, which belongs to the last one, does not run again.
    profile = transformer(gpt.name, costs, [costs.recomputed(costs.layer)] * layers)
    cluster = hierarchical_cluster((_PER_NODE, int(record["gpus"]) // _PER_NODE), (_NVLINK, _NODE))
    stages = [OwnStage(blocks=layers // pp, replicas=dp)] * pp
    priced = price(profile, cluster, stages, int(record["global_batch"]) // micro)
    return Prediction(priced.predicted.seconds_per_minibatch)
