"""vTrain's measured iterations: Megatron-DeepSpeed GPT on 64 to 512 A100."""

from __future__ import annotations

import csv
from collections.abc import Iterator

from benchmarks.gpu_truth.by_layers import transformer
from benchmarks.gpu_truth.gpt import Gpt
from benchmarks.gpu_truth.rows import ANCHORS, Row, parts, price
from planner.formats.cluster import hierarchical_cluster
from planner.formats.own_plan import OwnStage
from planner.profiler.estimated.estimate import EstimateOptions

_OPTIONS = EstimateOptions("a100-80gb", "float16", fusion="apex", master_weights=True)
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
    hidden, layers = int(record["hidden"]), int(record["layers"])
    gpt = Gpt(f"gpt-{billion:g}b", layers, hidden, int(record["heads"]), 4 * hidden, 51200, 2048, dropout=0.1)
    costs = parts(gpt, micro, _OPTIONS)
    profile = transformer(gpt.name, costs, [costs.recomputed(costs.layer)] * layers)
    cluster = hierarchical_cluster((_PER_NODE, gpus // _PER_NODE), (_NVLINK, _NODE))
    stages = [OwnStage(blocks=layers // pp, replicas=dp)] * pp
    priced = price(profile, cluster, stages, int(record["global_batch"]) // micro)
    return Row("vtrain", job, plan, measured_s, priced.predicted.seconds_per_minibatch)
