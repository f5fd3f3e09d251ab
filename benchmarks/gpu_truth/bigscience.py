"""BLOOM's tuning runs: GPT of 18 to 206 billion parameters on 8 to 384 A100, by Megatron-DeepSpeed.

Every layer runs again in its backward, the optimizer's state is sharded over replicas (ZeRO-1), and
nothing overlaps with the all-reduce of gradients. Runs of different software (`era`) are different
jobs.
"""

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
from planner.formats.cluster import Cluster
from planner.formats.own_plan import OwnStage
from planner.formats.profile import Profile
from planner.profiler.estimated.devices import DeviceSpec

BY_DATA_SHEET = 50e9  # bytes per second of a server: four ports of Omni-Path at 100 Gbit/s
_PORTS = 4
_VOCABULARY, _TOKENS = 250_880, 2048

Record = dict[str, str]


def rows() -> Iterator[Row]:
    """Yield the rows that were measured, with links as they were measured."""
    for record in records():
        yield row_of(record, measured_links=True)


def rows_by_data_sheet() -> Iterator[Row]:
    """Yield the same rows with links at the rate of their data sheet."""
    for record in records():
        yield row_of(record, measured_links=False)


def records() -> Iterator[Record]:
    """Yield what the rows are made of, without those that ran out of memory."""
    with (ANCHORS / "bigscience-a100.csv").open(encoding="utf-8") as file:
        for record in csv.DictReader(file):
            if record["outcome"] == "ok":
                yield record


def row_of(record: Record, *, measured_links: bool) -> Row:
    tp, dp, pp, micro = (record[name] for name in ("tp", "dp", "pp", "micro_batch"))
    heads = record["attention_heads"] or record["attention_heads_inferred"]
    source = "bigscience" if measured_links else "bigscience by data sheet"
    return Row(
        source,
        f"{record['job']}, {record['gpus']} A100, batch {record['global_batch']}",
        f"pp {pp}, dp {dp}, tp {tp}, microbatch {micro}, {heads} heads",
        float(record["measured_iteration_seconds"]),
        partial(_predict, record, measured_links),
        spec=device("a100-80gb"),
    )


def one_ring_bytes_per_s() -> float:
    """Return what one all-reduce over all GPUs of four servers reached on a server's links."""
    with (ANCHORS / "bigscience-allreduce.csv").open(encoding="utf-8") as file:
        (measured,) = (row for row in csv.DictReader(file) if row["gpu"] == "A100-80GB")
    return float(measured["bus_bytes_per_s_of_median_inferred"])


def cluster_of(gpus: int, *, measured_links: bool) -> Cluster:
    """Return servers of eight A100 with four ports each.

    One ring reached the rate of less than one port. Several at once have all ports, each at what
    one ring reached: that many were not measured.
    """
    if gpus == 8:
        return servers(gpus, BY_DATA_SHEET)
    if not measured_links:
        return servers(gpus, BY_DATA_SHEET)
    one_ring = one_ring_bytes_per_s()
    cluster = servers(gpus, _PORTS * one_ring)
    inner, outer = cluster.levels
    outer = outer.model_copy(update={"one_ring_bandwidth_bytes_per_s": one_ring})
    return cluster.model_copy(update={"levels": (inner, outer)})


def _predict(record: Record, measured_links: bool, spec: DeviceSpec) -> Prediction:
    tp, dp = int(record["tp"]), int(record["dp"])
    profile = _profile(record, spec)
    cluster = cluster_of(int(record["gpus"]), measured_links=measured_links)
    blocks = [int(count) for count in record["layers_per_stage_inferred"].split()]
    if tp > 1:
        reduces = layer_reduces(sum(blocks), again=True)
        profile = divided(profile, {tp: _profile(record, spec, tp)}, reduces)
        cluster = reducing(cluster, tp, profile.layers[0].outputs[0].output_bytes)
    sharded = dp > 1 and record["zero_level"] != "0"
    stages = [OwnStage(blocks=count, replicas=dp, tensor=tp, sharded=sharded) for count in blocks]
    microbatches = int(record["microbatches_per_replica"]) * dp
    return Prediction(without_overlap(price(profile, cluster, stages, microbatches)))


def _profile(record: Record, spec: DeviceSpec, tensor: int = 1) -> Profile:
    hidden = int(record["hidden_size"] or record["hidden_size_inferred"])
    blocks = sum(int(count) for count in record["layers_per_stage_inferred"].split())
    gpt = Gpt(
        "gpt",
        blocks,
        hidden,
        int(record["attention_heads"] or record["attention_heads_inferred"]),
        4 * hidden,
        _VOCABULARY,
        _TOKENS,
        tensor=tensor,
    )
    costs = parts_of(gpt, int(record["micro_batch"]), half_precision(), spec)
    return transformer(gpt.name, costs, [costs.recomputed(costs.layer)] * blocks)
