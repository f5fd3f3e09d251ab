"""AMP's runs of GPT-2 of 345 million parameters on 16 T4, four to a server, by DeepSpeed.

Estimated by shapes: weights in half precision, gradients summed in single, nothing recomputed or
sharded. GPUs of such a server do not reach each other directly.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import partial

from benchmarks.gpu_truth.by_layers import divided, layer_reduces, parts_of, transformer
from benchmarks.gpu_truth.gpt import Gpt
from benchmarks.gpu_truth.rows import (
    ANCHORS,
    PCIE,
    Prediction,
    Row,
    device,
    price,
    unfused,
    without_overlap,
)
from planner.formats.cluster import hierarchical_cluster
from planner.formats.own_plan import OwnStage
from planner.formats.profile import Profile
from planner.profiler.estimated.devices import DeviceSpec

_SERVERS, _PER_SERVER = 4, 4
_BLOCKS = 24

Record = dict[str, str]


def rows() -> Iterator[Row]:
    """Yield the rows that were measured, on 16 T4."""
    with (ANCHORS / "amp-mixed-cluster.csv").open(encoding="utf-8") as file:
        for record in csv.DictReader(file):
            if record["job"] == "homogeneous" and record["outcome"] == "ok":
                yield _row(record)


def _row(record: Record) -> Row:
    tp, dp, pp, micro = (record[name] for name in ("tp", "dp", "pp", "micro_batch"))
    return Row(
        "amp",
        f"GPT-2 345M, 16 T4, batch {record['global_batch']}",
        f"pp {pp}, dp {dp}, tp {tp}, microbatch {micro}",
        float(record["measured_iteration_seconds"]),
        partial(_predict, record),
        spec=device("t4"),
    )


def _predict(record: Record, spec: DeviceSpec) -> Prediction:
    tp, dp = int(record["tp"]), int(record["dp"])
    profile = _profile(record, spec)
    if tp > 1:
        part = _profile(record, spec, tp)
        profile = divided(profile, {tp: part}, layer_reduces(_BLOCKS, again=False))
    between = float(record["inter_server_bits_per_s_assumed_by_authors"]) / 8
    cluster = hierarchical_cluster((_PER_SERVER, _SERVERS), (PCIE, between))
    stages = [OwnStage(blocks=count, replicas=dp, tensor=tp) for count in _blocks(record)]
    microbatches = int(record["microbatches_per_replica"]) * dp
    return Prediction(without_overlap(price(profile, cluster, stages, microbatches)))


def _blocks(record: Record) -> list[int]:
    return [int(count) for count in record["blocks_per_stage"].split()]


def _profile(record: Record, spec: DeviceSpec, tensor: int = 1) -> Profile:
    gpt = Gpt(
        "gpt",
        _BLOCKS,
        int(record["hidden_size"]),
        int(record["attention_heads"]),
        int(record["ffn_size_inferred"]),
        int(record["vocabulary"]),
        int(record["sequence_length"]),
        dropout=0.1,
        tensor=tensor,
    )
    costs = parts_of(gpt, int(record["micro_batch"]), unfused(), spec)
    return transformer(gpt.name, costs, [costs.layer] * _BLOCKS)
