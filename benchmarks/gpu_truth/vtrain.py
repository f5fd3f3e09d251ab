"""vTrain's measured iterations: Megatron-DeepSpeed GPT on 64 to 512 A100."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import cache, partial

import numpy as np

from benchmarks.gpu_truth.by_layers import divided, parts_of, transformer
from benchmarks.gpu_truth.gpt import Gpt
from benchmarks.gpu_truth.rows import ANCHORS, Prediction, Row, device, half_precision, price
from planner.formats.cluster import hierarchical_cluster
from planner.formats.own_plan import OwnStage
from planner.formats.profile import Profile
from planner.profiler.estimated.devices import DeviceSpec

_PER_NODE = 8
_NVLINK = 300e9  # data sheet: NVLink 3, 600 GB/s both ways
_NODE = 100e9  # README of the anchors: 800 Gbit/s


def rows() -> Iterator[Row]:
    """Yield all rows."""
    with (ANCHORS / "vtrain-multi.csv").open(encoding="utf-8") as file:
        for record in csv.DictReader(file):
            yield _row({name: float(value) for name, value in record.items()})


def _row(record: dict[str, float]) -> Row:
    gpus, micro, tp, dp, pp = (int(record[name]) for name in ("gpus", "micro_batch", "tp", "dp", "pp"))
    billion, measured_s = record["params_billion"], record["measured_ms"] / 1e3
    job = f"GPT {billion:g}B, {gpus} GPUs"
    plan = f"pp {pp}, dp {dp}, tp {tp}, microbatch {micro}"
    return Row("vtrain", job, plan, measured_s, partial(_predict, record), spec=device("a100-80gb"))


def _predict(record: dict[str, float], spec: DeviceSpec) -> Prediction:
    micro, tp, dp, pp, layers = (int(record[name]) for name in ("micro_batch", "tp", "dp", "pp", "layers"))
    cluster = hierarchical_cluster((_PER_NODE, int(record["gpus"]) // _PER_NODE), (_NVLINK, _NODE))
    profile = _profile(record, spec)
    if tp > 1:
        state_bytes = micro * int(record["seq"]) * int(record["hidden"]) * 2
        profile = divided(profile, tp, _profile(record, spec, tp), state_bytes, again=True)
        inner, outer = cluster.levels
        inner = inner.model_copy(update={"all_reduce_bandwidth_bytes_per_s": _reduced_bytes_per_s(tp, state_bytes)})
        cluster = cluster.model_copy(update={"levels": (inner, outer)})
    stages = [OwnStage(blocks=layers // pp, replicas=dp, tensor=tp)] * pp
    priced = price(profile, cluster, stages, int(record["global_batch"]) // micro)
    return Prediction(priced.predicted.seconds_per_minibatch)


def _profile(record: dict[str, float], spec: DeviceSpec, tensor: int = 1) -> Profile:
    micro, hidden, layers = (int(record[name]) for name in ("micro_batch", "hidden", "layers"))
    gpt = Gpt("gpt", layers, hidden, int(record["heads"]), 4 * hidden, 51200, 2048, dropout=0.1, tensor=tensor)
    costs = parts_of(gpt, micro, half_precision("apex"), spec)
    # Not as units of stages, because the head, which belongs to the last one, does not run again.
    return transformer(gpt.name, costs, [costs.recomputed(costs.layer)] * layers)


@cache
def _all_reduces() -> dict[int, list[tuple[float, float]]]:
    """Measured all-reduces on one node: by GPUs, bytes and the bandwidth of each GPU's link."""
    found: dict[int, list[tuple[float, float]]] = {}
    with (ANCHORS / "vtrain-a100-allreduce.csv").open(encoding="utf-8") as file:
        for record in csv.DictReader(file):
            row = float(record["bytes"]), float(record["bus_GB_per_s"]) * 1e9
            found.setdefault(int(record["gpus"]), []).append(row)
    return found


def _reduced_bytes_per_s(ranks: int, size_bytes: float) -> float:
    """Return the bandwidth of an all-reduce of so many ranks, as it was measured in all-reduces of about this size."""
    sizes, rates = zip(*_all_reduces()[min(ranks, _PER_NODE)], strict=True)
    return float(np.interp(np.log(size_bytes), np.log(sizes), rates))
